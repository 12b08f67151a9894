#!/usr/bin/env python3
"""Write a GGUF of a real model's shape with random Q4_0 weights: speed and memory do not depend on the values.

usage: synth_gguf.py SHAPE OUT.gguf [--layers N]

The file has no vocabulary; llama-bench takes it as it is. An 8B file (4.5 GB) takes about 15 s. Needs the `gguf`
package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import gguf
import numpy as np


class Shape(NamedTuple):
    """Dimensions as published with the model.

    ``window`` tokens are seen by all layers but every ``pattern``-th one (0: every layer sees the whole context).
    ``tied``: the embeddings serve for the output too.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    arch: str
    rope_base: float
    window: int = 0
    pattern: int = 0
    tied: bool = False

    def sees_all(self, layer: int) -> bool:
        """Whether a layer sees the whole context."""
        return not self.window or layer % self.pattern == self.pattern - 1


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152, "llama", 1e5),
    "llama-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, "llama", 5e5),
    "llama-1b-head128": Shape(16, 2048, 16, 4, 128, 8192, 32000, "llama", 5e5),
    "llama-3b": Shape(28, 3072, 24, 8, 128, 8192, 128256, "llama", 5e5),
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, "llama", 5e5),
    "qwen3-4b": Shape(36, 2560, 32, 8, 128, 9728, 151936, "qwen3", 1e6, tied=True),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, "qwen3", 1e6),
    "gemma3-4b": Shape(34, 2560, 8, 4, 256, 10240, 262208, "gemma3", 1e6, window=1024, pattern=6, tied=True),
}
CONTEXT = 131072


def describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Writes the header's settings."""
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("none")
    writer.add_file_type(2)
    if shape.window:  # as in Gemma's own files, the pattern is llama.cpp's for the architecture
        writer.add_sliding_window(shape.window)


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of a model's tensors and their axes: (rows, columns), or (values,) of a norm."""
    yield "token_embd.weight", (shape.vocabulary, shape.width)
    if not shape.tied:
        yield "output.weight", (shape.vocabulary, shape.width)
    yield "output_norm.weight", (shape.width,)
    norms = ["attn_norm", "ffn_norm"]
    if shape.arch == "gemma3":
        norms += ["post_attention_norm", "post_ffw_norm"]
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    for i in range(shape.layers):
        block = f"blk.{i}."
        for norm in norms:
            yield f"{block}{norm}.weight", (shape.width,)
        if shape.arch in ("qwen3", "gemma3"):
            yield block + "attn_q_norm.weight", (shape.head,)
            yield block + "attn_k_norm.weight", (shape.head,)
        yield block + "attn_q.weight", (queries, shape.width)
        yield block + "attn_k.weight", (keys, shape.width)
        yield block + "attn_v.weight", (keys, shape.width)
        yield block + "attn_output.weight", (shape.width, queries)
        yield block + "ffn_gate.weight", (shape.ffn, shape.width)
        yield block + "ffn_up.weight", (shape.ffn, shape.width)
        yield block + "ffn_down.weight", (shape.width, shape.ffn)


def write(shape: Shape, path: str, seed: int = 0) -> None:
    writer = gguf.GGUFWriter(path, shape.arch)
    describe(writer, shape)

    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, size=(1 << 20, 18), dtype=np.uint8)  # Q4_0 blocks: f16 scale, 16 bytes
    pool[:, :2] = (rng.standard_normal(1 << 20) * 0.01).astype(np.float16).view(np.uint8).reshape(-1, 2)
    for name, axes in tensors(shape):
        if len(axes) == 1:
            writer.add_tensor(name, np.ones(axes, np.float32))
            continue
        rows, columns = axes
        blocks = np.resize(np.roll(pool, int(rng.integers(0, 1 << 20)), axis=0), (rows * columns // 32, 18))
        data = blocks.reshape(rows, columns // 32 * 18)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    write(shape._replace(layers=args.layers or shape.layers), args.out)


if __name__ == "__main__":
    main()
