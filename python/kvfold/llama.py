"""``Llama``: ``llama_cpp.Llama`` with kvfold's cache types, and with the sharp edges around a cache taken off."""

# llama_cpp is only partly typed, and absent where the checker runs without the package.
# mypy: disallow-subclassing-any=False, disallow-untyped-calls=False, warn-unused-ignores=False

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from . import _runtime
from .config import (
    FOREIGN_SETTINGS,
    GROUPS,
    LOOKUP_SETTINGS,
    QUANTIZED_TYPES,
    UPSTREAM_TYPES,
    KvConfig,
    check_setting_name,
)
from .dry_run import scope
from .gguf_header import GgufHeader, read_gguf_header
from .guard import check_free_memory
from .memory import require_memory
from .model_check import require_fit
from .presets import fill
from .sizing import Settings
from .stats import KvStats
from .threads import recommended_threads

_core = _runtime.load()

import llama_cpp  # noqa: E402  (after the runtime: the library it loads is decided there)

from ._gate import Gate, Turn  # noqa: E402
from ._interrupt import Interruptible  # noqa: E402
from ._log import LogRecorder, recording  # noqa: E402

#: ``logits_all`` keeps one row of the vocabulary per context position; from this size on that is worth a warning.
_LOGITS_WARNING_BYTES = 8 * 2**30

#: Evaluations of at least this many tokens can be interrupted inside the native call.
_INTERRUPTIBLE_TOKENS = 16

_TYPE_NAMES = {number: name for name, number in UPSTREAM_TYPES.items()}


class _Closed:
    """Stands where native objects were after ``close()``."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this Llama is closed")


class LlamaKvState(llama_cpp.LlamaState):
    """A saved state that knows what it was saved from, so that it is never loaded into something else.

    Attributes:
        kv: the cache settings, as ``KvConfig.to_dict`` gives them, without those of look-ups.
        model: what identifies the model.
        digest: hash of ``llama_state``.
    """

    def __init__(self, *, kv: dict[str, Any], model: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.kv = kv
        self.model = model
        self.digest = _digest(self.llama_state)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _whole(name: str, value: object, minimum: int, maximum: int = 2**31 - 1) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and minimum <= value <= maximum:
        return int(value)
    raise ValueError(f"{name}={value!r}: must be a whole number from {minimum} to {maximum}")


def _kv_settings(kv: object, named: Mapping[str, Any], extra: dict[str, Any]) -> KvConfig | None:
    """The cache settings of a constructor call, ``None`` when it names none.

    Takes ``kv_*`` names out of ``extra``, the arguments meant for llama_cpp.
    """
    settings = {name: value for name, value in named.items() if value is not None}
    for name in [n for n in extra if n.startswith("kv_") and n not in FOREIGN_SETTINGS]:
        check_setting_name(name)  # Every known name is a named argument: this raises.
        settings[name] = extra.pop(name)
    if kv is not None:
        return KvConfig.coerce(kv).merged(**settings)  # type: ignore[arg-type]
    if not settings:
        return None
    if "kv_type" not in settings:
        given = ", ".join(settings)
        raise ValueError(f"{given} needs a kv_type: {', '.join(GROUPS)}")
    return KvConfig.from_kwargs(**settings)


class Llama(llama_cpp.Llama):
    """A model with a context, as ``llama_cpp.Llama``, with kvfold's cache types.

    Args:
        model_path: path of a GGUF file.
        kv: cache settings as a ``KvConfig``, a mapping, or a TOML or JSON file; ``kv_*`` arguments go before.
        kv_type: ``fp4``, ``fp4_csa2``, ``fp4_csa2_ced``, or an upstream type by name (``f16``, ``q8_0``, ...).
        kv_group: tokens per group. ``fp4``: 2 to 32, default 32; the others: 2 to 16, default 4.
        kv_tail: most recent tokens that stay exact, default 128.
        kv_sinks: first tokens that stay exact, default 4.
        kv_swa_type: type of sliding-window layers, ``f16`` (default) or ``q8_0``.
        kv_scale_group: channels of a folded row that share a scale, default 16; 32 and 64 make it smaller and
            less exact.
        kv_lookup: ``fp4_csa2...``: share of the folded groups that decoding reads in long contexts, one number or
            ``(smallest, largest)``, default 0.2; 1 reads everything. What layers make of it: ``kv_layers``.
        kv_threshold: share of the estimated attention that may stay unread between those, default 0.1.
        kv_min_tokens: folded tokens that are read at least, default 256.
        kv_max_tokens: and at most, by a query and KV head, default 0, which is no bound.
        kv_min_context: sequences with fewer tokens are read whole, default 4096; with layers on a GPU all are.
        kv_layers: what each layer does, default ``auto`` (see ``kvfold.layer_modes``).
        kv_calibration: file of ``kvfold calibrate`` for this model: its values are the defaults of ``kv_group``,
            ``kv_lookup``, ``kv_threshold``, ``kv_min_tokens`` and ``kv_layers``.
        kv_alignment: compare every look-up with attention over everything, for ``kv.alignment()``; slow.
        kv_hierarchical: score summaries of 128 tokens first, then only groups of the best: ``off`` (default), ``auto``
            (beyond 65536 tokens), ``on``.
        kv_span_pool: groups that are left to choose from then, default 16384.
        kv_keep: ``fp4_csa2_ced``: share of ``n_ctx`` that the cache has room for, default 0.78. When it is full, tokens
            are dropped for good; a text of ``n_ctx`` tokens is still accepted.
        kv_score: which tokens go first: ``keydiff``, ``vnorm``, ``attn``, ``recent``, ``snapkv``, ``entropy``, or
            several as the default, ``keydiff+attn``.
        preset: ``8gb-32k``, ``8gb-64k``, ``12gb-64k`` or ``cpu-32k``: context, kv type, GPU layers and batch sizes for
            such a machine; what is given explicitly wins.
        n_ctx, n_batch, n_ubatch: 512 by default.
        n_gpu_layers: layers on the GPU, -1 for all; 0 by default.
        memory_guard: check free memory before loading: what does not fit is refused with what would, what is tight gets
            a ``RuntimeWarning``.
        flash_attn: off by default as upstream; types that need it turn it on, an explicit ``False`` is then refused.
        swa_full: keep sliding-window layers at full length. Upstream's default is yes; with a kvfold type it is no.
        n_threads: by default the physical cores available to the process, at most 4 when all layers are on the GPU.
        kwargs: everything else ``llama_cpp.Llama`` takes.

    Raises:
        ValueError: a setting that cannot be honoured, a model that does not fit, or one that cannot be loaded. Nothing
            stays allocated.
    """

    input_ids: Any
    scores: Any
    #: Without one (synthetic models) it takes and gives token ids, no text.
    has_tokenizer: bool = True

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv: KvConfig | Mapping[str, Any] | str | Path | None = None,
        kv_type: str | None = None,
        kv_group: int | None = None,
        kv_tail: int | None = None,
        kv_sinks: int | None = None,
        kv_swa_type: str | None = None,
        kv_scale_group: int | None = None,
        kv_lookup: float | tuple[float, float] | None = None,
        kv_threshold: float | None = None,
        kv_min_tokens: int | None = None,
        kv_max_tokens: int | None = None,
        kv_min_context: int | None = None,
        kv_layers: str | None = None,
        kv_alignment: bool | None = None,
        kv_hierarchical: str | None = None,
        kv_span_pool: int | None = None,
        kv_calibration: str | Path | None = None,
        kv_keep: float | None = None,
        kv_score: str | None = None,
        preset: str | None = None,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        n_gpu_layers: int | None = None,
        memory_guard: bool = True,
        flash_attn: bool | None = None,
        swa_full: bool | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        logits_all: bool = False,
        embedding: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self._gate = Gate()
        self._kv_sizes: dict[str, Any] = {}
        path = os.fspath(model_path)
        named = {
            "kv_type": kv_type,
            "kv_group": kv_group,
            "kv_tail": kv_tail,
            "kv_sinks": kv_sinks,
            "kv_swa_type": kv_swa_type,
            "kv_scale_group": kv_scale_group,
            "kv_lookup": kv_lookup,
            "kv_threshold": kv_threshold,
            "kv_min_tokens": kv_min_tokens,
            "kv_max_tokens": kv_max_tokens,
            "kv_min_context": kv_min_context,
            "kv_layers": kv_layers,
            "kv_alignment": kv_alignment,
            "kv_hierarchical": kv_hierarchical,
            "kv_span_pool": kv_span_pool,
            "kv_calibration": kv_calibration,
            "kv_keep": kv_keep,
            "kv_score": kv_score,
        }
        filled = fill(
            preset,
            {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_ubatch, "n_gpu_layers": n_gpu_layers},
            {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_gpu_layers": 0},
        )
        n_ctx, n_batch, n_ubatch, n_gpu_layers = filled.values()
        if preset is not None and kv is None and type_k is None and type_v is None:
            named.update(fill(preset, named, {"kv_type": None}))
        config = _kv_settings(kv, named, kwargs)
        self.kv_config = config
        n_ctx = _whole("n_ctx", n_ctx, 0)
        n_batch = _whole("n_batch", n_batch, 1)
        n_ubatch = _whole("n_ubatch", n_ubatch, 1)
        if config is not None:
            flash_attn, type_k, type_v = _cache_arguments(config, flash_attn, type_k, type_v)
        folds = config is not None and config.folds
        if folds and swa_full is None:
            swa_full = False
        if folds and embedding:
            assert config is not None
            raise ValueError(
                f"kv_type={config.kv_type!r} with embedding=True: embeddings keep nothing in the cache; leave one out"
            )
        if embedding:
            # Upstream aborts the process when a batch of embeddings is larger than a micro-batch.
            n_ubatch = max(n_batch, n_ubatch)
        header = read_gguf_header(path)
        if folds:
            assert config is not None
            require_fit(header, config.kv_type)
            if n_ctx == 0:
                # Upstream reads 0 as "what the model was trained with": far more than anybody may have meant.
                raise ValueError(
                    f"n_ctx=0 with kv_type={config.kv_type!r}: give the number of tokens the cache is for; this model "
                    f"was trained with {header.arch('context_length')}"
                )
        known_type = _TYPE_NAMES.get(1 if type_k is None else type_k) if type_k == type_v else None
        kept = config or (KvConfig(known_type) if known_type else None)
        if memory_guard and kept is not None and not embedding and not kwargs.get("vocab_only"):
            if n_gpu_layers == 0:
                require_memory(header, n_ctx, kept.kv_type)
            length = n_ctx or int(header.arch("context_length") or 0)
            windows = None if swa_full is None else not swa_full
            settings = Settings(kept, length, n_gpu_layers, n_batch, n_ubatch, windows=windows)
            if length:
                check_free_memory(header, settings, mapped=bool(kwargs.get("use_mmap", True)))
        self._warn_about_memory(header, n_ctx, logits_all)
        gpu = bool(llama_cpp.llama_supports_gpu_offload())
        cores = recommended_threads(n_gpu_layers, int(header.arch("block_count") or 0), gpu)
        arguments: dict[str, Any] = {
            **kwargs,
            "model_path": path,
            "n_ctx": n_ctx,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "n_threads": _whole("n_threads", n_threads, 0) if n_threads else cores,
            "n_threads_batch": _whole("n_threads_batch", n_threads_batch, 0) if n_threads_batch else cores,
            "n_gpu_layers": n_gpu_layers,
            "flash_attn": bool(flash_attn),
            "swa_full": swa_full,
            "type_k": type_k,
            "type_v": type_v,
            "logits_all": logits_all,
            "embedding": embedding,
            "verbose": verbose,
        }
        if n_gpu_layers != 0 and not gpu:
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers}: this build of kvfold has no GPU support, everything runs on the CPU",
                RuntimeWarning,
                stacklevel=2,
            )
        try:
            self._load(arguments)
        except BaseException:
            self.close()
            raise

    def _load(self, arguments: dict[str, Any]) -> None:
        """Run upstream's constructor inside the settings' scope; turn its bare failures into reasons."""
        config = self.kv_config
        with nullcontext() if config is None else scope(_core, config), recording() as log:
            try:
                super().__init__(**arguments)
            except ValueError as error:
                raise _explained(error, arguments["model_path"], log) from None
        self._kv_sizes = _exact(_announced_sizes(log), _core.memory_breakdown(self._ctx.ctx))
        self._fit_buffers()
        if config is not None and config.folds and _core.context_stats(self._ctx.ctx) is None:
            raise RuntimeError(f"kv_type={config.kv_type!r} was not applied by the runtime")
        # Upstream aborts the process when such a model is asked for text.
        self.has_tokenizer = llama_cpp.llama_vocab_type(self._model.vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        # Tokens of sliding-window layers older than this are gone; 0 when everything is kept.
        windowed = not self.context_params.swa_full
        self._window = llama_cpp.llama_model_n_swa(self._model.model) if windowed else 0

    def _fit_buffers(self) -> None:
        """llama.cpp rounds the context up; upstream's token buffer has the size that was asked for."""
        if len(self.input_ids) < self._n_ctx:
            self.input_ids = np.zeros((self._n_ctx,), dtype=np.intc)
        if self._logits_all and len(self.scores) < self._n_ctx:
            self.scores = np.empty((self._n_ctx, self._n_vocab), dtype=np.single)

    @staticmethod
    def _warn_about_memory(header: GgufHeader, n_ctx: int, logits_all: bool) -> None:
        if not logits_all:
            return
        length = n_ctx or int(header.arch("context_length") or 0)
        vocabulary = int(header.arch("vocab_size") or 0) or _vocabulary_size(header)
        size = 4 * length * vocabulary
        if size > _LOGITS_WARNING_BYTES:
            warnings.warn(
                f"logits_all=True keeps {length} x {vocabulary} logits: {size / 2**30:.1f} GiB of memory",
                RuntimeWarning,
                stacklevel=4,
            )

    # -- what is in the cache ------------------------------------------------------------------------------------------

    @property
    def kv(self) -> KvStats:
        """What the cache really allocates and what happened in it, live."""
        return KvStats(self._read_kv, lambda: _core.alignment(self._ctx.ctx), self._compact)

    def _read_kv(self) -> dict[str, Any]:
        stats = _core.context_stats(self._ctx.ctx)
        if stats is not None:
            return dict(stats)
        return {**self._kv_sizes, "near_bytes": 0, "tokens": self.n_tokens, "folded_tokens": 0}

    def pin(self, start: int, stop: int) -> None:
        """Never drop tokens ``start`` to ``stop - 1`` of the context (``fp4_csa2_ced``).

        Positions count from the start of the prompt. Pins stay until ``unpin()``, whatever text comes there.

        Raises:
            ValueError: an impossible range, or a cache that drops nothing.
        """
        if not 0 <= start < stop <= self._n_ctx:
            raise ValueError(f"pin({start!r}, {stop!r}): must be a range of positions within 0 .. {self._n_ctx}")
        with self._gate.hold():
            self._require_open()
            _core.pin(self._ctx.ctx, 0, start, stop)

    def unpin(self) -> None:
        """Forget all pins."""
        with self._gate.hold():
            self._require_open()
            _core.pin(self._ctx.ctx, 0, 0, 0)

    def _compact(self, keep: float, report: bool) -> Any:
        """``KvStats.compact`` or, as rows, ``KvStats.compact_alignment``."""
        with self._gate.hold():
            self._require_open()
            tokens, result = self.input_ids[: self.n_tokens].tolist(), None
            run = _core.compact_alignment if report else _core.compact
            if not self._keep_first(len(tokens)):
                self._forget()
                self._eval_in_batches(tokens)
            with Interruptible(self._ctx.ctx) as interrupt:
                try:
                    result = run(self._ctx.ctx, 0, tokens, keep)
                except ValueError:
                    if not interrupt.requested:
                        raise
                finally:
                    self._requires_eval = True  # the logits are those of the second reading
            if interrupt.requested:
                raise KeyboardInterrupt
            return result

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        """As upstream's. Raises: ValueError: the model has no tokenizer."""
        self._require_text()
        return list(super().tokenize(*args, **kwargs))

    def detokenize(self, *args: Any, **kwargs: Any) -> bytes:
        """As upstream's. Raises: ValueError: the model has no tokenizer."""
        self._require_text()
        return bytes(super().detokenize(*args, **kwargs))

    def _require_text(self) -> None:
        self._require_open()
        if not self.has_tokenizer:
            raise ValueError(
                f"{self.model_path!r} has no tokenizer (tokenizer.ggml.model is 'none'): it takes and gives token ids, "
                "no text; use eval(), sample() or generate()"
            )

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the first ``n_tokens`` ones of ``input_ids``.

        Whatever the cache has lost of those (a sliding window that moved on, a recurrent state that cannot go back) is
        evaluated again first, so results never depend on what happened before.

        Raises:
            ValueError: the context is too short.
            RuntimeError: the evaluation failed (the object stays usable), or another thread uses this object.
            KeyboardInterrupt: Ctrl-C; likewise.
        """
        with self._gate.hold():
            todo = list(tokens)
            if self.n_tokens + len(todo) > self._n_ctx:
                raise ValueError(
                    f"Requested tokens ({self.n_tokens + len(todo)}) exceed context window of {self._n_ctx}"
                )
            if todo and not self._keep_first(self.n_tokens):
                todo = self.input_ids[: self.n_tokens].tolist() + todo
                self._forget()
            with recording() as log:
                try:
                    self._eval_in_batches(todo)
                except RuntimeError as error:
                    self._forget_if_torn()
                    reason = log.reason() or _core.last_error()
                    raise RuntimeError(f"{error}: {reason}" if reason else str(error)) from None

    def _eval_in_batches(self, todo: list[int]) -> None:
        if len(todo) < _INTERRUPTIBLE_TOKENS:
            super().eval(todo)
            return
        with Interruptible(self._ctx.ctx) as interrupt:
            for start in range(0, len(todo), self.n_batch):
                try:
                    super().eval(todo[start : start + self.n_batch])
                except RuntimeError:
                    if not interrupt.requested:
                        raise
                    self._forget_if_torn()
                if interrupt.requested:
                    break
        if interrupt.requested:
            raise KeyboardInterrupt

    def _keep_first(self, count: int) -> bool:
        """Cut the cache to its first ``count`` tokens; false if it does not hold all that evaluation needs of them."""
        memory = self._ctx.memory
        if memory is None or count == 0:
            return True
        if not _core.prefix_usable(self._ctx.ctx, 0, count):
            return False
        if not self._ctx.kv_cache_seq_rm(-1, count, -1):
            return False
        if llama_cpp.llama_memory_seq_pos_max(memory, 0) != count - 1:
            return False
        if self._window <= 0:
            return True
        first = llama_cpp.llama_memory_seq_pos_min(memory, 0)
        return bool(first <= max(0, count - self._window))

    def _forget(self) -> None:
        self._ctx.kv_cache_clear()
        self.n_tokens = 0
        self._requires_eval = True

    def _forget_if_torn(self) -> None:
        """After a batch that ended half-way: layers of a folding cache may disagree about what is folded."""
        if self.kv_config is not None and self.kv_config.folds:
            self._forget()

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As ``llama_cpp.Llama.generate``. Continuing a stream after a later call took over raises ``RuntimeError``."""
        turn = self._gate.begin()
        inner = super().generate(tokens, *args, **kwargs)
        return self._guarded(inner, turn)

    def _guarded(
        self, inner: Generator[int, Sequence[int] | None, None], turn: Turn
    ) -> Generator[int, Sequence[int] | None, None]:
        sent: Sequence[int] | None = None
        try:
            while True:
                with self._gate.step(turn):
                    try:
                        token = inner.send(sent)
                    except StopIteration:
                        return
                sent = yield token
        finally:
            inner.close()
            self._gate.end(turn)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As upstream's; with a kvfold type ``usage`` also says what the cache holds and lacks of the context."""
        with contextlib.closing(super()._create_completion(*args, **kwargs)) as chunks:
            for chunk in chunks:
                if "usage" in chunk and self.kv_config is not None and self.kv_config.folds:
                    chunk["usage"]["kept_tokens"] = self.kv.tokens
                    chunk["usage"]["evicted_tokens"] = _core.evicted(self._ctx.ctx, 0, 2**31 - 1)
                yield chunk

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As ``llama_cpp.Llama.sample``."""
        with self._gate.hold():
            return int(super().sample(*args, **kwargs))

    def reset(self) -> None:
        """Forget all tokens; the next evaluation starts afresh."""
        with self._gate.hold():
            self._require_open()
            super().reset()

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As ``llama_cpp.Llama.embed``."""
        with self._gate.hold():
            return super().embed(*args, **kwargs)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _identity(self) -> str:
        return f"{self._model.desc()}, {self._model.n_params()} parameters, {self._model.size()} bytes"

    def _cache_identity(self) -> dict[str, Any]:
        if self.kv_config is not None and self.kv_config.folds:
            settings = self.kv_config.to_dict()
            return {name: value for name, value in settings.items() if name not in LOOKUP_SETTINGS}
        return {"kv_type": self._upstream_type_name()}

    def _upstream_type_name(self) -> str:
        key, value = (int(t) for t in (self.context_params.type_k, self.context_params.type_v))
        names = [_TYPE_NAMES.get(t, f"type {t}") for t in (key, value)]
        return names[0] if key == value else "/".join(names)

    def save_state(self) -> LlamaKvState:
        """The whole context (tokens, cache, sampling seed), to be loaded where model and cache are the same."""
        with self._gate.hold():
            address = self._ctx.ctx
            size = int(llama_cpp.llama_state_get_size(address))
            buffer = np.empty(size, dtype=np.uint8)
            pointer = buffer.ctypes.data_as(_byte_pointer)
            written = int(llama_cpp.llama_state_get_data(address, pointer, size))
            if written == 0 or written > size:
                raise RuntimeError(f"the state could not be saved: {_core.last_error() or 'no reason given'}")
            rows = self.n_tokens if self._logits_all else 0
            return LlamaKvState(
                kv=self._cache_identity(),
                model=self._identity(),
                scores=self.scores[:rows].copy(),
                input_ids=self.input_ids[: self.n_tokens].copy(),
                n_tokens=self.n_tokens,
                llama_state=buffer[:written].tobytes(),
                llama_state_size=written,
                seed=self._seed,
            )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Continue from a saved state. If it does not fit, nothing changes.

        Raises:
            ValueError: a state of another model, kv type or group size, of a longer context, or an altered one.
        """
        with self._gate.hold():
            sealed = isinstance(state, LlamaKvState)
            if isinstance(state, LlamaKvState):
                self._check_seal(state)
            if state.n_tokens > self._n_ctx:
                raise ValueError(f"the state holds {state.n_tokens} tokens, this context takes {self._n_ctx}")
            backup = None if sealed or self.n_tokens == 0 else self.save_state()
            try:
                self._apply_state(state)
            except ValueError:
                if backup is None:
                    self._forget()
                else:
                    self._apply_state(backup)
                raise

    def _check_seal(self, state: LlamaKvState) -> None:
        if state.kv != self._cache_identity():
            saved, here = (", ".join(f"{k}={v}" for k, v in kv.items()) for kv in (state.kv, self._cache_identity()))
            raise ValueError(f"the state was saved with {saved}; this context has {here}")
        if state.model != self._identity():
            raise ValueError(f"the state was saved from another model ({state.model}), not {self._identity()}")
        if len(state.llama_state) != state.llama_state_size or _digest(state.llama_state) != state.digest:
            raise ValueError("the state is incomplete or was altered since it was saved")

    def _apply_state(self, state: llama_cpp.LlamaState) -> None:
        size = state.llama_state_size
        data = np.frombuffer(state.llama_state, dtype=np.uint8)
        with recording() as log:
            read = llama_cpp.llama_state_set_data(self._ctx.ctx, data.ctypes.data_as(_byte_pointer), size)
        if read != size:
            raise ValueError(f"the state does not fit this context: {log.reason() or _core.last_error()}")
        count = state.n_tokens
        self.input_ids[:count] = state.input_ids[:count]
        self.n_tokens = count
        self._requires_eval = True
        self._seed = state.seed
        if self._logits_all and len(state.scores) >= count:
            self.scores[:count] = state.scores[:count]

    # -- end -----------------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        """Raises ``RuntimeError`` after ``close()``, where nothing else on the way would."""
        _ = self._ctx.ctx

    def close(self) -> None:
        """Free the model and its context. Closing twice is fine; use afterwards raises ``RuntimeError``."""
        stack = getattr(self, "_stack", None)
        if stack is None or isinstance(getattr(self, "_ctx", None), _Closed):
            return
        with self._gate.hold():
            self._sampler = None
            stack.close()
            closed: Any = _Closed()
            # Tokenizers that were handed out keep the model's wrapper; a null pointer in it would crash the process.
            for wrapper, pointers in (("_model", ("model", "vocab")), ("_ctx", ("ctx",))):
                for pointer in pointers if wrapper in self.__dict__ else ():
                    setattr(getattr(self, wrapper), pointer, closed)
            self._ctx = self._model = self._batch = self.tokenizer_ = closed
            self._candidates: Any = None
            self.scores = np.empty((0, 0), dtype=np.single)
            self.input_ids = np.empty((0,), dtype=np.intc)
            self.n_tokens = 0

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The interpreter may be half torn down, and an object whose constructor failed is half built.
        try:
            self.close()
        except Exception:
            if not sys.is_finalizing():
                raise

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if self.kv_config is not None:
            for name in ("type_k", "type_v"):
                del state[name]
            state["kv"] = self.kv_config
        return state


def _cache_arguments(
    config: KvConfig, flash_attn: bool | None, type_k: int | None, type_v: int | None
) -> tuple[bool | None, int, int]:
    """Upstream's ``flash_attn``, ``type_k`` and ``type_v`` for these settings."""
    for name, value in (("type_k", type_k), ("type_v", type_v)):
        if value is not None:
            raise ValueError(f"kv_type={config.kv_type!r} together with {name}={value!r}: give one of the two")
    if config.folds or config.kv_type in QUANTIZED_TYPES:
        if flash_attn is not None and not flash_attn:
            raise ValueError(f"kv_type={config.kv_type!r} needs flash attention; flash_attn=False cannot be honoured")
        flash_attn = True
    return flash_attn, config.ggml_type, config.ggml_type


def _explained(error: ValueError, path: str, log: LogRecorder) -> ValueError:
    """Upstream's bare load errors with the reason that only the log has."""
    text = str(error)
    reason = log.reason() or _core.last_error()
    if text.startswith("Failed to load model from file"):
        return ValueError(f"model {path!r} could not be loaded: {reason}" if reason else text)
    if text.startswith("Failed to create llama_context"):
        return ValueError(f"no context could be made for {path!r}: {reason}" if reason else text)
    return error


def _vocabulary_size(header: GgufHeader) -> int:
    """Rows of the token embedding, the one tensor every model has."""
    shapes: Iterable[tuple[int, ...]] = (t.shape for t in header.tensors if t.name == "token_embd.weight")
    return next((shape[1] for shape in shapes if len(shape) == 2), 0)


_CACHE_LINE = re.compile(r"K \((\w+)\):\s*([\d.]+) MiB, V \((\w+)\):\s*([\d.]+) MiB")
_BUFFER_LINE = re.compile(r"(\S+) (?:KV|RS) buffer size")
_BITS_PER_VALUE = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}


def _announced_sizes(log: LogRecorder) -> dict[str, Any]:
    """Cache sizes of an upstream type as llama.cpp announces them (to 0.01 MiB; it has no call that tells)."""
    total = f16 = 0.0
    names: dict[str, None] = {}
    backends: dict[str, None] = {}
    for line in log.infos:
        if match := _CACHE_LINE.search(line):
            for name, size in (match.group(1, 2), match.group(3, 4)):
                names[name] = None
                total += float(size)
                f16 += float(size) * 16.0 / _BITS_PER_VALUE.get(name, 16.0)
        elif match := _BUFFER_LINE.search(line):
            backends[match.group(1)] = None
    return {
        "kv_type": "/".join(names) or "none",
        "bytes": round(total * 2**20),
        "f16_bytes": round(f16 * 2**20),
        "backend": "/".join(backends) or "CPU",
    }


def _exact(announced: dict[str, Any], buffers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The announced sizes with the rounding undone, where the context holds nothing but this cache."""
    held = sum(int(buffer["context"]) for buffer in buffers)
    size = announced["bytes"]
    # At most four figures, each rounded to 0.01 MiB.
    if size and abs(held - size) <= 4 * 0.005 * 2**20:
        announced = {**announced, "bytes": held, "f16_bytes": round(announced["f16_bytes"] * held / size)}
    return announced


_byte_pointer: Any = ctypes.POINTER(ctypes.c_uint8)

__all__ = ["KvStats", "Llama", "LlamaKvState"]
