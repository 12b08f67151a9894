"""What a model takes with given settings: weights by layer from the GGUF header, the cache from the header and from a
dry run of the runtime, compute buffers from the dry run, on the GPU and in the machine's memory."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, replace

from .config import QUANTIZED_TYPES, KvConfig
from .devices import Device, gpus
from .dry_run import DryRun, Measured
from .gguf_header import GgufHeader, read_gguf_header
from .kv_layout import (
    CPU_BUFFERS,
    CUDA_BUFFERS,
    BufferRules,
    CacheLayer,
    CacheSize,
    UnknownLayout,
    cache_layers,
    cache_size,
)
from .model_check import head_sizes, why_unfit

#: Batch and micro-batch of ``Llama`` where none is given.
DEFAULT_BATCH = 512

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights: of every layer, of the token embedding, and of what comes after the last layer.

    ``tied``: the token embedding is the output matrix too; a GPU that computes the output holds a copy of it.
    """

    layers: tuple[int, ...]
    embedding: int
    output: int
    tied: bool

    @property
    def total(self) -> int:
        """All of the file's tensors."""
        return sum(self.layers) + self.embedding + self.output


def read_weights(header: GgufHeader) -> Weights:
    """Weights by layer, from the tensor table (padding between tensors included).

    Raises:
        ValueError: tensors of layers that the header does not have, or tensors outside of the file.
    """
    n_layer = int(header.arch("block_count") or 0)
    end = os.path.getsize(header.path) - header.data_offset
    offsets = sorted({t.offset for t in header.tensors} | {end})
    following = dict(itertools.pairwise(offsets))
    layers, embedding, output, tied = [0] * n_layer, 0, 0, True
    for tensor in header.tensors:
        if tensor.offset >= end:
            raise ValueError(f"model {str(header.path)!r}: tensor {tensor.name!r} is outside of the file")
        size = following[tensor.offset] - tensor.offset
        if match := _BLOCK_NAME.match(tensor.name):
            index = int(match.group(1))
            if index >= n_layer:
                raise ValueError(f"model {str(header.path)!r}: tensor {tensor.name!r}, but there are {n_layer} layers")
            layers[index] += size
        elif tensor.name.startswith("token_embd") or tensor.name.startswith("per_layer_token_embd"):
            embedding += size
        else:
            output += size
            tied = tied and tensor.name != "output.weight"
    return Weights(tuple(layers), embedding, output, tied)


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies in the file. ``layer`` is -1 outside of the layers; ``matrix``: may be rearranged."""

    layer: int
    matrix: bool
    ggml_type: int
    start: int
    end: int


def _spans(header: GgufHeader) -> list[_Span]:
    end = os.path.getsize(header.path) - header.data_offset
    following = dict(itertools.pairwise(sorted({t.offset for t in header.tensors} | {end})))
    found = []
    for t in header.tensors:
        match = _BLOCK_NAME.match(t.name)
        matrix = len(t.shape) > 1 and t.shape[1] > 1 and not t.name.startswith("token_embd")
        found.append(_Span(int(match.group(1)) if match else -1, matrix, t.ggml_type, t.offset, following[t.offset]))
    return found


def _types_that_sum_to(size: int, spans: list[_Span], embedding: int) -> set[int]:
    """Tensor types whose matrices together take ``size`` bytes (within 1 %): those that were rearranged.

    ``embedding``: size of a token embedding of which there may be a rearranged copy as the output matrix.
    """
    by_type: dict[int, int] = {}
    for span in spans:
        if span.matrix:
            by_type[span.ggml_type] = by_type.get(span.ggml_type, 0) + span.end - span.start
    for count in range(1, len(by_type) + 1):
        for types in itertools.combinations(by_type, count):
            matrices = sum(by_type[t] for t in types)
            if min(abs(matrices - size), abs(matrices + embedding - size)) <= 0.01 * size:
                return set(types)
    return set()


@dataclass(frozen=True)
class Settings:
    """What is planned for.

    Attributes:
        config: kv type and its settings.
        n_ctx: tokens.
        n_gpu_layers: layers on the GPU, the output counted as one more.
        n_batch, n_ubatch: batch and micro-batch.
        n_seq: sequences at a time.
        windows: sliding-window layers keep their window only; ``None``: as ``Llama`` does by default, which keeps them
            at full length with llama.cpp's own types.
    """

    config: KvConfig
    n_ctx: int
    n_gpu_layers: int = 0
    n_batch: int = DEFAULT_BATCH
    n_ubatch: int = DEFAULT_BATCH
    n_seq: int = 1
    windows: bool | None = None

    @property
    def swa_full(self) -> bool:
        """``Llama``'s argument of this name."""
        return not (self.config.folds if self.windows is None else self.windows)


@dataclass(frozen=True)
class Share:
    """Bytes in one place: ``model`` (weights), ``kv``, ``state`` (of recurrent layers) and ``compute``."""

    model: int = 0
    kv: int = 0
    state: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.model + self.kv + self.state + self.compute


@dataclass(frozen=True)
class Need:
    """What settings take: on the GPU and in the machine's memory, and the cache as a whole."""

    gpu: Share
    host: Share
    kv_bytes: int
    f16_bytes: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return self.gpu.total + self.host.total


class Planner:
    """Sizes of one model. Use as a context manager (dry runs are kept and reused).

    Args:
        path: a GGUF file.
        devices: GPUs of the runtime; ``None`` asks it.

    Raises:
        ValueError: the model is missing, malformed, or not one that the runtime loads.
    """

    def __init__(self, path: str | os.PathLike[str], devices: list[Device] | None = None) -> None:
        self.header = read_gguf_header(path)
        self.weights = read_weights(self.header)
        self._spans = _spans(self.header)
        self.devices = gpus() if devices is None else devices
        self.layers: list[CacheLayer] | None
        try:
            self.layers = cache_layers(self.header)
        except UnknownLayout:
            self.layers = None
        self._runs: dict[int, DryRun] = {}
        self._needs: dict[tuple[Settings, bool], Need] = {}

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs.values():
            run.close()
        self._runs.clear()

    @property
    def n_layer(self) -> int:
        """Layers of the model, without the output."""
        return len(self.weights.layers)

    @property
    def all_layers(self) -> int:
        """``n_gpu_layers`` that puts everything on the GPU."""
        return self.n_layer + 1

    @property
    def trained_context(self) -> int:
        """Tokens the model was trained with."""
        return int(self.header.arch("context_length") or 4096)

    def computed(self, settings: Settings, rules: BufferRules = CPU_BUFFERS) -> CacheSize | None:
        """The cache from the header alone; ``None`` where it does not tell."""
        if self.layers is None:
            return None
        return cache_size(
            self.layers,
            settings.config,
            settings.n_ctx,
            n_ubatch=min(settings.n_ubatch, settings.n_batch),
            n_seq=settings.n_seq,
            swa_full=settings.swa_full,
            rules=rules,
        )

    def measured(self, settings: Settings) -> Measured:
        """A dry run."""
        layers = settings.n_gpu_layers if self.devices else 0
        if layers not in self._runs:
            self._runs[layers] = DryRun(self.header.path, n_gpu_layers=layers)
        return self._runs[layers].context(
            settings.config,
            settings.n_ctx,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            n_seq=settings.n_seq,
            swa_full=settings.swa_full,
        )

    def need(self, settings: Settings, *, imagined_gpu: bool = False) -> Need:
        """What the settings take. ``imagined_gpu``: on a GPU that this build of the runtime cannot use."""
        key = (settings, imagined_gpu)
        if key not in self._needs:
            self._needs[key] = self._imagined(settings) if imagined_gpu else self._real(settings)
        return self._needs[key]

    def _real(self, settings: Settings) -> Need:
        run = self.measured(settings)
        computed = self.computed(settings)
        context = run.total("context")
        kv = int(run.cache.get("bytes") or 0) or (min(computed.bytes, context) if computed else context)
        shares = {}
        mapped = self._mapping_excess(run, settings)
        for host in (False, True):
            held = run.total("context", host=host)
            # Where both are, the state of recurrent layers is split as the rest of the context is.
            mine = kv * held // context if context else 0
            shares[host] = Share(
                run.total("model", host=host) + (mapped if host else 0),
                mine,
                held - mine,
                run.total("compute", host=host),
            )
        return Need(shares[False], shares[True], kv, _f16_bytes(run, computed, kv), _parts(run, computed))

    def _mapping_excess(self, run: Measured, settings: Settings) -> int:
        """Bytes that ``Llama`` holds beyond the weights because it maps the file (its default).

        A mapping covers everything between the first and the last tensor that is used in place. Tensors that the CPU
        backend has rearranged a copy of lie in between, so they count twice. (Their pages in the file are not touched
        again and go first when memory is short.)
        """
        plain = [b for b in run.buffers if b.host and b.name in ("CPU", "CPU_Mapped")]
        copies = sum(b.model for b in run.buffers if b.host and "REPACK" in b.name)
        first = max(self.all_layers - settings.n_gpu_layers, 0) if self.devices else self.n_layer
        on_host = [t for t in self._spans if t.layer < first]
        if not copies or not on_host:
            return 0
        copied_types = _types_that_sum_to(copies, on_host, self.weights.embedding if self.weights.tied else 0)
        used = [t for t in on_host if not t.matrix or t.ggml_type not in copied_types]
        span = max(t.end for t in used) - min(t.start for t in used) if used else 0
        return max(span - sum(b.model for b in plain), 0)

    def _imagined(self, settings: Settings) -> Need:
        """As llama.cpp would split it: the last layers and the output first, the token embedding never."""
        run = self.measured(replace(settings, n_gpu_layers=0))
        size = self.computed(settings, CUDA_BUFFERS)
        if size is None:
            raise ValueError(
                f"model {str(self.header.path)!r}: its header does not tell how the cache spreads over the layers; "
                "plan it with a kvfold that was built for the GPU"
            )
        first = max(self.all_layers - settings.n_gpu_layers, 0)
        weights, gpu_weights = self.weights, 0
        if settings.n_gpu_layers > 0:
            gpu_weights = sum(weights.layers[first:]) + weights.output + (weights.embedding if weights.tied else 0)
        gpu_kv = sum(bytes for layer, bytes in size.by_layer.items() if layer >= first)
        state = max(run.total("context") - int(run.cache.get("bytes") or size.bytes), 0)
        compute = run.total("compute")
        on_gpu = settings.n_gpu_layers > 0
        gpu = Share(gpu_weights, gpu_kv, state if on_gpu else 0, compute if on_gpu else 0)
        kept = sum(weights.layers[:first]) + weights.embedding + (0 if on_gpu else weights.output)
        host = Share(kept, size.bytes - gpu_kv, 0 if on_gpu else state, 0 if on_gpu else compute)
        return Need(gpu, host, size.bytes, size.f16, _parts(None, size))

    def f16_cache(self, n_ctx: int, n_seq: int = 1) -> int:
        """Bytes of an f16 cache with sliding windows."""
        settings = Settings(KvConfig("f16"), n_ctx, n_seq=n_seq)
        computed = self.computed(settings)
        return computed.f16 if computed is not None else self.measured(settings).total("context")

    def unfit(self, config: KvConfig) -> str | None:
        """Why the type cannot serve this model, ``None`` if it can."""
        if config.folds:
            return why_unfit(self.header)
        odd = [size for size in head_sizes(self.header) if size % 32 and config.kv_type in QUANTIZED_TYPES]
        return f"heads of {odd[0]} channels do not divide into blocks of 32" if odd else None


def _f16_bytes(run: Measured, computed: CacheSize | None, kv: int) -> int:
    return int(run.cache.get("f16_bytes") or (computed.f16 if computed else kv))


def _parts(run: Measured | None, computed: CacheSize | None) -> dict[str, int]:
    if run is not None and run.cache:
        names = (("far", "far_bytes"), ("side", "side_bytes"), ("near", "near_bytes"), ("window", "swa_bytes"))
        parts = {name: int(run.cache[key]) for name, key in names}
        return {**parts, "padding": int(run.cache["bytes"]) - sum(parts.values())}
    if computed is None:
        return {}
    return {name: getattr(computed, name) for name in ("far", "side", "near", "window", "padding")}
