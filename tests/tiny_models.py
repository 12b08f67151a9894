"""Tiny random GGUF models: every head size, head ratio and attention flavour that a kvfold cache has to serve.

Weights are scaled so that attention is neither uniform nor one-hot and logits have a spread of a few units: an error in
a key or a value then shows in the logits. Two to four layers, 256 tokens, no tokenizer (token ids go in, logits come
out) unless a GGUF is given to copy one from.

    python tests/tiny_models.py OUTPUT_FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

N_VOCAB = 256

#: In models made with ``extra["nan_token"]`` the keys and values of this token are NaN in every layer.
NAN_TOKEN = N_VOCAB - 1


@dataclass(frozen=True)
class Shape:
    """What a tiny model looks like. ``extra`` depends on the architecture."""

    arch: str = "llama"
    head_dim: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_layer: int = 2
    n_ff: int = 128
    seed: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def n_embd(self) -> int:
        return self.extra_int("n_embd", min(256, self.head_dim * self.n_head))

    def extra_int(self, name: str, default: int) -> int:
        return int(self.extra.get(name, default))


class _Model:
    """A GGUF under construction. Weights are drawn in the order in which they are added."""

    def __init__(self, path: Path, shape: Shape, tokenizer: Path | None) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(shape.seed)
        self.writer = gguf.GGUFWriter(path, shape.arch)
        s, w = shape, self.writer
        w.add_context_length(32768)
        w.add_embedding_length(s.n_embd)
        w.add_block_count(s.n_layer)
        w.add_feed_forward_length(s.n_ff)
        w.add_key_length(s.head_dim)
        w.add_value_length(s.head_dim)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(s.head_dim)
        w.add_rope_freq_base(1e4)
        self.n_vocab = N_VOCAB
        if tokenizer is None:
            w.add_tokenizer_model("none")
            w.add_vocab_size(self.n_vocab)
        else:
            self.n_vocab = _copy_tokenizer(tokenizer, w)

    def matrix(self, name: str, *shape: int, gain: float = 1.0, nan_row: int | None = None) -> None:
        """A weight of ``[..., out, in]`` whose outputs have ``gain`` times the spread of its inputs."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(gain / np.sqrt(shape[-1]))
        if nan_row is not None:
            values[nan_row] = np.nan
        self.writer.add_tensor(name, values.astype(np.float16) if shape[-1] % 32 == 0 else values)

    def vector(self, name: str, size: int, value: float | None = None, spread: float = 0.1) -> None:
        values = self.rng.standard_normal(size) * spread if value is None else np.full(size, value)
        self.writer.add_tensor(name, values.astype(np.float32))

    def heads(self, kv: int | list[int] | None = None) -> None:
        self.writer.add_head_count(self.shape.n_head)
        self.writer.add_head_count_kv(self.shape.n_head_kv if kv is None else kv)

    def embedding(self, output: bool = True, norm: str = "output_norm.weight") -> None:
        s = self.shape
        gain = np.sqrt(s.n_embd) * (1.0 if output else 0.15)
        nan_row = NAN_TOKEN if "nan_token" in s.extra else None
        self.matrix("token_embd.weight", self.n_vocab, s.n_embd, gain=gain, nan_row=nan_row)
        self.vector(norm, s.n_embd, 1.0)
        if output:
            self.matrix("output.weight", self.n_vocab, s.n_embd, gain=2.0)

    def attention(self, i: int, qk_norm: bool = False, bias: bool = False) -> None:
        s, p = self.shape, f"blk.{i}."
        self.vector(p + "attn_norm.weight", s.n_embd, 1.0)
        gain = s.extra.get("qk_gain", 1.5)
        self.matrix(p + "attn_q.weight", s.n_head * s.head_dim, s.n_embd, gain=gain)
        self.matrix(p + "attn_k.weight", s.n_head_kv * s.head_dim, s.n_embd, gain=gain)
        self.matrix(p + "attn_v.weight", s.n_head_kv * s.head_dim, s.n_embd, gain=1.5)
        self.matrix(p + "attn_output.weight", s.n_embd, s.n_head * s.head_dim, gain=1.5)
        if qk_norm:
            self.vector(p + "attn_q_norm.weight", s.head_dim, 1.5)
            self.vector(p + "attn_k_norm.weight", s.head_dim, 1.5)
        if bias:
            self.vector(p + "attn_q.bias", s.n_head * s.head_dim)
            self.vector(p + "attn_v.bias", s.n_head_kv * s.head_dim)

    def feed_forward(self, i: int) -> None:
        s, p = self.shape, f"blk.{i}."
        self.vector(p + "ffn_norm.weight", s.n_embd, 1.0)
        self.matrix(p + "ffn_gate.weight", s.n_ff, s.n_embd)
        self.matrix(p + "ffn_up.weight", s.n_ff, s.n_embd)
        self.matrix(p + "ffn_down.weight", s.n_embd, s.n_ff)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _copy_tokenizer(source: Path, w: gguf.GGUFWriter) -> int:
    """Copy the tokenizer of another GGUF; returns the size of its vocabulary."""
    n_vocab = 0
    for key, entry in gguf.GGUFReader(source).fields.items():
        if not key.startswith("tokenizer."):
            continue
        kind = entry.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            w.add_array(key, entry.contents())
            if key == "tokenizer.ggml.tokens":
                n_vocab = len(entry.data)
        else:
            w.add_key_value(key, entry.contents(), kind)
    return n_vocab


def _llama(m: _Model) -> None:
    m.heads()
    m.embedding()
    for i in range(m.shape.n_layer):
        m.attention(i)
        m.feed_forward(i)


def _qwen2(m: _Model) -> None:
    """Qwen2 with huge biases on four key channels of the first and the last layer (``extra["key_bias"]``).

    Trained models have them on channels that the rotary embedding turns slowly; ``extra["fast"]`` puts them on any.
    """
    s = m.shape
    m.heads()
    m.embedding()
    for i in range(s.n_layer):
        m.attention(i, bias=True)
        bias = np.zeros(s.n_head_kv * s.head_dim, np.float32)
        if i in (0, s.n_layer - 1):
            channel = np.arange(len(bias)) % s.head_dim % (s.head_dim // 2)  # index of its rotary frequency
            candidates = np.arange(len(bias)) if "fast" in s.extra else np.flatnonzero(channel >= s.head_dim * 3 // 8)
            bias[m.rng.choice(candidates, 4, replace=False)] = s.extra.get("key_bias", 0.0)
        m.writer.add_tensor(f"blk.{i}.attn_k.bias", bias)
        m.feed_forward(i)


def _qwen2vl(m: _Model) -> None:
    """Qwen2-VL's text half: all patches of an image have the same (temporal) position."""
    m.heads()
    m.writer.add_rope_dimension_sections([8, 12, 12, 0])
    m.embedding()
    for i in range(m.shape.n_layer):
        m.attention(i, bias=True)
        m.vector(f"blk.{i}.attn_k.bias", m.shape.n_head_kv * m.shape.head_dim)
        m.feed_forward(i)


def _qwen3(m: _Model) -> None:
    m.heads()
    m.embedding()
    for i in range(m.shape.n_layer):
        m.attention(i, qk_norm=True)
        m.feed_forward(i)


def _gemma(m: _Model) -> None:
    """Gemma 3 or Gemma 2: alternating sliding-window and global layers; Gemma 2 caps its attention logits."""
    s = m.shape
    m.heads()
    m.writer.add_sliding_window(s.extra_int("window", 32))
    m.writer.add_sliding_window_pattern(2)
    if s.arch == "gemma2":
        m.writer.add_attn_logit_softcapping(s.extra.get("softcap", 5.0))
        m.writer.add_final_logit_softcapping(30.0)
    m.embedding(output=False)
    for i in range(s.n_layer):
        m.attention(i, qk_norm=s.arch == "gemma3")
        # Large post norms: the output is tied to the embedding, and a token must not simply predict itself.
        m.vector(f"blk.{i}.post_attention_norm.weight", s.n_embd, 8.0)
        m.feed_forward(i)
        m.vector(f"blk.{i}.post_ffw_norm.weight", s.n_embd, 8.0)


def _gpt_oss(m: _Model) -> None:
    """gpt-oss: attention sinks, alternating windows, experts (all used: rounding must not reroute a token)."""
    s, experts, n_ff = m.shape, 4, 64
    m.heads()
    m.writer.add_sliding_window(s.extra_int("window", 32))
    m.writer.add_expert_count(experts)
    m.writer.add_expert_used_count(experts)
    m.writer.add_expert_feed_forward_length(n_ff)
    m.embedding()
    for i in range(s.n_layer):
        p = f"blk.{i}."
        m.attention(i, bias=True)
        m.vector(p + "attn_k.bias", s.n_head_kv * s.head_dim)
        m.vector(p + "attn_output.bias", s.n_embd)
        m.vector(p + "attn_sinks.weight", s.n_head, spread=1.0)
        m.vector(p + "post_attention_norm.weight", s.n_embd, 1.0)
        m.writer.add_tensor(p + "ffn_gate_inp.weight", m.rng.standard_normal((experts, s.n_embd), dtype=np.float32))
        m.vector(p + "ffn_gate_inp.bias", experts)
        for name, rows, columns in (("gate", n_ff, s.n_embd), ("up", n_ff, s.n_embd), ("down", s.n_embd, n_ff)):
            m.matrix(p + f"ffn_{name}_exps.weight", experts, rows, columns)
            bias = m.rng.standard_normal((experts, rows), dtype=np.float32) * np.float32(0.1)
            m.writer.add_tensor(p + f"ffn_{name}_exps.bias", bias)


def _lfm2(m: _Model) -> None:
    """LFM2, a hybrid: even layers are short convolutions with a recurrent state, odd ones attention."""
    s, taps = m.shape, 3
    m.heads(kv=[0 if i % 2 == 0 else s.n_head_kv for i in range(s.n_layer)])
    m.writer.add_shortconv_l_cache(taps)
    m.embedding(norm="token_embd_norm.weight")
    for i in range(s.n_layer):
        p = f"blk.{i}."
        if i % 2:
            m.attention(i, qk_norm=True)
        else:
            m.vector(p + "attn_norm.weight", s.n_embd, 1.0)
            m.matrix(p + "shortconv.conv.weight", s.n_embd, taps)
            m.matrix(p + "shortconv.in_proj.weight", 3 * s.n_embd, s.n_embd)
            m.matrix(p + "shortconv.out_proj.weight", s.n_embd, s.n_embd)
        m.feed_forward(i)


def _mpt(m: _Model) -> None:
    """MPT: ALiBi positions, which a kvfold cache refuses."""
    s = m.shape
    m.heads(kv=s.n_head)
    m.writer.add_layer_norm_eps(1e-5)
    m.writer.add_max_alibi_bias(8.0)
    m.embedding()
    for i in range(s.n_layer):
        p = f"blk.{i}."
        m.vector(p + "attn_norm.weight", s.n_embd, 1.0)
        m.matrix(p + "attn_qkv.weight", 3 * s.n_embd, s.n_embd)
        m.matrix(p + "attn_output.weight", s.n_embd, s.n_embd)
        m.vector(p + "ffn_norm.weight", s.n_embd, 1.0)
        m.matrix(p + "ffn_up.weight", s.n_ff, s.n_embd)
        m.matrix(p + "ffn_down.weight", s.n_embd, s.n_ff)


def _deepseek2(m: _Model) -> None:
    """DeepSeek 2: multi-head latent attention, which a kvfold cache refuses."""
    s, rope, nope, value, q_rank, kv_rank = m.shape, 64, 64, 64, 64, 64
    w = m.writer
    w.add_head_count(s.n_head)
    w.add_head_count_kv(1)
    w.kv_data[0].pop(f"{s.arch}.attention.key_length")
    w.kv_data[0].pop(f"{s.arch}.attention.value_length")
    w.kv_data[0].pop(f"{s.arch}.rope.dimension_count")
    w.add_key_length(kv_rank + rope)
    w.add_value_length(kv_rank)
    w.add_rope_dimension_count(rope)
    w.add_key_length_mla(nope + rope)
    w.add_value_length_mla(value)
    w.add_q_lora_rank(q_rank)
    w.add_kv_lora_rank(kv_rank)
    w.add_leading_dense_block_count(s.n_layer)
    w.add_expert_count(2)
    w.add_expert_used_count(1)
    w.add_expert_shared_count(1)
    w.add_expert_feed_forward_length(32)
    m.embedding()
    for i in range(s.n_layer):
        p = f"blk.{i}."
        m.vector(p + "attn_norm.weight", s.n_embd, 1.0)
        m.vector(p + "attn_q_a_norm.weight", q_rank, 1.0)
        m.vector(p + "attn_kv_a_norm.weight", kv_rank, 1.0)
        m.matrix(p + "attn_q_a.weight", q_rank, s.n_embd)
        m.matrix(p + "attn_q_b.weight", s.n_head * (nope + rope), q_rank)
        m.matrix(p + "attn_kv_a_mqa.weight", kv_rank + rope, s.n_embd)
        m.matrix(p + "attn_k_b.weight", s.n_head, kv_rank, nope)
        m.matrix(p + "attn_v_b.weight", s.n_head, value, kv_rank)
        m.matrix(p + "attn_output.weight", s.n_embd, s.n_head * value)
        m.feed_forward(i)


_BUILDERS: dict[str, Callable[[_Model], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2vl,
    "qwen3": _qwen3,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "mpt": _mpt,
    "deepseek2": _deepseek2,
}

#: Models that a kvfold cache serves.
GOOD: dict[str, Shape] = {
    "llama-64-mha": Shape(n_head=4, n_head_kv=4, seed=1),
    "llama-64-mha-2": Shape(n_head=4, n_head_kv=4, seed=14),  # same shape, other weights
    "llama-64-nan": Shape(n_head=4, n_head_kv=2, seed=15, extra={"nan_token": 1}),
    "llama-128-nan": Shape(head_dim=128, n_head=3, n_head_kv=1, seed=16, extra={"nan_token": 1}),
    "llama-64-gqa3": Shape(n_head=9, n_head_kv=3, seed=2),
    "llama-64-gqa4": Shape(n_head=4, n_head_kv=1, seed=3),
    "llama-64-gqa8": Shape(n_head=8, n_head_kv=1, seed=4),
    "llama-128-gqa3": Shape(head_dim=128, n_head=3, n_head_kv=1, seed=5),
    "llama-128-gqa4": Shape(head_dim=128, n_head=8, n_head_kv=2, seed=6),
    "llama-256-gqa2": Shape(head_dim=256, n_head=4, n_head_kv=2, seed=7),
    # Queries are weaker here: it is the bias that must make the scores.
    "qwen2-bias0": Shape(arch="qwen2", seed=8, extra={"qk_gain": 0.8}),
    "qwen2-bias30": Shape(arch="qwen2", seed=8, extra={"qk_gain": 0.8, "key_bias": 30.0}),
    "qwen2-bias300": Shape(arch="qwen2", seed=8, extra={"qk_gain": 0.8, "key_bias": 300.0}),
    "qwen2-bias300-fast": Shape(arch="qwen2", seed=8, extra={"qk_gain": 0.8, "key_bias": 300.0, "fast": 1}),
    "qwen2vl-64": Shape(arch="qwen2vl", seed=17),
    "qwen3-128-gqa4": Shape(arch="qwen3", head_dim=128, n_head=4, n_head_kv=1, seed=9),
    "gemma3-256-iswa": Shape(arch="gemma3", head_dim=256, n_head=4, n_head_kv=1, n_layer=4, seed=10),
    "gemma2-64-softcap": Shape(arch="gemma2", n_head=4, n_head_kv=2, n_layer=4, seed=11),
    "gpt-oss-64-sinks": Shape(arch="gpt-oss", n_head=8, n_head_kv=2, n_layer=4, seed=12),
    "lfm2-64-hybrid": Shape(arch="lfm2", n_head=4, n_head_kv=2, n_layer=4, seed=13),
}

#: Models that load with an f16 cache and that a kvfold cache refuses, with a word its message must contain.
REFUSED: dict[str, tuple[Shape, str]] = {
    "llama-80": (Shape(head_dim=80, n_head=4, n_head_kv=2, seed=20, extra={"n_embd": 320}), "80"),
    "llama-96": (Shape(head_dim=96, n_head=4, n_head_kv=2, seed=21, extra={"n_embd": 384}), "96"),
    "llama-100": (Shape(head_dim=100, n_head=4, n_head_kv=2, seed=22, extra={"n_embd": 400}), "100"),
    "mpt-alibi": (Shape(arch="mpt", head_dim=64, n_head=4, n_head_kv=4, seed=23), "ALiBi"),
    "deepseek2-mla": (Shape(arch="deepseek2", head_dim=128, n_head=4, n_head_kv=1, seed=24), "MLA"),
}


def write(path: Path, shape: Shape, tokenizer: Path | None = None) -> Path:
    """Write a model of the given shape, with the tokenizer of the GGUF ``tokenizer`` if there is one."""
    model = _Model(path, shape, tokenizer)
    _BUILDERS[shape.arch](model)
    model.close()
    return path


def write_named(folder: Path, name: str) -> Path:
    """Write (once) one of :data:`GOOD` or :data:`REFUSED` into ``folder``."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        shape = GOOD[name] if name in GOOD else REFUSED[name][0]
        write(path, shape)
    return path


def write_damaged(folder: Path) -> dict[str, Path]:
    """Files that are no valid GGUF: cut off, empty, wrong magic, wrong version."""
    whole = write_named(folder, "llama-64-mha").read_bytes()
    damaged = {
        "half": whole[: len(whole) // 2],
        "header-only": whole[:200],
        "empty": b"",
        "magic": b"GGML" + whole[4:2000],
        "version": whole[:4] + b"\xff\x00\x00\x00" + whole[8:2000],
    }
    paths = {}
    for name, data in damaged.items():
        paths[name] = folder / f"damaged-{name}.gguf"
        paths[name].write_bytes(data)
    return paths


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for each in (*GOOD, *REFUSED):
        print(write_named(target, each))
    for each in write_damaged(target).values():
        print(each)
