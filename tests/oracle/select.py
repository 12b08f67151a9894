"""Reference of look-up: which groups are read, what estimates say they are worth, and what they are worth.

For one query and KV head a *complete* group has all cells far, a *partial* one some; *candidates* are the complete
groups whose first cell the query's mask does not hide (and, with a pool, that are in it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import fp4
from .attend import attend
from .memory import FAR, HIDDEN, SPAN, Current, Layer, read_rows
from .rotate import Rotation, rotate

BINS = 2048
BINS_PER_NAT = 64
SPREAD_WEIGHT = 0.75
STAND_IN = 0.5
MOST_STAND_IN = 1 / 16  # of what was read


@dataclass(frozen=True)
class Budget:
    """Shares of the visible complete groups, share of estimated mass that may stay unread, and bounds in tokens."""

    lookup_min: float
    lookup_max: float
    threshold: float = 0.0
    min_tokens: int = 0
    max_tokens: int = 0  # 0: none


@dataclass
class Choice:
    """What one query and KV head looks at.

    candidates  groups, ascending; p the log of what each is estimated to get, summed over heads as probabilities
    taken       how many of them are taken; partial the groups that are read anyway
    e           estimates of each head, ``[n_head, n]``; group: their tokens
    """

    candidates: np.ndarray
    p: np.ndarray
    taken: int
    partial: np.ndarray
    e: np.ndarray
    group: int

    def bins(self, shift: float = 0.0) -> np.ndarray:
        """Steps of 1/64 nat from the best candidate; ``shift`` (in steps) asks what another rounding could give."""
        if not len(self.p):
            return np.zeros(0, int)
        grid = np.floor(-BINS_PER_NAT * self.p + shift)
        return np.clip(grid - grid.min(), 0, BINS - 1).astype(int)

    def order(self) -> np.ndarray:
        """Candidates, best first: by bin, then the more recent (higher) group first."""
        bins = self.bins()
        return self.candidates[np.lexsort((-self.candidates, bins))]

    @property
    def groups(self) -> np.ndarray:
        """The list as the operation gives it."""
        return np.sort(np.concatenate([self.order()[: self.taken], self.partial]))

    def unread(self, groups: np.ndarray) -> np.ndarray:
        """Log of what each head's tokens in the candidates beside ``groups`` are estimated to get; -inf: nothing."""
        left = self.e[:, ~np.isin(self.candidates, groups)]
        with np.errstate(divide="ignore"):
            return np.log(self.group * np.exp(left).sum(axis=1))


def far_groups(cell_src: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Which groups are complete and which are partial, bool ``[n_groups]``; cells past the end are not far."""
    n_groups = -(-len(cell_src) // group)
    far = np.zeros(n_groups * group, bool)
    far[: len(cell_src)] = np.asarray(cell_src) == FAR
    members = far.reshape(n_groups, group).sum(axis=1)
    return members == group, (members > 0) & (members < group)


def estimates(
    summaries: np.ndarray, spread: np.ndarray, q: np.ndarray, scale: float, softcap: float = 0.0
) -> np.ndarray:
    """``e[j, g]`` of query heads ``q [n, head_dim]`` (rotated) for groups, or spans, of one KV head that have these.

    It is the log of the attention that each should get.
    """
    summaries, spread = fp4.decode(summaries).astype(np.float64), spread.astype(np.float64)
    q = scale * np.asarray(q, np.float64)
    score = q @ summaries.T
    if softcap:
        score = softcap * np.tanh(score / softcap)
    return score + SPREAD_WEIGHT * (q**2).sum(axis=1, keepdims=True) * spread


def combine(e: np.ndarray) -> np.ndarray:
    """Sum over heads of each head's probabilities over the candidates, as a log: ``[n_head, n] -> [n]``."""
    if not e.shape[1]:
        return np.zeros(0)
    top = e.max(axis=1, keepdims=True)
    log_probability = e - top - np.log(np.exp(e - top).sum(axis=1, keepdims=True))
    best = log_probability.max(axis=0)
    return best + np.log(np.exp(log_probability - best).sum(axis=0))


def limits(n: int, visible: int, group: int, budget: Budget) -> tuple[int, int]:
    """Fewest and most of ``n`` candidates when ``visible`` complete groups are seen."""
    floor = -(-budget.min_tokens // group)
    bound = min(n, budget.max_tokens // group) if budget.max_tokens else n
    least, most = (
        min(bound, max(int(np.ceil(np.float32(share) * np.float32(visible))), floor))
        for share in (budget.lookup_min, budget.lookup_max)
    )
    return least, most


def number_taken(bins: np.ndarray, least: int, most: int, threshold: float) -> int:
    """Whole bins until what is left holds at most ``threshold`` of the mass, within the limits."""
    if not len(bins) or threshold == 0:
        return most
    count = np.bincount(bins, minlength=BINS)
    mass = count * np.exp(-np.arange(BINS) / BINS_PER_NAT)
    left = np.append(np.cumsum(mass[::-1])[::-1][1:], 0.0)
    last = int(np.argmax(left <= threshold * mass.sum()))
    return min(max(int(count[: last + 1].sum()), least), most)


def choose(
    layer: Layer,
    cell_src: np.ndarray,
    q: np.ndarray,
    budget: Budget,
    mask: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
    pool: list[list[np.ndarray]] | None = None,
) -> list[list[Choice]]:
    """The choice of every query and KV head; ``pool[i][h]`` are the groups that those may choose from."""
    n_q, n_head, _ = q.shape
    q = rotate(q, rotation[0])
    complete, partial = far_groups(cell_src, layer.group)
    first = np.arange(len(complete)) * layer.group
    ratio = n_head // layer.n_head_kv
    choices: list[list[Choice]] = []
    for i in range(n_q):
        seen = complete & (np.ones(len(complete), bool) if mask is None else mask[i, first] != -np.inf)
        choices.append([])
        for h in range(layer.n_head_kv):
            allowed = seen.copy()
            if pool is not None:
                allowed &= np.isin(np.arange(len(complete)), pool[i][h])
            candidates = np.flatnonzero(allowed)
            parts = layer.summaries[candidates, h], layer.spread[candidates, h]
            e = estimates(*parts, q[i, h * ratio : (h + 1) * ratio], scale, softcap)
            choice = Choice(candidates, combine(e), 0, np.flatnonzero(partial), e, layer.group)
            least, most = limits(len(candidates), int(seen.sum()), layer.group, budget)
            choice.taken = number_taken(choice.bins(), least, most, budget.threshold)
            choices[-1].append(choice)
    return choices


def choose_spans(
    layer: Layer,
    ready: np.ndarray,
    q: np.ndarray,
    most: int,
    mask: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
) -> list[list[Choice]]:
    """The first of two levels: a ``Choice`` among spans. ``partial`` are those that are not ``ready`` (bool, each)."""
    n_q, n_head, _ = q.shape
    q = rotate(q, rotation[0])
    ratio = n_head // layer.n_head_kv
    first = np.arange(len(ready)) * SPAN
    choices: list[list[Choice]] = []
    for i in range(n_q):
        seen = np.flatnonzero(ready & (True if mask is None else mask[i, first] != -np.inf))
        choices.append([])
        for h in range(layer.n_head_kv):
            parts = layer.span_summaries[seen, h], layer.span_spread[seen, h]
            e = estimates(*parts, q[i, h * ratio : (h + 1) * ratio], scale, softcap)
            choices[-1].append(Choice(seen, combine(e), min(most, len(seen)), np.flatnonzero(~ready), e, SPAN))
    return choices


def groups_of_spans(spans: np.ndarray, n_spans: int, n_groups: int, group: int) -> np.ndarray:
    """The groups of spans, and those behind the last one."""
    span = np.arange(n_groups) * group // SPAN
    return np.flatnonzero(np.isin(span, spans) | (span >= n_spans))


def attend_listed(
    layer: Layer,
    cur: Current,
    cell_src: np.ndarray,
    q: np.ndarray,
    lists: list[list[np.ndarray]],
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    unread: np.ndarray | None = None,
    **options,
) -> np.ndarray:
    """Attention where query ``i`` and KV head ``h`` read, of the far cells, those of the groups ``lists[i][h]``.

    One dense attention for every query and KV head, over a source array in which all other far cells are hidden. With
    ``unread`` (see ``Choice``), the mean of the values that are read stands in for the rest.
    """
    n_q, n_head, _ = q.shape
    ratio = n_head // layer.n_head_kv
    out = np.zeros(q.shape)
    for i in range(n_q):
        for h in range(layer.n_head_kv):
            heads = slice(h * ratio, (h + 1) * ratio)
            src = np.array(cell_src)
            listed = np.isin(np.arange(len(src)) // layer.group, lists[i][h])
            src[(src == FAR) & ~listed] = HIDDEN
            row = None if mask is None else mask[i : i + 1]
            result = attend(layer, cur, src, q[i : i + 1], row, sinks, **options)[0]
            if unread is not None:
                mean, read, total = mean_and_mass(layer, cur, src, q[i : i + 1], row, sinks, h, **options)
                mass = np.minimum(STAND_IN * np.exp(unread[i, heads].astype(np.float64)), MOST_STAND_IN * read)
                share = np.divide(mass, total + mass, out=np.zeros(ratio), where=mass > 0)[:, None]
                result[heads] = (1 - share) * result[heads] + share * mean
            out[i, heads] = result[heads]
    return out


def mean_and_mass(
    layer: Layer,
    cur: Current,
    src: np.ndarray,
    q: np.ndarray,
    mask: np.ndarray | None,
    sinks: np.ndarray | None,
    kv_head: int,
    scale: float = 1.0,
    softcap: float = 0.0,
    rotation: Rotation = (0, 0),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plain mean of the values that one query reads, and its heads' softmax sums ``[ratio]`` without and with sinks."""
    ratio = q.shape[1] // layer.n_head_kv
    heads = slice(kv_head * ratio, (kv_head + 1) * ratio)
    cells = np.flatnonzero(np.asarray(src) != HIDDEN)
    if mask is not None:
        cells = cells[mask[0, cells] != -np.inf]
    turned = Current(rotate(cur.k, rotation[0]), rotate(cur.v, rotation[1]))
    keys, values = read_rows(layer, turned, cells, np.asarray(src)[cells])
    score = scale * (rotate(q, rotation[0])[0, heads] @ keys[:, kv_head].astype(np.float64).T)
    if softcap:
        score = softcap * np.tanh(score / softcap)
    if mask is not None:
        score = score + mask[0, cells].astype(np.float64)
    read = np.exp(score).sum(axis=1)
    mean = values[:, kv_head].astype(np.float64).mean(axis=0) if len(cells) else np.zeros(layer.head_dim)
    return rotate(mean, rotation[1]), read, read + (0 if sinks is None else np.exp(sinks[heads].astype(np.float64)))


def exact_masses(
    layer: Layer,
    cell_src: np.ndarray,
    q: np.ndarray,
    mask: np.ndarray | None,
    scale: float,
    rotation: Rotation = (0, 0),
) -> np.ndarray:
    """Attention that each group's far cells really get, among far cells: ``[n_q, n_head, n_groups]``.

    What a selection recalls is the sum over its groups; the divergence of attention over a selection from attention
    over all far cells is minus the log of that sum.
    """
    n_q, n_head, _ = q.shape
    q = rotate(q, rotation[0])
    far = np.flatnonzero(np.asarray(cell_src) == FAR)
    keys = layer.far_keys(far).astype(np.float64)
    masses = np.zeros((n_q, n_head, -(-len(cell_src) // layer.group)))
    for i in range(n_q):
        bias = np.zeros(len(far)) if mask is None else mask[i, far].astype(np.float64)
        for head in range(n_head):
            score = scale * (keys[:, head // (n_head // layer.n_head_kv)] @ q[i, head]) + bias
            if not np.isfinite(score).any():
                continue
            weight = np.exp(score - score.max())
            np.add.at(masses[i, head], far // layer.group, weight / weight.sum())
    return masses
