"""Drives a llama.cpp context through its C API, token by token and sequence by sequence.

A :class:`Context` feeds token ids at given positions in micro-batches of a given size and returns logits, edits
sequences, and saves and restores state: everything that the contract of a KV cache is about, and no sampling.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

if os.environ.get("KVFOLD_TEST_UPSTREAM"):  # the harness itself can be tried on an unpatched runtime
    _core = None
else:
    from kvfold import _runtime

    _core = _runtime.load()  # llama_cpp has to find kvfold's libraries, so this comes first

import llama_cpp as lc

#: ggml_type of each upstream cache type
UPSTREAM = {"f32": 0, "f16": 1, "q4_0": 2, "q5_0": 6, "q8_0": 8}
KVFOLD = ("fp4", "fp4_csa2", "fp4_csa2_ced")
NVFP4 = 40
GGML_LOG_LEVEL_DEBUG = 1

FLASH_ATTN_AUTO, FLASH_ATTN_OFF, FLASH_ATTN_ON = -1, 0, 1

_log: list[str] = []


@lc.llama_log_callback
def _collect_log(level: int, text: bytes, _user: Any) -> None:
    if level != GGML_LOG_LEVEL_DEBUG:
        _log.append(text.decode("utf-8", "replace"))


lc.llama_log_set(_collect_log, None)
lc.llama_backend_init()


def take_log() -> str:
    """Everything llama.cpp has logged since the last call."""
    text = "".join(_log)
    _log.clear()
    return text


class HarnessError(Exception):
    """A call into llama.cpp failed; the message ends with what was logged."""


class Model:
    """A model without a vocabulary lookup: token ids in, logits out."""

    def __init__(self, path: Path | str) -> None:
        take_log()
        params = lc.llama_model_default_params()
        params.n_gpu_layers = 0
        self.path = str(path)
        self.handle = lc.llama_model_load_from_file(self.path.encode(), params)
        if not self.handle:
            raise HarnessError(f"cannot load {path}: {take_log()}")
        self.vocab = lc.llama_model_get_vocab(self.handle)
        self.n_vocab = lc.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (lc.llama_token * (len(data) + 8))()
        n = lc.llama_tokenize(self.vocab, data, len(data), buffer, len(buffer), True, False)
        assert n >= 0
        return list(buffer[:n])

    def close(self) -> None:
        if self.handle:
            lc.llama_model_free(self.handle)
            self.handle = None


class Context:
    """A context of ``model``. ``settings`` of a kvfold type: group, tail, sinks, swa_type."""

    def __init__(
        self,
        model: Model,
        kv_type: str = "f16",
        *,
        n_ctx: int = 768,
        n_seq: int = 1,
        n_ubatch: int = 128,
        n_batch: int | None = None,
        unified: bool = True,
        n_threads: int = 1,
        flash_attn: int = FLASH_ATTN_ON,
        swa_full: bool = False,
        settings: Mapping[str, Any] | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
    ) -> None:
        take_log()
        self.model, self.kv_type, self.n_vocab = model, kv_type, model.n_vocab
        params = lc.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_ubatch = n_ubatch
        params.n_batch = n_ubatch if n_batch is None else n_batch
        params.n_seq_max = n_seq
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = flash_attn
        params.kv_unified = unified
        params.swa_full = swa_full
        params.offload_kqv = False
        params.no_perf = True
        with config_scope(kv_type, settings or {}):
            default = UPSTREAM.get(kv_type, NVFP4)
            params.type_k = default if type_k is None else type_k
            params.type_v = default if type_v is None else type_v
            self.handle = lc.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise HarnessError(f"no {kv_type} context: {last_error()} {take_log()}")
        self.memory = lc.llama_get_memory(self.handle)
        self.n_ctx = lc.llama_n_ctx(self.handle)
        self.n_batch = lc.llama_n_batch(self.handle)
        self._batch = lc.llama_batch_init(self.n_batch, 0, n_seq)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def try_decode(self, rows: list[tuple[int, int, tuple[int, ...]]]) -> tuple[int, np.ndarray]:
        """Decode ``(token, position, sequences)`` rows in one call: its return code and logits of all rows."""
        batch = self._batch
        for i, (token, pos, seqs) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = pos
            batch.n_seq_id[i] = len(seqs)
            for j, seq in enumerate(seqs):
                batch.seq_id[i][j] = seq
            batch.logits[i] = 1
        batch.n_tokens = len(rows)
        code = lc.llama_decode(self.handle, batch)
        if code != 0:
            return code, np.empty((0, self.n_vocab), np.float32)
        logits = lc.llama_get_logits(self.handle)
        return 0, np.ctypeslib.as_array(logits, shape=(len(rows) * self.n_vocab,)).reshape(-1, self.n_vocab).copy()

    def decode(self, rows: list[tuple[int, int, tuple[int, ...]]]) -> np.ndarray:
        code, logits = self.try_decode(rows)
        if code != 0:
            raise HarnessError(f"decode of {len(rows)} tokens returned {code}: {last_error()} {take_log()}")
        return logits

    def feed(self, tokens: list[int], start: int | None = None, seq: int = 0, chunk: int = 32) -> np.ndarray:
        """Append tokens to a sequence, ``chunk`` at a time: logits ``[len(tokens), n_vocab]``."""
        pos = self.pos_max(seq) + 1 if start is None else start
        parts = []
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            parts.append(self.decode([(t, pos + first + i, (seq,)) for i, t in enumerate(part)]))
        return np.concatenate(parts)

    def feed_image(self, embeddings: np.ndarray, pos: int, width: int, seq: int = 0) -> np.ndarray:
        """Decode the patches of an image ``[n, n_embd]`` at ``pos`` (models with M-RoPE): logits ``[n, n_vocab]``.

        As llama.cpp's multimodal code does: one temporal position for all patches, row and column beside it.
        """
        n, n_embd = embeddings.shape
        batch = lc.llama_batch_init(n, n_embd, 1)
        given = ctypes.cast(batch.pos, ctypes.c_void_p).value  # the field itself would follow the assignment below
        places = [[pos] * n, [pos + i // width for i in range(n)], [pos + i % width for i in range(n)], [0] * n]
        flat = [p for axis in places for p in axis]
        batch.pos = (lc.llama_pos * len(flat))(*flat)
        ctypes.memmove(batch.embd, np.ascontiguousarray(embeddings, np.float32).ctypes.data, 4 * n * n_embd)
        for i in range(n):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = 1
        batch.n_tokens = n
        code = lc.llama_decode(self.handle, batch)
        batch.pos = ctypes.cast(given, ctypes.POINTER(lc.llama_pos))
        lc.llama_batch_free(batch)
        if code != 0:
            raise HarnessError(f"decode of {n} patches returned {code}: {last_error()} {take_log()}")
        logits = lc.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(logits, shape=(n * self.n_vocab,)).reshape(n, self.n_vocab).copy()

    def abort_after(self, n_calls: int | None) -> None:
        """Abort graphs: the callback, asked after every node, says so from call ``n_calls`` on. None: never."""
        left = [n_calls]

        def ask(_data: Any) -> bool:
            if left[0] is None:
                return False
            left[0] -= 1
            return left[0] < 0

        self._abort = lc.ggml_abort_callback(ask)  # kept alive as long as llama.cpp may call it
        lc.llama_set_abort_callback(self.handle, self._abort, None)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def pos_max(self, seq: int = 0) -> int:
        return lc.llama_memory_seq_pos_max(self.memory, seq)

    def pos_min(self, seq: int = 0) -> int:
        return lc.llama_memory_seq_pos_min(self.memory, seq)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        return bool(lc.llama_memory_seq_rm(self.memory, seq, p0, p1))

    def seq_cp(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        lc.llama_memory_seq_cp(self.memory, source, target, p0, p1)

    def seq_keep(self, seq: int) -> None:
        lc.llama_memory_seq_keep(self.memory, seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        lc.llama_memory_seq_add(self.memory, seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        lc.llama_memory_seq_div(self.memory, seq, p0, p1, divisor)

    def clear(self, data: bool = True) -> None:
        lc.llama_memory_clear(self.memory, data)

    def can_shift(self) -> bool:
        return bool(lc.llama_memory_can_shift(self.memory))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> bytes:
        size = lc.llama_state_get_size(self.handle)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: lc.llama_state_get_data(self.handle, buffer, size)])

    def set_state(self, data: bytes) -> int:
        """Bytes read; 0 means refused."""
        return lc.llama_state_set_data(
            self.handle, (ctypes.c_uint8 * max(len(data), 1)).from_buffer_copy(data or b"\0"), len(data)
        )

    def seq_state(self, seq: int = 0) -> bytes:
        size = lc.llama_state_seq_get_size(self.handle, seq)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: lc.llama_state_seq_get_data(self.handle, buffer, size, seq)])

    def set_seq_state(self, data: bytes, seq: int = 0) -> int:
        """Bytes read; 0 means refused."""
        return lc.llama_state_seq_set_data(
            self.handle, (ctypes.c_uint8 * max(len(data), 1)).from_buffer_copy(data or b"\0"), len(data), seq
        )

    def save_file(self, path: Path, tokens: list[int]) -> bool:
        return bool(
            lc.llama_state_save_file(
                self.handle, str(path).encode(), (lc.llama_token * len(tokens))(*tokens), len(tokens)
            )
        )

    def load_file(self, path: Path, capacity: int = 4096) -> list[int] | None:
        tokens, count = (lc.llama_token * capacity)(), ctypes.c_size_t(0)
        ok = lc.llama_state_load_file(self.handle, str(path).encode(), tokens, capacity, ctypes.byref(count))
        return list(tokens[: count.value]) if ok else None

    def save_seq_file(self, path: Path, seq: int, tokens: list[int]) -> int:
        return lc.llama_state_seq_save_file(
            self.handle, str(path).encode(), seq, (lc.llama_token * len(tokens))(*tokens), len(tokens)
        )

    def load_seq_file(self, path: Path, seq: int, capacity: int = 4096) -> int:
        tokens, count = (lc.llama_token * capacity)(), ctypes.c_size_t(0)
        return lc.llama_state_seq_load_file(self.handle, str(path).encode(), seq, tokens, capacity, ctypes.byref(count))

    # -- the rest ------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """The context as functions of ``_core`` take it."""
        return int(ctypes.cast(self.handle, ctypes.c_void_p).value or 0)

    def raw_stats(self) -> dict[str, Any] | None:
        """What kvfold reports about this context's cache; None when it has no kvfold cache."""
        return _core.context_stats(self.address)

    def alignment(self) -> list[tuple[int, int, int, float, float, float, float]]:
        """Layer, head, tokens, share found, mean and largest divergence, share of the groups read."""
        return _core.alignment(self.address)

    def stats(self) -> dict[str, Any]:
        """What kvfold reports about this context's cache."""
        stats = self.raw_stats()
        assert stats is not None, f"no kvfold cache in a context of type {self.kv_type}"
        return stats

    def close(self) -> None:
        if self.handle:
            lc.llama_batch_free(self._batch)
            lc.llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def config_scope(kv_type: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Makes contexts created inside kvfold contexts of ``kv_type``; does nothing for an upstream type."""
    if kv_type in UPSTREAM:
        yield
        return
    _core.scope_push({"kv_type": kv_type, **settings})
    try:
        yield
    finally:
        _core.scope_pop()


def last_error() -> str:
    return _core.last_error() if _core is not None else ""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kld(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean KL divergence of ``other``'s next-token distributions from ``reference``'s, in nats."""
    assert reference.shape == other.shape
    if not np.isfinite(other).all():
        return float("inf")
    p, q = log_softmax(reference), log_softmax(other)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))
