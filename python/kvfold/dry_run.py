"""What a model and a context would allocate, asked of the runtime itself without allocating it.

llama.cpp can load a model without its weights and make contexts without their buffers; everything is laid out as in
earnest, compute graphs included, and takes milliseconds.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import _runtime
from .config import KvConfig


@dataclass(frozen=True)
class Buffer:
    """Bytes on one buffer type of one device. ``host``: ordinary memory of the machine."""

    name: str
    device: str
    host: bool
    model: int
    context: int
    compute: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.model + self.context + self.compute


@dataclass(frozen=True)
class Measured:
    """What a context allocates: its buffers, the cache's bytes, and the counters of a kvfold cache (else empty)."""

    buffers: tuple[Buffer, ...]
    cache: dict[str, Any]

    def total(self, field: str = "total", *, host: bool | None = None) -> int:
        """Sum of one field (``model``, ``context``, ``compute``, ``total``), of all buffers or only (non-)host ones."""
        return sum(int(getattr(b, field)) for b in self.buffers if host is None or b.host == host)


def scope_settings(config: KvConfig) -> dict[str, Any]:
    """A folding config in the words of the compiled module."""
    settings = {name.removeprefix("kv_"): value for name, value in config.to_text().items() if name != "kv_type"}
    return {"kv_type": config.kv_type, **settings}


@contextmanager
def scope(core: Any, config: KvConfig) -> Iterator[None]:
    """Contexts that this thread makes inside the block get these settings, if they are a folding cache's."""
    if config.folds:
        core.scope_push(scope_settings(config))
    try:
        yield
    finally:
        if config.folds:
            core.scope_pop()


def measure(core: Any, ctx: int) -> Measured:
    """The allocation of a context that exists (real or of a dry run), given by address."""
    buffers = tuple(
        Buffer(b["buffer"], b["device"], b["host"], b["model"], b["context"], b["compute"])
        for b in core.memory_breakdown(ctx)
    )
    return Measured(buffers, dict(core.context_stats(ctx) or {}))


class DryRun:
    """A model without weights, to measure contexts on. Use as a context manager.

    Raises:
        ValueError: the model cannot be loaded; the message has llama.cpp's reason.
    """

    def __init__(self, path: str | os.PathLike[str], *, n_gpu_layers: int = 0) -> None:
        self._core = _runtime.load()
        import llama_cpp

        from ._log import quiet, recording

        self._api = llama_cpp
        self._recording = recording
        self._quiet = quiet
        params = llama_cpp.llama_model_default_params()
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers = n_gpu_layers if n_gpu_layers >= 0 else 0x7FFFFFFF
        with self._quiet(), recording() as log:
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            reason = log.reason() or "no reason given"
            raise ValueError(f"model {os.fspath(path)!r} could not be loaded: {reason}")

    def context(
        self,
        config: KvConfig,
        n_ctx: int,
        *,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq: int = 1,
        swa_full: bool = False,
        flash_attn: bool = True,
    ) -> Measured:
        """What a context of these settings allocates.

        Raises:
            ValueError: it cannot be made.
        """
        with self._made(config, n_ctx, n_batch, n_ubatch, n_seq, swa_full, flash_attn) as ctx:
            return measure(self._core, ctx)

    @contextmanager
    def _made(
        self, config: KvConfig, n_ctx: int, n_batch: int, n_ubatch: int, n_seq: int, swa_full: bool, flash_attn: bool
    ) -> Iterator[int]:
        api = self._api
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, min(n_batch, n_ctx), n_ubatch, n_seq
        params.type_k = params.type_v = config.ggml_type
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full = swa_full
        params.kv_unified = n_seq > 1
        with scope(self._core, config), self._quiet(), self._recording() as log:
            ctx = api.llama_init_from_model(self._model, params)
        if not ctx:
            raise ValueError(f"no context of {n_ctx} tokens could be laid out: {log.reason() or 'no reason given'}")
        try:
            yield ctx
        finally:
            api.llama_free(ctx)

    def close(self) -> None:
        """Free the model."""
        if self._model:
            self._api.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> DryRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
