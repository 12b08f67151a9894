"""Reference of ``kv_score`` and ``kv_observe``."""

from __future__ import annotations

import numpy as np

from . import fp4
from .memory import FAR, Layer
from .rotate import rotate_f32

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
