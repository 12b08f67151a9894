"""What a ``Llama`` object computed: its last logits, and how many tokens it evaluated for them."""

from __future__ import annotations

from typing import Any

import numpy as np


def last_logits(llm: Any) -> np.ndarray:
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()


def divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """Kullback-Leibler divergence of two rows of logits, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max()
        return np.asarray(x - np.log(np.exp(x).sum()))

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum())


def count_evaluated(llm: Any) -> list[int]:
    """A list that grows by the number of tokens of every batch the object decodes."""
    sizes: list[int] = []
    decode = llm._ctx.decode

    def counting(batch: Any) -> None:
        sizes.append(batch.n_tokens())
        decode(batch)

    llm._ctx.decode = counting
    return sizes
