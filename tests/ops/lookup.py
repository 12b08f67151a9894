"""The compiled look-up operations called with the oracle's structures, and layers to look things up in."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
from native import memory
from oracle.memory import FAR, HIDDEN, Current, Layer, current
from oracle.rotate import Rotation
from oracle.select import Budget, Choice, limits, number_taken
from scenes import Scene, scene


@dataclass
class Selection:
    """Result of ``kv_select``: ``lists[i][h]`` are group numbers; ``unread [n_q, n_head]``."""

    lists: list[list[np.ndarray]]
    raw: np.ndarray
    visible: int
    taken: int
    unread: np.ndarray


def unpack(raw: np.ndarray) -> list[list[np.ndarray]]:
    return [[row[1 : 1 + row[0]] for row in query] for query in raw]


def pack(lists: list[list[np.ndarray]], room: int = 0) -> np.ndarray:
    """Lists as the operations take them; places that are not in use hold a number that would be noticed."""
    longest = max(room, *(len(row) for query in lists for row in query))
    raw = np.full((len(lists), len(lists[0]), 1 + longest), 1 << 30, np.int32)
    for i, query in enumerate(lists):
        for h, row in enumerate(query):
            raw[i, h, 0] = len(row)
            raw[i, h, 1 : 1 + len(row)] = row
    return raw


def bits(flags: np.ndarray) -> np.ndarray:
    """Flags as int32 words, the first in the lowest bit."""
    padded = np.zeros(max(32, -(-len(flags) // 32) * 32), bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.int32)


def select(
    core: ModuleType,
    layer: Layer,
    cell_src: np.ndarray,
    q: np.ndarray,
    budget: Budget,
    mask: np.ndarray | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
    pool: list[list[np.ndarray]] | None = None,
    ready: np.ndarray | None = None,
    most_spans: int = 1,
    capacity: int | None = None,
    n_threads: int = 1,
) -> Selection:
    raw, visible, taken, unread = core.kv_select(
        layer.far_k,
        layer.far_v,
        layer.side,
        layer.near_k,
        layer.near_v,
        np.ascontiguousarray(cell_src, np.int32),
        np.ascontiguousarray(q),
        None if mask is None else np.ascontiguousarray(mask),
        None if pool is None else pack(pool),
        group=layer.group,
        scale=float(scale),
        softcap=softcap,
        rotation=rotation,
        lookup=(budget.lookup_min, budget.lookup_max),
        threshold=budget.threshold,
        min_tokens=budget.min_tokens,
        max_tokens=budget.max_tokens,
        ready=None if ready is None else bits(ready),
        most_spans=most_spans,
        capacity=capacity,
        n_threads=n_threads,
    )
    return Selection(unpack(raw), raw, visible, taken, unread)


def attend_sparse(
    core: ModuleType,
    layer: Layer,
    cur: Current,
    cell_src: np.ndarray,
    q: np.ndarray,
    selected: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    sinks: np.ndarray | None = None,
    unread: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
    n_threads: int = 1,
) -> np.ndarray:
    return np.asarray(
        core.kv_attend_sparse(
            *memory(layer, cur),
            np.ascontiguousarray(cell_src, np.int32),
            np.ascontiguousarray(q),
            selected,
            None if mask is None else np.ascontiguousarray(mask),
            sinks,
            unread,
            group=layer.group,
            scale=float(scale),
            softcap=softcap,
            rotation=rotation,
            n_threads=n_threads,
        )
    )


#: Odds of the states of groups: all cells far; some of them; none (near and current rows); nobody sees it.
EVERYDAY = {"complete": 0.8, "partial": 0.08, "exact": 0.07, "hidden": 0.05}


def lookup_scene(
    rng: np.random.Generator,
    *,
    n_groups: int,
    group: int,
    head_dim: int = 64,
    n_head_kv: int = 2,
    states: list[str] | None = None,
    share: dict[str, float] | None = None,
    spans: bool = False,
    scale_group: int = 16,
) -> Scene:
    """A layer whose groups are in the given states, or in random ones.

    Whatever no query may read is poisoned: rows of cells that are not far, summaries and spreads of groups without far
    cells, near and current rows that no cell owns.
    """
    share = share or EVERYDAY
    if states is None:
        states = list(rng.choice(list(share), n_groups, p=np.array(list(share.values())) / sum(share.values())))
    n_cells = n_groups * group
    s = scene(
        rng,
        n_cells=n_cells,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        group=group,
        share={"far": 1.0},
        n_near=n_cells + 3,
        n_rows=n_cells + 2,
        spans=spans,
        scale_group=scale_group,
    )
    layer, src = s.layer, s.cell_src
    keys, values = layer.far_keys(np.arange(n_cells)), layer.far_values(np.arange(n_cells))
    near, rows = rng.permutation(n_cells + 3), rng.permutation(n_cells + 2)
    for g, state in enumerate(states):
        cells = np.arange(g * group, (g + 1) * group)
        if state == "partial":
            keep = int(rng.integers(1, group))
            cells = np.sort(rng.permutation(cells)[keep:])
        if state == "complete":
            continue
        for c in cells:
            kind = "hidden" if state == "hidden" else rng.choice(["near", "current", "hidden"])
            src[c] = {"hidden": HIDDEN, "near": near[c], "current": current(int(rows[c]))}[kind]
            if kind == "near":
                layer.near_k[near[c]], layer.near_v[near[c]] = keys[c], values[c]
            elif kind == "current":
                s.cur.k[rows[c]], s.cur.v[rows[c]] = keys[c], values[c]
        layer.put_far_rows(layer.far_k, cells, 0xFF)
        layer.put_far_rows(layer.far_v, cells, 0xFF)
        if not (src[g * group : (g + 1) * group] == FAR).any():
            layer.summaries[g] = 0xFF
            layer.spread[g] = np.nan
    return s


def check_list(got: np.ndarray, choice: Choice, visible: int, group: int, budget: Budget) -> bool:
    """Asserts that a list is what the rule gives for scores within rounding of the oracle's; True: equal.

    A score on the edge of a bin may fall to either side: 1/64 nat is 0.0156, and float32 scores of moderate size are
    good to 1e-4 nat, so 0.01 of a bin is left to rounding.
    """
    if np.array_equal(got, choice.groups):
        return True
    low, high = choice.bins(-0.01), choice.bins(0.01)
    least, most = limits(len(choice.candidates), visible, group, budget)
    counts = [number_taken(b, least, most, t * budget.threshold) for b in (low, high) for t in (0.999, 1.001)]
    assert np.array_equal(got, np.unique(got)), "a list is ascending"
    assert np.isin(choice.partial, got).all(), "partial groups are always read"
    chosen = np.isin(choice.candidates, got)
    k = int(chosen.sum())
    assert len(got) == k + len(choice.partial), "nothing but candidates and partial groups"
    assert min(counts) <= k <= max(counts), f"{k} taken, but {sorted(set(counts))} are right"
    # Keys that sort as the rule does: by bin, then the more recent group first.
    n = int(choice.candidates.max()) + 1
    best, worst = (bins * n + (n - 1 - choice.candidates) for bins in (low, high))
    surely_before = np.searchsorted(np.sort(worst), best)
    maybe_before = np.searchsorted(np.sort(best), worst) - (best < worst)
    wrong = choice.candidates[(chosen & (surely_before >= k)) | (~chosen & (maybe_before < k))]
    assert not len(wrong), f"groups {wrong} are read although others are better, or the other way round"
    return False
