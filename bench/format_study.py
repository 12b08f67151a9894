"""What other formats of the far rows would cost, on rows of a real model, in NumPy.

    format_study.py MODEL.gguf TEXT [--tokens 2048] [--kld MODEL_F32.gguf] [--cache DIR]

Keys and values of the layers that keep the whole context are read from an f16 cache after TOKENS tokens of the text,
and coded as the cache codes them: Hadamard, keys as differences to their group of 4, E2M1 values with the best of ten
scales. Variants: scale groups of 16, 32 and 64 channels, and a second FP4 pass on the eighth of each head's channels
with the largest error, chosen on the first half of the tokens and measured, as everything, on the second.

Printed: bits a value, everything counted (scales, summaries, spreads, residuals), and the squared error as a share of
the rows' variance. With --kld also the divergence of the next-token distribution over 128 tokens after the text,
everything read, for a Llama-architecture model with float32 weights (see sparse_quality.py).
"""

from __future__ import annotations

import argparse
import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sparse_quality import Coded, Model, Rule, SparseAttention, cached_prefix, hadamard, tokens_of

GROUP = 4  # tokens that share a summary key
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2


@dataclass(frozen=True)
class Format:
    """Channels a scale; whether a second pass repairs an eighth of the channels of keys, of values; whether rotated."""

    name: str
    scale_group: int = 16
    residual_keys: bool = False
    residual_values: bool = False
    rotated: bool = True

    def bits(self, head_dim: int) -> tuple[float, float]:
        """Of a key's value and of a value's."""
        row = 4 + 8 / self.scale_group
        more = (4 + 8 / min(16, head_dim // 8)) / 8
        keys = row + row / GROUP + 16 / (GROUP * head_dim)
        return keys + more * self.residual_keys, row + more * self.residual_values


FORMATS = [
    Format("as it is"),
    Format("scales of 32 channels", 32),
    Format("scales of 64 channels", 64),
    Format("residual of keys", residual_keys=True),
    Format("residual of values", residual_values=True),
    Format("scales of 64, residual of keys", 64, residual_keys=True),
    Format("not rotated", rotated=False),
    Format("not rotated, residual of keys", residual_keys=True, rotated=False),
    Format("not rotated, residual of both", residual_keys=True, residual_values=True, rotated=False),
]


class Fp4:
    """FP4 with scales of any number of channels; the scales are the cache's."""

    def __init__(self, core) -> None:
        scales = np.asarray(core.fp4_scales(), np.float32)
        self.scales = np.unique(scales[np.isfinite(scales) & (scales > 0)])

    def __call__(self, x: np.ndarray, group: int) -> np.ndarray:
        """Rows as they are decoded."""
        flat = np.ascontiguousarray(x, np.float32).reshape(-1, group)
        start = np.searchsorted(self.scales, np.abs(flat).max(axis=1) / 6)
        best = np.zeros_like(flat)
        least = np.full(len(flat), np.inf, np.float32)
        for step in range(-3, 7):  # the largest value as 6 or as 4, and around
            scale = self.scales[np.clip(start + step, 0, len(self.scales) - 1)][:, None]
            codes = np.searchsorted(MIDDLES, np.abs(flat) / scale)
            decoded = np.copysign(VALUES[codes] * scale, flat)
            error = ((decoded - flat) ** 2).sum(axis=1)
            better = error < least
            least[better], best[better] = error[better], decoded[better]
        return best.reshape(x.shape)


def repaired(fp4: Fp4, x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """With a second pass on the channels that have the largest error over the first half of the tokens."""
    n, head_dim = x.shape[-2:]
    rest = x - decoded
    error = (rest[..., : n // 2, :] ** 2).mean(axis=-2, keepdims=True)
    channels = np.argsort(-error, axis=-1)[..., : head_dim // 8]
    part = np.take_along_axis(rest, np.broadcast_to(channels, (*x.shape[:-1], head_dim // 8)), axis=-1)
    second = np.zeros_like(x)
    np.put_along_axis(second, np.broadcast_to(channels, part.shape), fp4(part, min(16, head_dim // 8)), axis=-1)
    return decoded + second


def turned(x: np.ndarray, size: int) -> np.ndarray:
    return (x.reshape(*x.shape[:-1], -1, size) @ hadamard(size)).reshape(x.shape)


def encode(fp4: Fp4, keys: np.ndarray, values: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """Decoded keys and values, ``[n_layer, n_head_kv, n, head_dim]``, in the basis they were given in."""
    sizes = (keys.shape[-1], 64) if form.rotated else (0, 0)
    k, v = (turned(x, size) if size else x for x, size in zip((keys, values), sizes, strict=True))
    n = k.shape[-2] // GROUP
    groups = k.reshape(*k.shape[:2], n, GROUP, k.shape[-1])
    summary = fp4(groups.mean(axis=3, keepdims=True), form.scale_group)
    k_decoded = (summary + fp4(groups - summary, form.scale_group)).reshape(k.shape)
    v_decoded = fp4(v, form.scale_group)
    if form.residual_keys:
        k_decoded = repaired(fp4, k, k_decoded)
    if form.residual_values:
        v_decoded = repaired(fp4, v, v_decoded)
    return tuple(turned(x, size) if size else x for x, size in zip((k_decoded, v_decoded), sizes, strict=True))


def error_share(exact: np.ndarray, decoded: np.ndarray) -> float:
    """Mean over layers and heads of squared error over variance, on the second half of the tokens."""
    half = exact.shape[2] // 2
    x, y = exact[:, :, half:], decoded[:, :, half:]
    return float((((x - y) ** 2).mean(axis=(2, 3)) / x.var(axis=2).mean(axis=-1)).mean())


def cache_rows(path: Path, text: Path, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values ``[n_layer, n_head_kv, n, head_dim]`` of the layers that keep the whole context."""
    import llama_cpp

    from kvfold.gguf_header import read_gguf_header
    from kvfold.verify.scoring import REFERENCE, extend, open_model, tokenize

    llm = open_model(path, REFERENCE, n_tokens, None, 0)
    tokens = tokenize(llm, text.read_text(encoding="utf-8"))[:n_tokens]
    for _ in extend(llm, tokens, 0, len(tokens)):
        pass
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    buffer = (ctypes.c_uint8 * size)()
    data = bytes(buffer[: llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, size, 0)])
    llm.close()
    head_dim = int(read_gguf_header(path).arch("attention.key_length") or 64)
    # Magic, sequence, streams, cells; three words a cell; transposed, layers; of each layer: type, row size, rows.
    cells = struct.unpack_from("<4I", data, 0)[3]
    at = 16 + 12 * cells
    transposed, n_layer = struct.unpack_from("<II", data, at)
    assert cells == len(tokens) and not transposed
    at += 8
    found = []
    for _ in range(2 * n_layer):
        kind, row = struct.unpack_from("<iQ", data, at)
        assert kind == 1, "f16"
        rows = np.frombuffer(data, np.float16, cells * row // 2, at + 12).astype(np.float32)
        found.append(rows.reshape(cells, -1, head_dim).swapaxes(0, 1))
        at += 12 + cells * row
    return np.stack(found[:n_layer]), np.stack(found[n_layer:])


def divergences(options: argparse.Namespace, fp4: Fp4) -> list[float]:
    """Of every format, on a model whose attention is computed here."""
    model = Model(options.kld)
    options.cache.mkdir(parents=True, exist_ok=True)
    n, scored = options.tokens, 128
    named = argparse.Namespace(model=options.kld, text=options.text)
    window = tokens_of(named, n + scored)
    keys, values = cached_prefix(model, window[:n], options.cache)
    empty = np.zeros((1, 1, 1, 1), np.float32)

    def run(k: np.ndarray, v: np.ndarray, tail: int) -> np.ndarray:
        coded = Coded(GROUP, turned(k, 64), turned(v, 64), empty, empty, empty)
        attention = SparseAttention(model, coded, keys, values, Rule("", look=None, tail=tail))
        return model.log_probabilities(model.run(window[n:], n, attention))

    exact = run(keys, values, 1 << 30)
    found = []
    for form in FORMATS:
        got = run(*encode(fp4, keys, values, form), 128)
        found.append(float((np.exp(exact) * (exact - got)).sum(axis=1).mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--kld", type=Path, metavar="MODEL_F32", help="also the divergence, of this model")
    parser.add_argument("--cache", type=Path, default=Path("sparse_quality_cache"))
    options = parser.parse_args()
    from kvfold import _runtime

    fp4 = Fp4(_runtime.load())
    keys, values = cache_rows(options.model, options.text, options.tokens)
    klds = divergences(options, fp4) if options.kld else [float("nan")] * len(FORMATS)
    print("| format | bits of keys, values | error of keys | of values | KL divergence |\n|---|---|---|---|---|")
    for form, kld in zip(FORMATS, klds, strict=True):
        bits = form.bits(keys.shape[-1])
        k, v = encode(fp4, keys, values, form)
        print(
            f"| {form.name} | {bits[0]:.2f}, {bits[1]:.2f} | {100 * error_share(keys, k):.2f} % | "
            f"{100 * error_share(values, v):.2f} % | {kld:.5f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
