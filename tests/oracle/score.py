"""Reference of ``kv_score``, ``kv_observe`` and ``kv_receive``."""

from __future__ import annotations

import numpy as np

from . import fp4
from .memory import FAR, HIDDEN, Current, Layer, read_rows
from .rotate import Rotation, rotate, rotate_f32

DECAY = 1 - 1 / 512


def observe(statistics: np.ndarray, q: np.ndarray, rotation: int = 0) -> np.ndarray:
    """Statistics float64 ``[1 + 2 * n_head * head_dim]`` with queries ``[n_q, n_head, head_dim]`` added."""
    q = rotate_f32(q, rotation).astype(np.float64)
    statistics = statistics.astype(np.float64)
    for row in q:
        statistics = DECAY * statistics + np.concatenate([[1.0], row.ravel(), (row**2).ravel()])
    return statistics


def score(
    layer: Layer,
    cell_src: np.ndarray,
    statistics: np.ndarray | None = None,
    *,
    n_head: int,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> np.ndarray:
    """Novelty, size and attention of every cell, float64 ``[3, n_cells]``; 0 where a cell is not far."""
    out = np.zeros((3, len(cell_src)))
    far = np.flatnonzero(cell_src == FAR)
    if not len(far):
        return out
    keys, values = layer.far_keys(far).astype(np.float64), layer.far_values(far).astype(np.float64)
    anchor = fp4.decode(layer.summaries[far // layer.group]).astype(np.float64).mean(axis=0)
    lengths = np.linalg.norm(keys, axis=2) * np.linalg.norm(anchor, axis=1)
    products = np.einsum("chd,hd->ch", keys, anchor)
    cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    out[0, far] = (1 - cosines).mean(axis=1)
    sizes = np.linalg.norm(values, axis=2)
    means = sizes.mean(axis=0)
    out[1, far] = np.divide(sizes, means, out=np.ones_like(sizes), where=means > 0).mean(axis=1)
    if statistics is None or statistics[0] <= 0:
        return out
    sums, squares = (statistics[1:].astype(np.float64) / statistics[0]).reshape(2, n_head, layer.head_dim)
    variance = np.maximum(0, squares - sums**2)
    keys = np.repeat(keys, n_head // layer.n_head_kv, axis=1)
    e = scale * np.einsum("jd,cjd->cj", sums, keys)
    if softcap:
        e = softcap * np.tanh(e / softcap)
    e += 0.5 * scale**2 * np.einsum("jd,cjd->cj", variance, keys**2)
    p = np.exp(e - e.max(axis=0))
    out[2, far] = len(far) * (p / p.sum(axis=0)).mean(axis=1)
    return out


def receive(
    layer: Layer,
    cur: Current,
    cell_src: np.ndarray,
    q: np.ndarray,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
) -> np.ndarray:
    """Largest attention weight of every cell over queries ``[n_q, n_head, head_dim]``, by KV head; 0 if it is not far.

    Returns float64 ``[n_head_kv, n_cells]``.
    """
    out = np.zeros((layer.n_head_kv, len(cell_src)))
    cells = np.flatnonzero(cell_src != HIDDEN)
    turned = Current(rotate(cur.k, rotation[0]), rotate(cur.v, rotation[1]))
    keys = read_rows(layer, turned, cells, cell_src[cells])[0].astype(np.float64)
    q = rotate(q, rotation[0])
    for i in range(len(q)):
        seen = np.full(len(cells), True) if mask is None else mask[i, cells] != -np.inf
        for j in range(q.shape[1]):
            head = j // (q.shape[1] // layer.n_head_kv)
            score = scale * (keys[seen, head] @ q[i, j])
            if softcap:
                score = softcap * np.tanh(score / softcap)
            weights = np.exp(score)
            total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[j])))
            at = cells[seen]
            out[head, at] = np.maximum(out[head, at], weights / total if len(at) else 0)
    out[:, cell_src != FAR] = 0
    return out


def order_by_need(received: np.ndarray, novelty: np.ndarray) -> np.ndarray:
    """Groups of a text, the least needed first, by attention received ``[heads, n]`` and novelty ``[n]``."""

    def among_neighbours(x: np.ndarray) -> np.ndarray:
        width = min(len(x), 193)
        first = np.clip(np.arange(len(x)) - 96, 0, len(x) - width)
        return np.array([(x[a : a + width] < y).sum() for a, y in zip(first, x, strict=True)])

    ranks = np.argsort(np.argsort(received, axis=1, kind="stable"), axis=1)
    wanted = np.sort(ranks, axis=0)[-((len(ranks) + 3) // 4) :].sum(axis=0)
    need = among_neighbours(wanted) + among_neighbours(novelty)
    around = np.pad(need, 1, mode="edge")
    return np.argsort(around[:-2] + 2 * need + around[2:], kind="stable")


#: Which queries are kept: one of so many, and how many of those.
RULES = {"last": (1, 32), "windows": (32, 48)}
WINDOW, STRIDE = 512, 256


def sample(q: np.ndarray, score: str, rotation: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Queries ``[n, n_head, head_dim]`` that are kept of all queries so far, the youngest first, and their ages."""
    every, rows = RULES[score]
    kept = np.arange(0, len(q), every)[::-1][:rows]
    return rotate_f32(q, rotation)[kept].astype(np.float16), len(q) - 1 - kept


def sampled(
    layer: Layer,
    cell_src: np.ndarray,
    cell_age: np.ndarray,
    q: np.ndarray,
    ages: np.ndarray,
    score: str,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> np.ndarray:
    """Score of every cell by attention of sampled queries ``[n, n_head, head_dim]``; 0 where a cell is not far."""
    out = np.zeros(len(cell_src))
    far = np.flatnonzero(cell_src == FAR)
    if not len(far):
        return out
    # What queries attend to: cells, or the summaries of groups, as often as they have far cells.
    if score == "last":
        unit, keys, old, count = np.arange(len(far)), layer.far_keys(far), cell_age[far], np.ones(len(far))
    else:
        groups, unit, count = np.unique(far // layer.group, return_inverse=True, return_counts=True)
        keys = fp4.decode(layer.summaries[groups])
        old = np.array([cell_age[far[unit == u]].min() for u in range(len(groups))])
    keys = keys.astype(np.float64)

    def attention(i: int, j: int) -> np.ndarray:
        e = scale * (keys[:, j // (q.shape[1] // layer.n_head_kv)] @ q[i, j].astype(np.float64))
        if softcap:
            e = softcap * np.tanh(e / softcap)
        weights = np.where(old >= ages[i], count * np.exp(e), 0)
        return weights / weights.sum() if weights.any() else weights

    every, rows = RULES[score]
    windows = (
        [(0, WINDOW + every * rows)]
        if score == "last"
        else [(first, first + WINDOW) for first in range(0, every * rows - WINDOW + 1, STRIDE)]
    )
    total, weight = np.zeros(len(keys)), 0.0
    for w, (first, stop) in enumerate(windows):
        members = [i for i in range(len(q)) if first <= ages[i] < stop and (old >= ages[i]).any()]
        if not members:
            continue
        weight += 2.0**-w * q.shape[1]
        for j in range(q.shape[1]):
            m = np.mean([attention(i, j) for i in members], axis=0)
            entropy = -(m[m > 0] * np.log(m[m > 0])).sum() / np.log(len(m)) if len(m) > 1 else 0.0
            total += 2.0**-w * m * (1 - entropy if score == "windows" else 1.0)
    out[far] = len(keys) * total[unit] / weight if weight else 0.0
    return out
