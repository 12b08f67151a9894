"""Reference of ``kv_fold``: complete groups move from exact rows to the FP4 far tier."""

from __future__ import annotations

import numpy as np

from . import fp4
from .memory import HIDDEN, Current, Layer, read_key, read_value


def fold(layer: Layer, cur: Current, plan: np.ndarray) -> None:
    """Fold the groups of ``plan``, int ``[n_groups, 1 + group]``: group index, then the source of each member.

    Means and differences are float32; every group's rows are read before the group is written.
    """
    present = [[j for j, src in enumerate(row[1:]) if src != HIDDEN] for row in plan]
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for row, members in zip(plan, present, strict=True):
        first = int(row[0]) * layer.group
        shape = (len(members), layer.n_head_kv, layer.head_dim)
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for i, j in enumerate(members):
            for head in range(layer.n_head_kv):
                keys[i, head] = read_key(layer, cur, first + j, int(row[1 + j]), head)
                values[i, head] = read_value(layer, cur, first + j, int(row[1 + j]), head)
        rows.append((keys, values))

    for row, members, (keys, values) in zip(plan, present, rows, strict=True):
        group = int(row[0])
        cells = [group * layer.group + j for j in range(layer.group)]
        layer.far_k[cells] = 0
        layer.far_v[cells] = 0
        if not members:
            continue
        for head in range(layer.n_head_kv):
            mean = mean_in_order(keys[:, head])
            layer.summaries[group, head] = fp4.encode(mean)
            summary = fp4.decode(layer.summaries[group, head])
            variance = np.mean((keys[:, head].astype(np.float64) - mean) ** 2)
            with np.errstate(over="ignore"):
                layer.spread[group, head] = np.float16(variance)
            for i, j in enumerate(members):
                layer.far_k[cells[j], head] = fp4.encode(keys[i, head] - summary)
                layer.far_v[cells[j], head] = fp4.encode(values[i, head])


def mean_in_order(rows: np.ndarray) -> np.ndarray:
    """Mean of float32 rows: added one after the other, then multiplied by the rounded reciprocal of their number."""
    total = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        total = total + row
    return total * (np.float32(1) / np.float32(len(rows)))
