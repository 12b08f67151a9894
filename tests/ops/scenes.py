"""Random but realistic inputs of the operations: layers with far, near, current and hidden cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from oracle.fold import fold
from oracle.memory import FAR, HIDDEN, Current, Layer, current


@dataclass
class Scene:
    """A layer, a micro-batch and the source of every cell."""

    layer: Layer
    cur: Current
    cell_src: np.ndarray


def rows(rng: np.random.Generator, n: int, n_head_kv: int, head_dim: int) -> np.ndarray:
    """Keys or values as models have them: a strong mean per channel, neighbours alike, a few large channels."""
    mean = 2 * rng.standard_normal((1, n_head_kv, head_dim))
    drift = np.cumsum(rng.standard_normal((n, n_head_kv, head_dim)), axis=0) / 8
    x = mean + drift + 0.3 * rng.standard_normal((n, n_head_kv, head_dim))
    x[..., rng.integers(0, head_dim, 2)] *= 4
    return x.astype(np.float32)


def scene(
    rng: np.random.Generator,
    *,
    n_cells: int,
    n_head_kv: int,
    head_dim: int,
    group: int,
    share: dict[str, float],
    n_near: int | None = None,
    n_rows: int | None = None,
    spans: bool = False,
    scale_group: int = 16,
) -> Scene:
    """Cells in random states; ``share`` gives the odds of "far", "near", "current" and "hidden".

    Whatever no visible cell owns holds NaN: unused near rows and micro-batch rows, and all bytes of hidden cells. A far
    scale byte of 0xFF stands for a NaN too.
    """
    n_cells = -(-n_cells // group) * group
    kinds = rng.choice(list(share), n_cells, p=np.array(list(share.values())) / sum(share.values()))
    n_near = n_near or int((kinds == "near").sum()) + 3
    n_rows = n_rows or int((kinds == "current").sum()) + 2
    layer = Layer.empty(n_head_kv, head_dim, group, n_cells, n_near, fill=0xFF, spans=spans, scale_group=scale_group)
    nan = np.full((n_rows, n_head_kv, head_dim), np.nan, np.float32)
    cur = Current(nan, nan.copy())
    keys, values = rows(rng, n_cells, n_head_kv, head_dim), rows(rng, n_cells, n_head_kv, head_dim)

    far = np.flatnonzero(kinds == "far")
    plan = []
    for index in sorted({int(c) // group for c in far}):
        members = range(index * group, (index + 1) * group)
        plan.append([index, *(current(c) if kinds[c] == "far" else HIDDEN for c in members)])
    if plan:
        fold(layer, Current(keys, values), np.array(plan, np.int32))
        not_far = np.flatnonzero(kinds != "far")
        layer.put_far_rows(layer.far_k, not_far, 0xFF)
        layer.put_far_rows(layer.far_v, not_far, 0xFF)

    cell_src = np.full(n_cells, HIDDEN, np.int32)
    cell_src[far] = FAR
    near = np.flatnonzero(kinds == "near")
    for cell, row in zip(near, rng.permutation(n_near), strict=False):
        cell_src[cell] = row
        layer.near_k[row], layer.near_v[row] = keys[cell], values[cell]
    now = np.flatnonzero(kinds == "current")
    for cell, row in zip(now, rng.permutation(n_rows), strict=False):
        cell_src[cell] = current(int(row))
        cur.k[row], cur.v[row] = keys[cell], values[cell]
    return Scene(layer, cur, cell_src)


def plan_of(rng: np.random.Generator, s: Scene, share: float = 0.6) -> np.ndarray:
    """Some of the groups, in random order, each member from where it is; hidden cells are absent members."""
    m = s.layer.group
    groups = np.array([g for g in range(len(s.cell_src) // m) if (s.cell_src[g * m : (g + 1) * m] != HIDDEN).any()])
    chosen = rng.permutation(groups)[: max(1, round(share * len(groups)))]
    return np.array([[g, *s.cell_src[g * m : (g + 1) * m]] for g in chosen], np.int32)


#: Mixes of cell states, from the everyday one to the corners.
MIXES: dict[str, dict[str, float]] = {
    "everyday": {"far": 0.7, "near": 0.15, "current": 0.1, "hidden": 0.05},
    "all-far": {"far": 1.0},
    "all-near": {"near": 1.0},
    "all-current": {"current": 1.0},
    "no-far": {"near": 0.5, "current": 0.4, "hidden": 0.1},
    "mostly-hidden": {"far": 0.04, "near": 0.03, "current": 0.03, "hidden": 0.9},
}
