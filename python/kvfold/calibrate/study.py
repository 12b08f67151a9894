"""Look-ups with different settings in the same text, against reading everything."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import KvConfig
from ..dry_run import scope
from ..stats import Alignment
from ..verify.scoring import Rows, divergence, extend, open_model, tokenize

if TYPE_CHECKING:
    from ..llama import Llama

#: Tokens evaluated together. Each has its own look-ups, and all share the reading of the weights.
STEP = 8


@dataclass(frozen=True)
class Passage:
    """A text up to where look-ups are measured, and what comes then.

    Attributes:
        state: the context after ``start`` tokens, as llama.cpp saves it.
        start: tokens before.
        tokens: that follow: first those that are measured, then as many that the result is checked on.
        rows: log-probabilities after each of them, everything read.
    """

    state: bytes
    start: int
    tokens: list[int]
    rows: Rows


@dataclass(frozen=True)
class Measured:
    """What look-ups did: divergence of the next token's distribution from reading everything (nats, mean), and
    what each layer read and found (none without ``kv_alignment``)."""

    kld: float
    heads: list[Alignment]


class _Branch:
    """A further context on the model of a ``Llama``; an ``Evaluator``."""

    def __init__(self, llm: Llama, config: KvConfig) -> None:
        import llama_cpp
        from llama_cpp._internals import LlamaContext

        from .. import _runtime
        from .._log import recording

        self._api = llama_cpp
        self._core = _runtime.load()
        self._batch = llm._batch
        self.n_vocab = llm.n_vocab
        params = type(llm.context_params).from_buffer_copy(llm.context_params)
        with scope(self._core, config), recording() as log:
            try:
                self._ctx = LlamaContext(model=llm._model, params=params, verbose=False)
            except ValueError:
                raise ValueError(log.reason() or self._core.last_error() or "no context could be made") from None

    def restore(self, state: bytes) -> None:
        data = np.frombuffer(state, dtype=np.uint8)
        pointer = data.ctypes.data_as(self._api.ctypes.POINTER(self._api.ctypes.c_uint8))
        if self._api.llama_state_set_data(self._ctx.ctx, pointer, len(data)) != len(data):
            raise RuntimeError(f"the state could not be restored: {self._core.last_error() or 'no reason given'}")

    def alignment(self) -> list[Alignment]:
        return [Alignment(*row) for row in self._core.alignment(self._ctx.ctx)]

    def close(self) -> None:
        self._ctx.close()


class Study:
    """Passages of some texts in one model. Use as a context manager.

    Args:
        path: the model.
        config: a type with look-ups; its group, sinks and tail are used, and what ``measure`` is not told.
        n_ctx: context.
        length: tokens that are measured, and that are checked, in each passage.
        n_threads: threads, ``None`` for the default.

    Everything is on the CPU, where the runtime can compare look-ups with attention over everything.
    """

    def __init__(self, path: Path, config: KvConfig, n_ctx: int, length: int, n_threads: int | None) -> None:
        self.config = config
        self.n_ctx = n_ctx
        self.length = length
        self.passages: list[Passage] = []
        dense = config.merged(kv_layers="dense", kv_min_context=1)
        self._llm = open_model(path, dense, n_ctx, n_threads, 0)

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    @property
    def fingerprint(self) -> int:
        """Of the model (``kvfold_model_fingerprint``)."""
        from .. import _runtime

        return int(_runtime.load().model_fingerprint(self._llm._model.model))

    @property
    def model_name(self) -> str:
        """What the model is, in llama.cpp's words."""
        return str(self._llm._model.desc())

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text."""
        return tokenize(self._llm, text)

    def add(self, tokens: Sequence[int]) -> None:
        """Read a passage of ``n_ctx`` tokens or fewer, whose last ``2 * length`` are measured and checked."""
        llm, start = self._llm, len(tokens) - 2 * self.length
        llm.reset()
        llm._ctx.kv_cache_clear()
        for _ in extend(llm, tokens[:start], 0, start):
            pass
        state = llm.save_state().llama_state
        rows = np.concatenate([r for _, r in extend(llm, tokens[start:], start, start, step=STEP)])
        self.passages.append(Passage(state, start, list(tokens[start:]), rows))

    @contextmanager
    def _branch(self, settings: dict[str, Any]) -> Iterator[_Branch]:
        branch = _Branch(self._llm, self.config.merged(**{"kv_min_context": 1, **settings}))
        try:
            yield branch
        finally:
            branch.close()

    def measure(self, *, check: bool = False, **settings: Any) -> Measured:
        """Look-ups with these ``kv_*`` settings over all passages: the tokens to measure, or those to ``check``.

        With ``check`` the tokens before are read with look-ups as well, as in a reply.
        """
        klds: list[Any] = []
        heads: list[list[Alignment]] = []
        n = 2 * self.length if check else self.length
        with self._branch(settings) as branch:
            for passage in self.passages:
                branch._ctx.kv_cache_clear()
                branch.restore(passage.state)
                tokens = passage.tokens[:n]
                rows = np.concatenate([r for _, r in extend(branch, tokens, passage.start, 0, step=STEP)])
                klds.append(divergence(passage.rows[n - self.length : n], rows[n - self.length :]))
                heads.append(branch.alignment())
        return Measured(float(np.mean(np.concatenate(klds))), [_mean(rows) for rows in zip(*heads, strict=True)])


def _mean(rows: Sequence[Alignment]) -> Alignment:
    """One head's numbers over passages of the same length."""
    first = rows[0]
    return Alignment(
        first.layer,
        first.head,
        sum(r.tokens for r in rows),
        float(np.mean([r.recalled for r in rows])),
        float(np.mean([r.divergence for r in rows])),
        max(r.largest for r in rows),
        float(np.mean([r.read for r in rows])),
    )
