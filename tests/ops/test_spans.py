"""Search in two levels: summaries of spans by ``kv_fold``, and ``kv_select`` among the groups of the best spans."""

from __future__ import annotations

import lookup
import native
import numpy as np
import pytest
from lookup import check_list, lookup_scene
from oracle.fold import fold, summarise
from oracle.memory import SPAN, Layer
from oracle.select import Budget, choose, choose_spans, far_groups, groups_of_spans
from scenes import MIXES, Scene, plan_of, scene

GROUPS = [2, 4, 8, 16]
ALL = Budget(1.0, 1.0)
TENTH_TO_FIFTH = Budget(0.1, 0.2, threshold=0.3)


def span_scene(
    rng: np.random.Generator, n_cells: int, group: int, holes: tuple[int, ...] = (), **options
) -> tuple[Scene, np.ndarray]:
    """A layer of complete groups but for ``holes``, which are partial; its whole spans are summarised, and so ready."""
    n_groups = -(-n_cells // group)
    states = ["partial" if g in holes else "complete" for g in range(n_groups)]
    s = lookup_scene(rng, n_groups=n_groups, group=group, states=states, spans=True, **options)
    complete, _ = far_groups(s.cell_src, group)
    n_spans = n_groups * group // SPAN
    ready = complete[: n_spans * SPAN // group].reshape(n_spans, -1).all(axis=1)
    summarise(s.layer, list(np.flatnonzero(ready)))
    return s, ready


def queries(rng: np.random.Generator, n_q: int, s: Scene, ratio: int = 3) -> np.ndarray:
    return rng.standard_normal((n_q, s.layer.n_head_kv * ratio, s.layer.head_dim)).astype(np.float32)


def causal(n_q: int, n_kv: int) -> np.ndarray:
    """Every query sees a quarter of the cells less than the one behind it."""
    end = n_kv - (n_q - 1 - np.arange(n_q)) * n_kv // 4
    return np.where(np.arange(n_kv)[None, :] < end[:, None], 0, -np.inf).astype(np.float16)


def compare(
    core, s: Scene, ready: np.ndarray, q: np.ndarray, most: int, budget: Budget, mask=None, **options
) -> list[list[np.ndarray]]:
    """Both levels against the oracle; the pools. Reading all of a pool shows which spans were taken."""
    options.setdefault("scale", s.layer.head_dim**-0.5)
    n_groups = -(-len(s.cell_src) // s.layer.group)
    two_levels = {"mask": mask, "ready": ready, "most_spans": most, **options}
    shown = lookup.select(core, s.layer, s.cell_src, q, ALL, **two_levels)
    got = lookup.select(core, s.layer, s.cell_src, q, budget, **two_levels)
    for n_threads in (2, 3):
        again = lookup.select(core, s.layer, s.cell_src, q, budget, n_threads=n_threads, **two_levels)
        assert np.array_equal(again.raw, got.raw) and np.array_equal(again.unread, got.unread)
    spans = choose_spans(s.layer, ready, q, most, mask, **options)
    flat = choose(s.layer, s.cell_src, q, ALL, mask, **options)
    pools, same = [], []
    for i, row in enumerate(flat):
        pools.append([])
        for h, choice in enumerate(row):
            listed = np.setdiff1d(shown.lists[i][h], choice.partial)
            taken = np.unique(listed * s.layer.group // SPAN)
            taken = np.union1d(taken[taken < len(ready)], spans[i][h].partial)
            level = Budget(0, 0, min_tokens=most * SPAN)
            same.append(check_list(taken, spans[i][h], len(spans[i][h].candidates), SPAN, level))
            pool = groups_of_spans(taken, len(ready), n_groups, s.layer.group)
            assert np.array_equal(listed, np.intersect1d(choice.candidates, pool)), "whole spans, and what is in none"
            pools[-1].append(pool)
    choices = choose(s.layer, s.cell_src, q, budget, mask, pool=pools, **options)
    for i, row in enumerate(choices):
        for h, choice in enumerate(row):
            same.append(check_list(got.lists[i][h], choice, len(flat[i][h].candidates), s.layer.group, budget))
    assert np.mean(same) >= 0.8, "rounding decides a few lists, not most"
    assert got.visible == shown.visible == sum(len(c.candidates) for row in flat for c in row)
    assert shown.taken == sum(len(np.intersect1d(c.candidates, p)) for r, ps in zip(flat, pools, strict=True)
                              for c, p in zip(r, ps, strict=True))  # fmt: skip
    return pools


# -- summaries ---------------------------------------------------------------------------------------------------------


def assert_same(got: Layer, expected: Layer) -> None:
    """To the byte but for spreads, which are sums in an order of their own, rounded to f16."""
    assert np.array_equal(got.span_summaries, expected.span_summaries)
    known = np.isfinite(expected.span_spread)
    close = np.isclose(got.span_spread[known], expected.span_spread[known], rtol=2**-10, atol=1e-7)
    assert close.all() and np.isnan(got.span_spread[~known]).all()
    end = got.layout.span_offset
    for name in ("far_k", "far_v"):
        assert np.array_equal(getattr(got, name), getattr(expected, name))
    assert np.array_equal(got.summaries, expected.summaries)
    assert np.array_equal(got.side[got.layout.counters_offset : end], expected.side[got.layout.counters_offset : end])


@pytest.mark.parametrize("n_head_kv", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_summaries(core, group: int, head_dim: int, n_head_kv: int) -> None:
    """Those that are listed, and no others, whatever is in the memory of groups beside them."""
    rng = np.random.default_rng([group, head_dim, n_head_kv])
    shape = {"n_head_kv": n_head_kv, "head_dim": head_dim, "group": group}
    s = lookup_scene(rng, n_groups=5 * SPAN // group, states=["complete"] * (5 * SPAN // group), spans=True, **shape)
    s.layer.summaries[: SPAN // group] = 0xFF
    s.layer.spread[: SPAN // group] = np.nan
    expected = s.layer.copy()
    summarise(expected, [3, 1])
    for n_threads in (1, 2, 5):
        got = s.layer.copy()
        native.fold(core, got, s.cur, np.zeros((0, 1 + group), np.int32), n_threads, spans=[3, 1])
        assert_same(got, expected)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_and_spans_in_one_plan(core, group: int) -> None:
    rng = np.random.default_rng(group)
    s = scene(rng, n_cells=3 * SPAN, n_head_kv=2, head_dim=64, group=group, share=MIXES["all-far"], spans=True)
    late = scene(rng, n_cells=3 * SPAN, n_head_kv=2, head_dim=64, group=group, share=MIXES["all-current"])
    plan = plan_of(rng, late)
    plan = plan[plan[:, 0] >= 2 * SPAN // group]
    expected = s.layer.copy()
    fold(expected, late.cur, plan)
    summarise(expected, [0, 1])
    native.fold(core, s.layer, late.cur, plan, 3, spans=[0, 1])
    assert_same(s.layer, expected)


def test_spread_is_that_of_all_keys(core) -> None:
    """Within groups and between them: the variance of the span's keys around their mean, but for FP4's own error."""
    rng = np.random.default_rng(1)
    s, _ = span_scene(rng, 2 * SPAN, 4)
    native.fold(core, s.layer, s.cur, np.zeros((0, 5), np.int32), 1, spans=[0, 1])
    keys = s.layer.far_keys(np.arange(2 * SPAN)).astype(np.float64).reshape(2, SPAN, 2, 64)
    assert np.allclose(s.layer.span_spread, keys.var(axis=1).mean(axis=2), rtol=0.15)


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_groups(core, group: int, most: int) -> None:
    rng = np.random.default_rng([group, most])
    s, ready = span_scene(rng, 7 * SPAN + 3 * group, group, holes=(2 * SPAN // group + 1,))
    assert list(np.flatnonzero(~ready)) == [2]
    compare(core, s, ready, queries(rng, 3, s), most, TENTH_TO_FIFTH)


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 1), (128, 4), (256, 2)])
def test_heads(core, head_dim: int, ratio: int) -> None:
    rng = np.random.default_rng([head_dim, ratio])
    s, ready = span_scene(rng, 6 * SPAN, 4, head_dim=head_dim)
    compare(core, s, ready, queries(rng, 2, s, ratio), 2, TENTH_TO_FIFTH)


@pytest.mark.parametrize("n_cells", [128, 130, 254, 256, 258, 512])
def test_ends_of_spans(core, n_cells: int) -> None:
    """Cells behind the last whole span are always looked at."""
    rng = np.random.default_rng(n_cells)
    s, ready = span_scene(rng, n_cells, 2)
    pools = compare(core, s, ready, queries(rng, 2, s), 1, TENTH_TO_FIFTH)
    rest = n_cells // 2 % 64
    assert {len(pool) for row in pools for pool in row} == {min(len(ready), 1) * 64 + rest}


@pytest.mark.parametrize("n_kv", [127, 128, 129, 300, 383, 384])
def test_fewer_cells_than_the_layer_has(core, n_kv: int) -> None:
    """A span that the end cuts off is in none, whatever its bit says."""
    rng = np.random.default_rng(n_kv)
    s, ready = span_scene(rng, 4 * SPAN, 4)
    cut = Scene(s.layer, s.cur, s.cell_src[:n_kv])
    q = queries(rng, 1, s)
    compare(core, cut, ready[: n_kv // SPAN], q, 1, TENTH_TO_FIFTH)
    results = [
        lookup.select(core, s.layer, cut.cell_src, q, ALL, ready=np.resize(r, 4), most_spans=1).raw
        for r in (ready, np.arange(4) < n_kv // SPAN)
    ]
    assert np.array_equal(*results)


@pytest.mark.parametrize("n_q", [2, 5])
def test_masks(core, n_q: int) -> None:
    """A span is seen where its first cell is; groups of one that is not are no candidates."""
    rng = np.random.default_rng(n_q)
    s, ready = span_scene(rng, 8 * SPAN, 4, holes=(40,))
    mask = causal(n_q, 8 * SPAN)
    pools = compare(core, s, ready, queries(rng, n_q, s), 2, TENTH_TO_FIFTH, mask)
    assert any(not np.array_equal(a, b) for a, b in zip(pools[0], pools[-1], strict=True))
    mask[:, 3 * SPAN] = -np.inf
    for row in compare(core, s, ready, queries(rng, n_q, s), 2, TENTH_TO_FIFTH, mask):
        for pool in row:
            assert not np.isin(np.arange(3 * SPAN // 4, SPAN), pool).any()


@pytest.mark.parametrize("rotation", [(64, 0), (128, 64)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_rotation_and_softcap(core, rotation: tuple[int, int], softcap: float) -> None:
    rng = np.random.default_rng([rotation[0], int(softcap)])
    s, ready = span_scene(rng, 6 * SPAN, 4, head_dim=128)
    compare(core, s, ready, queries(rng, 2, s), 2, TENTH_TO_FIFTH, rotation=rotation, softcap=softcap)


@pytest.mark.parametrize("holes", [(), (3, 200)])
def test_no_span_ready_or_room_for_all_is_one_level(core, holes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(holes))
    s, ready = span_scene(rng, 8 * SPAN + 8, 4, holes=holes)
    q, mask = queries(rng, 4, s), causal(4, 8 * SPAN + 8)
    flat = lookup.select(core, s.layer, s.cell_src, q, TENTH_TO_FIFTH, mask, scale=0.125)
    for which, most in ((np.zeros(8, bool), 1), (ready, 8), (ready, 1000)):
        got = lookup.select(
            core, s.layer, s.cell_src, q, TENTH_TO_FIFTH, mask, scale=0.125, ready=which, most_spans=most
        )
        assert np.array_equal(got.raw, flat.raw) and (got.visible, got.taken) == (flat.visible, flat.taken)
        assert np.allclose(got.unread, flat.unread, atol=1e-5)


@pytest.mark.parametrize("place", range(6))
def test_the_right_span_is_found_wherever_it_is(core, place: int) -> None:
    rng = np.random.default_rng(place)
    s, ready = span_scene(rng, 6 * SPAN, 4, n_head_kv=1)
    direction = rng.standard_normal(64).astype(np.float32)
    s.layer.summaries[:], s.layer.spread[:] = 0, 0.1
    group = place * 32 + int(rng.integers(32))
    s.layer.summaries[group] = core.fp4_encode(2 * direction[None])
    summarise(s.layer, list(range(6)))
    q = np.tile(direction, (1, 3, 1))
    got = lookup.select(core, s.layer, s.cell_src, q, Budget(0, 0.001), ready=ready, most_spans=1)
    assert list(got.lists[0][0]) == [group]
    assert got.visible == 192 and got.taken == 1


def test_equal_spans_prefer_the_most_recent(core) -> None:
    rng = np.random.default_rng(3)
    s, ready = span_scene(rng, 6 * SPAN, 4)
    q = np.zeros((1, 6, 64), np.float32)
    got = lookup.select(core, s.layer, s.cell_src, q, ALL, ready=ready, most_spans=2)
    assert all(np.array_equal(groups, np.arange(128, 192)) for groups in got.lists[0])


def test_what_is_not_ready_is_poison(core) -> None:
    """Summaries of spans that are not ready, and of layers without, may hold anything."""
    rng = np.random.default_rng(4)
    s, ready = span_scene(rng, 6 * SPAN, 4, holes=(40, 100))
    q = queries(rng, 2, s)
    clean = lookup.select(core, s.layer, s.cell_src, q, TENTH_TO_FIFTH, ready=ready, most_spans=2)
    s.layer.span_summaries[~ready] = 0xFF
    s.layer.span_spread[~ready] = np.inf
    assert np.isfinite(clean.unread).all()
    again = lookup.select(core, s.layer, s.cell_src, q, TENTH_TO_FIFTH, ready=ready, most_spans=2)
    assert np.array_equal(again.raw, clean.raw) and np.array_equal(again.unread, clean.unread)


def test_rounds(core) -> None:
    """More scores than are kept at a time, with a pool each."""
    rng = np.random.default_rng(5)
    s, ready = span_scene(rng, 20 * SPAN, 2, n_head_kv=1)
    compare(core, s, ready, queries(rng, 16, s, 64), 6, Budget(0.05, 0.1, threshold=0.3))


# -- the bound on tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [4, 7, 8, 100, 399, 400, 401, 4000])
def test_bound_on_tokens(core, max_tokens: int) -> None:
    """A fifth of 500 groups of 4 is 400 tokens."""
    rng = np.random.default_rng(max_tokens)
    s = lookup_scene(rng, n_groups=500, group=4, states=["complete"] * 500)
    q = queries(rng, 2, s)
    for budget in (Budget(0.2, 0.2), Budget(0.0, 0.2, 0.2), Budget(0.1, 0.2, 0.9, 64)):
        bounded = Budget(budget.lookup_min, budget.lookup_max, budget.threshold, budget.min_tokens, max_tokens)
        free = lookup.select(core, s.layer, s.cell_src, q, budget, scale=0.125)
        got = lookup.select(core, s.layer, s.cell_src, q, bounded, scale=0.125)
        for a, b in zip(free.lists, got.lists, strict=True):
            for x, y in zip(a, b, strict=True):
                assert len(y) == min(len(x), max_tokens // 4) and np.isin(y, x).all()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"budget": Budget(0.1, 0.2, max_tokens=-1)}, "max_tokens"),
        ({"most_spans": 0}, "most_spans"),
        ({"ready": np.ones(64, bool)}, "ready"),
        ({"pool": [[np.array([3]), np.array([1])]]}, "ready"),
    ],
)
def test_errors_name_the_argument(core, change: dict, name: str) -> None:
    rng = np.random.default_rng(6)
    s, ready = span_scene(rng, 2 * SPAN, 4)
    arguments = {"budget": TENTH_TO_FIFTH, "ready": ready, **change}
    with pytest.raises(ValueError, match=name):
        lookup.select(core, s.layer, s.cell_src, queries(rng, 1, s), **arguments)


def test_spans_need_room_in_the_side_memory(core) -> None:
    rng = np.random.default_rng(7)
    s = lookup_scene(rng, n_groups=64, group=4)
    with pytest.raises(ValueError, match="ready"):
        lookup.select(core, s.layer, s.cell_src, queries(rng, 1, s), ALL, ready=np.ones(2, bool))
    with pytest.raises(ValueError, match="spans: 0 is none of the 0"):
        native.fold(core, s.layer, s.cur, np.zeros((0, 5), np.int32), 1, spans=[0])
    with_spans, _ = span_scene(rng, 2 * SPAN, 4)
    with pytest.raises(ValueError, match="spans: 2 is none of the 2"):
        native.fold(core, with_spans.layer, with_spans.cur, np.zeros((0, 5), np.int32), 1, spans=[2])
