"""Reference of ``kv_attend``: softmax attention in float64 over rows of every kind."""

from __future__ import annotations

import numpy as np

from .memory import HIDDEN, Current, Layer, read_rows
from .rotate import Rotation, rotate


def attend(
    layer: Layer,
    cur: Current,
    cell_src: np.ndarray,
    q: np.ndarray,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
) -> np.ndarray:
    """Attention of queries ``q`` float32 ``[n_q, n_head, head_dim]`` over ``len(cell_src)`` cells.

    mask      ``[n_q, n_kv]``, added to the (capped) scores; -inf hides a cell from a query
    sinks     ``[n_head]``, a logit that joins the denominator and carries no value
    rotation  the basis of the layer's keys and values, which queries and the rows of ``cur`` are not in yet

    Returns float64 ``[n_q, n_head, head_dim]``. A query that sees no cell gets zeros.
    """
    n_q, n_head, head_dim = q.shape
    q = rotate(q, rotation[0])
    cur = Current(rotate(cur.k, rotation[0]), rotate(cur.v, rotation[1]))
    n_kv = len(cell_src)
    visible = np.flatnonzero(np.asarray(cell_src) != HIDDEN)
    out = np.zeros((n_q, n_head, head_dim))
    if not len(visible):
        return rotate(out, rotation[1])
    mask64 = np.zeros((n_q, n_kv)) if mask is None else np.asarray(mask[:n_q, :n_kv], np.float64)
    mask64 = mask64[:, visible]
    all_keys, all_values = read_rows(layer, cur, visible, np.asarray(cell_src)[visible])
    for kv_head in range(layer.n_head_kv):
        keys, values = all_keys[:, kv_head].astype(np.float64), all_values[:, kv_head].astype(np.float64)
        ratio = n_head // layer.n_head_kv
        for head in range(kv_head * ratio, (kv_head + 1) * ratio):
            scores = scale * (q[:, head] @ keys.T)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            scores = scores + mask64
            sees = np.isfinite(scores).any(axis=1)
            sink = -np.inf if sinks is None else float(sinks[head])
            top = np.maximum(np.where(sees, scores.max(axis=1), 0.0), sink)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1) + np.exp(sink - top)
            out[sees, head] = (weights[sees] @ values) / total[sees, None]
    return rotate(out, rotation[1])
