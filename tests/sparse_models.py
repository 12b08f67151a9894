"""GGUF files with the header of a real model and no weights: a hole in the file stands for them, which reads as zeros.

They take no room on the disk, load like the real thing, and have its sizes.

    python tests/sparse_models.py llama-8b OUT.gguf
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model as its publisher gives them."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int = 131072
    window: int = 0
    tied: bool = False


SHAPES = {
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True),
    "gemma3-4b": Shape("gemma3", 34, 2560, 8, 4, 256, 10240, 262208, window=1024, tied=True),
}

_Q4_0 = gguf.GGMLQuantizationType.Q4_0


def write(path: Path, name: str, layers: int | None = None) -> Path:
    """Write the header of a model (all layers, or the first few) with matrices in Q4_0, and a hole behind it."""
    s = SHAPES[name]
    n_layer = layers or s.n_layer
    writer = gguf.GGUFWriter(path, s.arch)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(s.n_ff)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(s.head_dim)
    if s.window:
        writer.add_sliding_window(s.window)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(s.n_vocab)

    size = 0

    def tensor(tensor_name: str, *shape: int) -> None:
        nonlocal size
        values = 1
        for n in shape:
            values *= n
        vector = len(shape) == 1
        bytes_ = values * 4 if vector else values // 32 * 18
        kind = gguf.GGMLQuantizationType.F32 if vector else _Q4_0
        writer.add_tensor_info(tensor_name, shape, "float32", bytes_, raw_dtype=kind)
        size += -(-bytes_ // 32) * 32

    tensor("token_embd.weight", s.n_vocab, s.n_embd)
    tensor("output_norm.weight", s.n_embd)
    if not s.tied:
        tensor("output.weight", s.n_vocab, s.n_embd)
    for i in range(n_layer):
        p = f"blk.{i}."
        for norm in (
            "attn_norm",
            "ffn_norm",
            *(("post_attention_norm", "post_ffw_norm") if s.arch == "gemma3" else ()),
        ):
            tensor(f"{p}{norm}.weight", s.n_embd)
        if s.arch in ("qwen3", "gemma3"):
            tensor(p + "attn_q_norm.weight", s.head_dim)
            tensor(p + "attn_k_norm.weight", s.head_dim)
        tensor(p + "attn_q.weight", s.n_head * s.head_dim, s.n_embd)
        tensor(p + "attn_k.weight", s.n_head_kv * s.head_dim, s.n_embd)
        tensor(p + "attn_v.weight", s.n_head_kv * s.head_dim, s.n_embd)
        tensor(p + "attn_output.weight", s.n_embd, s.n_head * s.head_dim)
        tensor(p + "ffn_gate.weight", s.n_ff, s.n_embd)
        tensor(p + "ffn_up.weight", s.n_ff, s.n_embd)
        tensor(p + "ffn_down.weight", s.n_embd, s.n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with open(path, "r+b") as file:
        file.truncate(start + size)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: sparse_models.py {'|'.join(SHAPES)} OUT.gguf")
    write(Path(sys.argv[2]), sys.argv[1])
