"""Next-token distributions of a context, and how far two of them are apart."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..config import KvConfig

if TYPE_CHECKING:
    from ..llama import Llama

Rows = npt.NDArray[np.float32]

#: Tokens per micro-batch. Keys of the running micro-batch are exact, so a large one would flatter a lossy cache.
MICRO_BATCH = 128

REFERENCE = KvConfig("f16")


class Evaluator(Protocol):
    """What evaluates tokens: a ``Llama``, or something with its context, batch and vocabulary."""

    _ctx: Any
    _batch: Any

    def n_vocab(self) -> int:
        """Size of the vocabulary."""


def open_model(path: Path, config: KvConfig, n_ctx: int, n_threads: int | None, n_gpu_layers: int) -> Llama:
    """A quiet ``Llama``; f16 runs with flash attention and windows too, so that the cache type is all that differs."""
    from ..llama import Llama

    return Llama(
        path,
        kv=config,
        n_ctx=n_ctx,
        n_batch=MICRO_BATCH,
        n_ubatch=MICRO_BATCH,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=n_gpu_layers,
        swa_full=False,
        flash_attn=True,
        verbose=False,
    )


def distributions(
    llm: Llama, tokens: Sequence[int], first: int = 0, *, step: int = MICRO_BATCH
) -> Iterator[tuple[int, Rows]]:
    """Evaluate tokens from the start of the context; yields log-probabilities after each of them.

    Args:
        llm: a model; its cache is cleared first.
        tokens: at most as many as the context has.
        first: positions before this one are evaluated without their distributions.
        step: from ``first`` on so many tokens at a time. Look-up chooses what is read for up to 16; 1 is as a reply
            comes.

    Yields:
        position of the first row, and rows ``[n, n_vocab]``, f32: log-probability of each next token.
    """
    llm.reset()
    llm._ctx.kv_cache_clear()
    yield from extend(llm, tokens, 0, first, step=step)


def extend(
    llm: Evaluator, tokens: Sequence[int], position: int, first: int, *, step: int = MICRO_BATCH
) -> Iterator[tuple[int, Rows]]:
    """As ``distributions``, for ``tokens`` that follow ``position`` tokens in the cache."""
    n_vocab = llm.n_vocab()
    done = 0
    while done < len(tokens):
        at = position + done
        # Up to `first` no distribution is asked for: a micro-batch does not straddle it.
        wanted = at >= first
        stop = min(done + (step if wanted else MICRO_BATCH), len(tokens))
        if not wanted:
            stop = min(stop, done + first - at)
        piece = list(tokens[done:stop])
        llm._batch.set_batch(batch=piece, n_past=at, logits_all=wanted)
        llm._ctx.decode(llm._batch)
        if wanted:
            logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(len(piece), n_vocab))
            yield at, log_softmax(logits)
        done = stop


def log_softmax(logits: npt.NDArray[Any]) -> Rows:
    """Log-probabilities of rows of logits."""
    x = logits.astype(np.float32)
    x -= x.max(axis=-1, keepdims=True)
    total = np.log(np.exp(x).sum(axis=-1, keepdims=True, dtype=np.float64))
    return np.asarray(x - total.astype(np.float32), dtype=np.float32)


def divergence(reference: Rows, other: Rows) -> npt.NDArray[np.float64]:
    """Kullback-Leibler divergence of each row of ``other`` from ``reference``, in nats."""
    return np.asarray((np.exp(reference) * (reference - other)).sum(axis=-1, dtype=np.float64))


def tokenize(llm: Llama, text: str, *, start: bool = True) -> list[int]:
    """Tokens of a text, with the model's start token if ``start`` and it has one."""
    return list(llm.tokenize(text.encode(), add_bos=start, special=False))
