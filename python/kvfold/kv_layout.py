"""How large a key/value cache is, computed from the GGUF header: the sizes that the runtime will allocate, to the byte.

The rules are those of the runtime: ``cpp/cache/cell_groups.cpp`` (cells), ``cpp/cache/near_pool.h`` (exact rows),
``cpp/ops/graph_node.h`` (what stands beside the rows), and llama.cpp's for windows and padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .config import SPAN_TOKENS, KvConfig
from .gguf_header import GgufHeader

#: Values and bytes of one block of each cache type.
_BLOCKS: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "iq4_nl": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}
#: Values and bytes of one block of a summary: 64 values in 32 bytes, and a scale for every 16.
_SUMMARY_BLOCK = (64, 36)
#: Those of ggml's quantised types. (Rows with a scale for 32 or 64 channels are plain bytes to it.)
_PADDED_BLOCKS = {_SUMMARY_BLOCK, *(block for block in _BLOCKS.values() if block[0] > 1)}

# llama.cpp rounds contexts and window caches up to this many cells.
_CELL_PADDING = 256
# Queries that scores keep a sample of (cpp/ops/kv_sample.h).
_SAMPLES = {"snapkv": 32, "entropy": 48}
# Where the exact rows start behind the summaries of a layer.
_NEAR_ALIGNMENT = 64


class UnknownLayout(ValueError):
    """The header does not say, or this module does not know, which layers keep what; only the runtime can tell."""


@dataclass(frozen=True)
class CacheLayer:
    """One layer that keeps keys and values.

    Attributes:
        index: number of the layer.
        n_head_kv: key/value heads.
        head_k, head_v: channels per key and value head.
        window: tokens of its sliding window, 0 for a layer that keeps the whole context.
        n_head: query heads.
    """

    index: int
    n_head_kv: int
    head_k: int
    head_v: int
    window: int = 0
    n_head: int = 0


@dataclass(frozen=True)
class BufferRules:
    """What a backend adds to a tensor's bytes.

    Attributes:
        alignment: every tensor starts at a multiple of this many bytes.
        row_padding: quantised tensors whose rows are no multiple of this many values get one padded row more (0: none).
    """

    alignment: int
    row_padding: int = 0


CPU_BUFFERS = BufferRules(alignment=32)
CUDA_BUFFERS = BufferRules(alignment=128, row_padding=512)


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache, everything included.

    Attributes:
        far: rows of the whole-context layers (of kvfold types: the FP4 rows).
        side: summaries and spreads, near: exact rows, window: sliding-window layers; 0 where there are none.
        padding: between tensors.
        f16: what an f16 cache of this context with sliding windows takes, the base of all ratios.
        n_cells: cells of the whole-context layers.
        by_layer: bytes by number of the layer.
    """

    far: int
    side: int
    near: int
    window: int
    padding: int
    f16: int
    n_cells: int
    by_layer: dict[int, int]

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.far + self.side + self.near + self.window + self.padding


def row_block(config: KvConfig) -> tuple[int, int]:
    """Values and bytes of one block of the rows of the layers that keep the whole context."""
    return (64, 32 + 64 // int(config.scale_group or 16)) if config.folds else _BLOCKS[config.kv_type]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _row_bytes(block: tuple[int, int], values: int) -> int:
    if values % block[0] != 0:
        raise UnknownLayout(f"rows of {values} values do not divide into blocks of {block[0]}")
    return values // block[0] * block[1]


def _tensor_bytes(block: tuple[int, int], values: int, rows: int, rules: BufferRules) -> tuple[int, int]:
    """Bytes of the rows, and bytes allocated for them."""
    size = _row_bytes(block, values) * rows
    extra = 0
    if rules.row_padding and block in _PADDED_BLOCKS and values % rules.row_padding:
        extra = _row_bytes(block, rules.row_padding - values % rules.row_padding)
    return size, _round_up(size + extra, rules.alignment)


def padded_context(n_ctx: int) -> int:
    """The context llama.cpp makes of ``n_ctx`` tokens."""
    return _round_up(n_ctx, _CELL_PADDING)


def effective_batch(n_ctx: int, n_batch: int, n_ubatch: int) -> int:
    """The micro-batch that a context really uses: neither larger than the batch nor than the context."""
    return min(n_ubatch, n_batch, n_ctx)


def cache_size(
    layers: list[CacheLayer],
    config: KvConfig,
    n_ctx: int,
    *,
    n_ubatch: int = 512,
    n_seq: int = 1,
    swa_full: bool = False,
    rules: BufferRules = CPU_BUFFERS,
) -> CacheSize:
    """The size of a cache for ``n_ctx`` tokens shared by ``n_seq`` sequences.

    Args:
        layers: from ``cache_layers``.
        config: kv type and its settings.
        n_ctx: tokens; rounded up as llama.cpp does.
        n_ubatch: micro-batch, which windows have room for.
        n_seq: sequences at a time (server slots), one cache for all of them.
        swa_full: window layers keep the whole context.
        rules: of the backend that holds the cache.
    """
    tokens = padded_context(n_ctx)
    ubatch = effective_batch(n_ctx, n_ctx, n_ubatch)
    sizes = _Sum(rules)
    n_cells = tokens
    near_rows = spans = 0
    if config.folds:
        group, tail, sinks = (int(v or 0) for v in (config.group, config.tail, config.sinks))
        stored = stored_tokens(config, tokens, n_seq)
        ubatch = min(ubatch, largest_ubatch(config, tokens, n_seq))
        n_cells = (-(-stored // group) + 1 + 2 * (n_seq - 1)) * group
        near_rows = min(n_cells, n_seq * (tail + group - 1 + sinks))
        spans = span_count(config, stored, n_cells) if rules is CPU_BUFFERS else 0  # a GPU searches in one level
    for layer in layers:
        if layer.window:
            room = _round_up(min(tokens, layer.window * n_seq + ubatch), _CELL_PADDING)
            cells = tokens if swa_full else room
            kept = config.swa_type if config.folds else config.kv_type
            sizes.add("window", layer, _BLOCKS[str(kept)], cells)
            sizes.f16 += 2 * layer.n_head_kv * (layer.head_k + layer.head_v) * (cells if config.folds else room)
            continue
        sizes.add("far", layer, row_block(config), n_cells)
        sizes.f16 += 2 * layer.n_head_kv * (layer.head_k + layer.head_v) * tokens
        if config.folds:
            sizes.add_tier(layer, n_cells // group, spans, near_rows)
            if stored < tokens:
                sizes.add_queries(layer, str(config.score).split("+"))
    return CacheSize(**sizes.parts, f16=sizes.f16, n_cells=n_cells, by_layer=sizes.by_layer)


class _Sum:
    """Adds tensors up by what they are for and by layer."""

    def __init__(self, rules: BufferRules) -> None:
        self.rules = rules
        self.parts = dict.fromkeys(("far", "side", "near", "window", "padding"), 0)
        self.f16 = 0
        self.by_layer: dict[int, int] = {}

    def _put(self, part: str, layer: CacheLayer, size: int, allocated: int) -> None:
        self.parts[part] += size
        self.parts["padding"] += allocated - size
        self.by_layer[layer.index] = self.by_layer.get(layer.index, 0) + allocated

    def add(self, part: str, layer: CacheLayer, block: tuple[int, int], cells: int) -> None:
        for channels in (layer.head_k, layer.head_v):
            self._put(part, layer, *_tensor_bytes(block, layer.n_head_kv * channels, cells, self.rules))

    def add_tier(self, layer: CacheLayer, groups: int, spans: int, near_rows: int) -> None:
        """One tensor: what groups have, counters, the number of the last plan, what spans have; then the exact rows."""
        width = layer.n_head_kv * layer.head_k
        summary = _row_bytes(_SUMMARY_BLOCK, width) + 2 * layer.n_head_kv  # with its spreads
        side = _round_up(groups * summary, 8) + 2 * 8 + 4
        if spans:
            side = _round_up(side, 16) + spans * summary
        side = _round_up(side, _NEAR_ALIGNMENT)
        near = 2 * near_rows * width * 2
        self._put("side", layer, side, side)
        self._put("near", layer, near, _round_up(side + near, self.rules.alignment) - side)

    def add_queries(self, layer: CacheLayer, scores: list[str]) -> None:
        """What scores keep of the queries: statistics, samples."""
        channels = layer.n_head * layer.head_k
        kept = {"attn": 4 * (1 + 2 * channels), **{name: 2 * channels * (1 + n) for name, n in _SAMPLES.items()}}
        for name in scores:
            if name in kept:
                self._put("side", layer, kept[name], _round_up(kept[name], self.rules.alignment))


def stored_tokens(config: KvConfig, n_ctx: int, n_seq: int) -> int:
    """Tokens that the cache has room for: all of the context, or with a ``keep`` that share and the exact tokens."""
    if config.keep is None or config.keep >= 1:
        return n_ctx
    exact = int(config.tail or 0) + int(config.group or 0) - 1 + int(config.sinks or 0)
    return min(n_ctx, math.ceil(config.keep * n_ctx) + n_seq * exact)


def span_count(config: KvConfig, stored: int, n_cells: int) -> int:
    """Spans of 128 cells that have summaries of their own: all, where look-ups may search in two levels."""
    return n_cells // SPAN_TOKENS if config.looks_up and config.exceeds_pool(stored) else 0


def largest_ubatch(config: KvConfig, n_ctx: int, n_seq: int) -> int:
    """Micro-batch that a cache which evicts can make room for."""
    stored = stored_tokens(config, n_ctx, n_seq)
    if config.keep is None or stored == n_ctx:
        return n_ctx
    tail, group, sinks = (int(v or 0) for v in (config.tail, config.group, config.sinks))
    young = max(min(512, math.ceil(config.keep * n_ctx) // (4 * n_seq)), tail + group)
    return max(16, (stored - n_seq * (young + sinks + 2 * group)) // 2)


def bytes_per_token(layers: list[CacheLayer], config: KvConfig, n_ctx: int) -> float:
    """What one more token of context costs in the layers that keep the whole context, or a ``keep`` share of it.

    A context of ``n_ctx`` tokens decides whether spans have summaries.
    """
    if not config.folds:
        block = row_block(config)
        return sum(_row_bytes(block, y.n_head_kv * c) for y in layers if not y.window for c in (y.head_k, y.head_v))
    total = 0.0
    summaries = 1 / int(config.group or 1)  # of a token
    if span_count(config, stored_tokens(config, n_ctx, 1), n_ctx):
        summaries += 1 / SPAN_TOKENS
    for layer in layers:
        if not layer.window:
            width = layer.n_head_kv * layer.head_k
            summary = _row_bytes(_SUMMARY_BLOCK, width) + 2 * layer.n_head_kv
            total += 2 * _row_bytes(row_block(config), width) + summary * summaries
    return total * min(1.0, 1.0 if config.keep is None else config.keep)


# -- which layers keep what --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    """How an architecture spreads its sliding windows where the header does not list the layers.

    Every ``pattern``-th layer keeps the whole context: the last of each run, or the first (``dense_first``).
    ``window`` is the size where the header has none; 0 then means no windows at all.
    """

    pattern: int
    window: int = 0
    dense_first: bool = False


_WINDOWS = {
    "afmoe": _Windows(4),
    "cohere2": _Windows(4),
    "exaone-moe": _Windows(4, 128),
    "gemma2": _Windows(2, 4096),
    "gemma3": _Windows(6),
    "gemma3n": _Windows(5),
    "gpt-oss": _Windows(2),
    "mellum": _Windows(4),
    "olmo2": _Windows(4),
    "plamo3": _Windows(8),
    "smallthinker": _Windows(4, 0, True),
}
#: Architectures whose header may name a window that the runtime does not use.
_WINDOW_IGNORED = frozenset({"llama", "mistral3", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2"})

_GEMMA3N_CACHE_LAYERS = 20


def _per_layer(value: Any, layers: int, what: str) -> list[int]:
    if isinstance(value, bool) or value is None:
        raise UnknownLayout(f"the header has no {what}")
    if isinstance(value, int):
        return [value] * layers
    if isinstance(value, list) and len(value) >= layers and all(isinstance(v, int) for v in value):
        return [int(v) for v in value[:layers]]
    raise UnknownLayout(f"the header's {what} is no number per layer")


def _windows(header: GgufHeader, layers: int) -> list[int]:
    """The window of every layer, 0 for none."""
    size = header.arch("attention.sliding_window")
    known = _WINDOWS.get(header.architecture)
    if known is None:
        if not size or header.architecture in _WINDOW_IGNORED:
            return [0] * layers
        raise UnknownLayout(f"architecture {header.architecture!r} spreads its windows in a way of its own")
    window = int(size if size is not None else known.window)
    pattern = header.arch("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) >= layers:
        return [window if flag else 0 for flag in pattern[:layers]]
    if window == 0:
        return [0] * layers
    step = int(pattern) if isinstance(pattern, int) and not isinstance(pattern, bool) else known.pattern
    if step == 0:
        return [window] * layers
    dense = 0 if known.dense_first else step - 1
    return [0 if i % step == dense else window for i in range(layers)]


def cache_layers(header: GgufHeader) -> list[CacheLayer]:
    """The layers of a model that keep keys and values.

    Raises:
        UnknownLayout: the header alone does not tell.
        ValueError: the header lacks what every model has, or holds nonsense.
    """
    layers = header.arch("block_count")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 0 < layers <= 4096:
        raise ValueError(f"model {str(header.path)!r}: {header.architecture or 'its'}.block_count is {layers!r}")
    if header.arch("nextn_predict_layers") or header.arch("attention.kv_lora_rank"):
        raise UnknownLayout("some layers are no ordinary attention layers")
    heads = _per_layer(header.arch("attention.head_count"), layers, "number of heads")
    kv_value = header.arch("attention.head_count_kv")
    heads_kv = heads if kv_value is None else _per_layer(kv_value, layers, "number of key/value heads")
    recurrent = any(key.startswith(f"{header.architecture}.ssm.") for key in header.metadata)
    if recurrent and not isinstance(kv_value, list):
        raise UnknownLayout("some layers are recurrent")
    windows = _windows(header, layers)
    width = header.arch("embedding_length")
    keeps = _GEMMA3N_CACHE_LAYERS if header.architecture == "gemma3n" else layers
    found = []
    for i in range(min(layers, keeps)):
        if heads_kv[i] == 0:
            continue
        default = int(width) // heads[i] if isinstance(width, int) and heads[i] else 0
        key = int(header.arch("attention.key_length") or default)
        value = int(header.arch("attention.value_length") or default)
        if windows[i]:
            key = int(header.arch("attention.key_length_swa") or key)
            value = int(header.arch("attention.value_length_swa") or value)
        if key <= 0 or value <= 0 or heads_kv[i] < 0:
            raise ValueError(f"model {str(header.path)!r}: layer {i} has heads of {key} and {value} channels")
        found.append(CacheLayer(i, heads_kv[i], key, value, windows[i], heads[i]))
    return found
