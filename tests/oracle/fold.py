"""Reference of ``kv_fold``: complete groups move from exact rows to the FP4 far tier."""

from __future__ import annotations

import numpy as np

from . import fp4
from .memory import HIDDEN, SPAN, Current, Layer, read_rows
from .rotate import Rotation, rotate_f32


def fold(layer: Layer, cur: Current, plan: np.ndarray, rotation: Rotation = (0, 0)) -> None:
    """Fold the groups of ``plan``, int ``[n_groups, 1 + group]``: group index, then the source of each member.

    Means and differences are float32. A group's rows are read, far ones with the old summary, before it is written.
    Rows of ``cur`` are rotated by ``rotation``, those of the layer are already.
    """
    cur = Current(rotate_f32(cur.k, rotation[0]), rotate_f32(cur.v, rotation[1]))
    for group, *sources in np.asarray(plan).tolist():
        first = group * layer.group
        present = np.array([first + j for j, src in enumerate(sources) if src != HIDDEN], dtype=int)
        keys, values = read_rows(layer, cur, present, np.array([s for s in sources if s != HIDDEN], dtype=int))
        for far in (layer.far_k, layer.far_v):
            layer.put_far_rows(far, slice(first, first + layer.group), 0)
        if not len(present):
            continue
        mean = mean_in_order(keys)
        layer.summaries[group] = fp4.encode(mean)
        summary = fp4.decode(layer.summaries[group])
        variance = np.mean((keys.astype(np.float64) - mean) ** 2, axis=(0, 2))
        with np.errstate(over="ignore"):
            layer.spread[group] = variance.astype(np.float16)
        layer.put_far_rows(layer.far_k, present, fp4.encode(keys - summary, layer.scale_group))
        layer.put_far_rows(layer.far_v, present, fp4.encode(values, layer.scale_group))


def summarise(layer: Layer, spans: list[int]) -> None:
    """Summaries and spreads of spans, from those of their groups."""
    n = SPAN // layer.group
    for span in spans:
        groups = slice(span * n, (span + 1) * n)
        rows = fp4.decode(layer.summaries[groups])
        mean = mean_in_order(rows)
        within = layer.spread[groups].astype(np.float64).mean(axis=0)
        between = np.mean((rows.astype(np.float64) - mean) ** 2, axis=(0, 2))
        layer.span_summaries[span] = fp4.encode(mean)
        with np.errstate(over="ignore"):
            layer.span_spread[span] = (within + between).astype(np.float16)


def mean_in_order(rows: np.ndarray) -> np.ndarray:
    """Mean over the first axis in float32: added in order, then times the rounded reciprocal of their number."""
    total = np.zeros(rows.shape[1:], np.float32)
    for row in rows:
        total = total + row
    return total * (np.float32(1) / np.float32(len(rows)))
