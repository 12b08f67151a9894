"""``kv_select`` against the rule computed in float64."""

from __future__ import annotations

import lookup
import numpy as np
import pytest
from lookup import lookup_scene
from oracle import fp4
from oracle.fold import fold
from oracle.memory import FAR, HIDDEN, Current, current
from oracle.select import Budget, Choice, choose, exact_masses
from scenes import Scene

GROUPS = [2, 4, 8, 16]
TENTH_TO_FIFTH = Budget(0.1, 0.2, threshold=0.3)


def queries(rng: np.random.Generator, n_q: int, s: Scene, ratio: int = 3) -> np.ndarray:
    q = rng.standard_normal((n_q, s.layer.n_head_kv * ratio, s.layer.head_dim))
    return (1.5 * q).astype(np.float32)


def two_sequences(rng: np.random.Generator, n_q: int, s: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Groups of two sequences in turn, and a mask whose queries belong to one or the other."""
    owner = np.arange(len(s.cell_src)) // s.layer.group % 2
    asks = rng.integers(0, 2, n_q)
    return np.where(owner[None, :] == asks[:, None], 0, -np.inf).astype(np.float16), asks


def compare(core, s: Scene, q: np.ndarray, budget: Budget, mask=None, threads=(1, 2, 3), **options) -> None:
    """All thread counts against the oracle; lists and counters."""
    options.setdefault("scale", s.layer.head_dim**-0.5)
    choices = choose(s.layer, s.cell_src, q, budget, mask, **options)
    free = [[len(c.candidates) for c in row] for row in choices]
    if options.get("pool") is not None:
        without = {**options, "pool": None}
        free = [[len(c.candidates) for c in row] for row in choose(s.layer, s.cell_src, q, budget, mask, **without)]
    results = [lookup.select(core, s.layer, s.cell_src, q, budget, mask, n_threads=n, **options) for n in threads]
    for result in results:
        assert np.array_equal(result.raw, results[0].raw), "the number of threads must not matter"
        assert result.visible == np.sum(free)
        listed = sum(len(row) for query in result.lists for row in query)
        assert result.taken == listed - sum(len(c.partial) for row in choices for c in row)
    same = [
        lookup.check_list(got, choice, visible, s.layer.group, budget)
        for got_row, row, free_row in zip(results[0].lists, choices, free, strict=True)
        for got, choice, visible in zip(got_row, row, free_row, strict=True)
    ]
    assert np.mean(same) >= 0.8, "rounding decides a few lists, not most"
    for i, (got_row, row) in enumerate(zip(results[0].lists, choices, strict=True)):
        for h, (got, choice) in enumerate(zip(got_row, row, strict=True)):
            ratio = q.shape[1] // s.layer.n_head_kv
            check_unread(results[0].unread[i, h * ratio : (h + 1) * ratio], choice, got)


def check_unread(got: np.ndarray, choice: Choice, listed: np.ndarray) -> None:
    """It comes as 1 minus what is read, of which float32 sums leave 1e-5; a small rest may be off by that."""
    expected, all_of_it = choice.unread(listed), choice.unread(np.zeros(0, int))
    assert np.array_equal(np.isinf(expected) | (expected < all_of_it - 9), np.isinf(got) | (got < all_of_it - 9))
    large = expected > all_of_it - 9
    rest = np.exp(expected[large] - all_of_it[large])
    assert (np.abs(np.exp(got[large] - all_of_it[large]) - rest) <= 2e-5 + 1e-3 * rest).all()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 3), (64, 1), (128, 4), (128, 8), (256, 1), (256, 16)])
def test_groups_and_heads(core, group: int, head_dim: int, ratio: int) -> None:
    rng = np.random.default_rng([group, head_dim, ratio])
    s = lookup_scene(rng, n_groups=max(40, 240 // group), group=group, head_dim=head_dim)
    compare(core, s, queries(rng, 3, s, ratio), TENTH_TO_FIFTH)


@pytest.mark.parametrize("n_q", [1, 2, 5, 8, 16])
def test_queries_of_two_sequences(core, n_q: int) -> None:
    rng = np.random.default_rng(n_q)
    s = lookup_scene(rng, n_groups=150, group=4)
    mask, asks = two_sequences(rng, n_q, s)
    q = queries(rng, n_q, s)
    compare(core, s, q, TENTH_TO_FIFTH, mask)
    partial = choose(s.layer, s.cell_src, q, TENTH_TO_FIFTH, mask)[0][0].partial
    result = lookup.select(core, s.layer, s.cell_src, q, TENTH_TO_FIFTH, mask, scale=0.125)
    for i, query in enumerate(result.lists):
        for groups in query:
            candidates = np.setdiff1d(groups, partial)
            assert len(candidates) and (candidates % 2 == asks[i]).all(), "a group of the other sequence was taken"


@pytest.mark.parametrize("rotation", [(64, 0), (64, 64), (128, 64)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_rotation_and_softcap(core, rotation: tuple[int, int], softcap: float) -> None:
    rng = np.random.default_rng([rotation[0], int(softcap)])
    s = lookup_scene(rng, n_groups=120, group=4, head_dim=128)
    compare(core, s, queries(rng, 2, s), TENTH_TO_FIFTH, rotation=rotation, softcap=softcap)


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("min_tokens", [16, 64])
def test_edges_of_the_smallest_number(core, group: int, min_tokens: int) -> None:
    """Around the number of groups from which on a choice is made: below it everything is taken."""
    limit = min_tokens // group
    for n_groups in (1, limit - 1, limit, limit + 1, 4 * limit, 12 * limit):
        if n_groups < 1:
            continue
        rng = np.random.default_rng([group, n_groups])
        s = lookup_scene(rng, n_groups=n_groups, group=group, states=["complete"] * n_groups)
        q = queries(rng, 2, s)
        budget = Budget(0.1, 0.2, threshold=0.3, min_tokens=min_tokens)
        compare(core, s, q, budget)
        result = lookup.select(core, s.layer, s.cell_src, q, budget, scale=0.125)
        for groups in (g for query in result.lists for g in query):
            assert min(n_groups, limit) <= len(groups) <= max(min(n_groups, limit), -(-n_groups // 5))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.25, 1.0])
@pytest.mark.parametrize("n_groups", [1, 4, 5, 6, 9, 10, 11, 49, 50, 51, 200])
def test_shares_are_rounded_up(core, share: float, n_groups: int) -> None:
    rng = np.random.default_rng(n_groups)
    s = lookup_scene(rng, n_groups=n_groups, group=2, n_head_kv=1, states=["complete"] * n_groups)
    result = lookup.select(core, s.layer, s.cell_src, queries(rng, 1, s), Budget(share, share), scale=0.125)
    assert result.taken == len(result.lists[0][0]) == int(np.ceil(np.float32(share) * np.float32(n_groups)))
    assert result.visible == n_groups


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 0.5, 0.9, 1.0])
def test_thresholds(core, threshold: float) -> None:
    """Between wide bounds the threshold decides; a stricter one reads more."""
    rng = np.random.default_rng(5)
    s = lookup_scene(rng, n_groups=300, group=4)
    q = 3 * queries(rng, 4, s)
    compare(core, s, q, Budget(0.01, 0.9, threshold))
    counts = [
        lookup.select(core, s.layer, s.cell_src, q, Budget(0.01, 0.9, t), scale=0.125).taken
        for t in (0.0, 0.05, 0.3, 0.5, 0.9, 1.0)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[4]


def test_number_of_cells_is_no_multiple_of_the_group(core) -> None:
    """A group that the end of the cells cuts off is partial, even if all of its cells that are there are far."""
    rng = np.random.default_rng(6)
    whole = lookup_scene(rng, n_groups=70, group=8, states=["complete"] * 70)
    for n_kv in (1, 7, 8, 9, 255, 256, 257, 555):
        s = Scene(whole.layer, whole.cur, whole.cell_src[:n_kv])
        compare(core, s, queries(rng, 2, s), TENTH_TO_FIFTH)


def test_everything_or_nothing_to_choose_from(core) -> None:
    rng = np.random.default_rng(7)
    for state, listed in (("complete", 4), ("partial", 20), ("exact", 0), ("hidden", 0)):
        s = lookup_scene(rng, n_groups=20, group=4, states=[state] * 20)
        q = queries(rng, 2, s)
        compare(core, s, q, Budget(0.2, 0.2))
        result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.2, 0.2), scale=0.125)
        assert {len(groups) for query in result.lists for groups in query} == {listed}
        if state != "complete":
            assert result.visible == result.taken == 0


def test_query_that_sees_nothing(core) -> None:
    rng = np.random.default_rng(8)
    s = lookup_scene(rng, n_groups=40, group=4)
    mask = np.zeros((3, 160), np.float16)
    mask[1] = -np.inf
    q = queries(rng, 3, s)
    compare(core, s, q, TENTH_TO_FIFTH, mask)


@pytest.mark.parametrize("place", [0, 1, 31, 32, 63, 64, 99])
def test_the_right_group_is_found_wherever_it_is(core, place: int) -> None:
    """A group that a query points at is taken first; the newest complete one (99) too."""
    rng = np.random.default_rng(place)
    s = lookup_scene(rng, n_groups=104, group=4, states=["complete"] * 100 + ["exact"] * 4)
    shape = (4, s.layer.n_head_kv, s.layer.head_dim)
    direction = rng.standard_normal(shape[1:])
    keys = (4 * direction + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    plan = np.array([[place, *(current(r) for r in range(4))]], np.int32)
    fold(s.layer, Current(keys, np.ones(shape, np.float32)), plan)
    q = np.repeat(direction, 3, axis=0)[None].astype(np.float32)
    result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.0, 0.001), scale=1.0)
    partial = [g for g in range(100, 104) if (s.cell_src[4 * g : 4 * g + 4] == FAR).any()]
    assert all(list(groups) == [place, *partial] for groups in result.lists[0])


def test_equal_scores_prefer_the_most_recent(core) -> None:
    rng = np.random.default_rng(9)
    s = lookup_scene(rng, n_groups=64, group=4, states=["complete"] * 64)
    result = lookup.select(core, s.layer, s.cell_src, np.zeros((1, 6, 64), np.float32), Budget(0.25, 0.25), scale=1.0)
    assert all(np.array_equal(groups, np.arange(48, 64)) for groups in result.lists[0])


def test_unread_is_known(core) -> None:
    """All groups alike: what is not read is the rest of the number of cells, whatever the heads' scores are."""
    rng = np.random.default_rng(19)
    s = lookup_scene(rng, n_groups=64, group=4, n_head_kv=1, states=["complete"] * 64)
    s.layer.summaries[:], s.layer.spread[:] = s.layer.summaries[0], 0
    q = queries(rng, 1, s)
    for share, left in ((0.25, 48), (0.5, 32), (1.0, 0)):
        result = lookup.select(core, s.layer, s.cell_src, q, Budget(share, share), scale=0.125)
        score = 0.125 * q[0].astype(np.float64) @ fp4.decode(s.layer.summaries[0, 0]).astype(np.float64)
        with np.errstate(divide="ignore"):
            assert np.allclose(result.unread[0], score + np.log(np.float64(4 * left)), atol=1e-4)


def test_spread_counts(core) -> None:
    """Of two groups with one mean the one whose keys differ more is worth more: exp is convex."""
    rng = np.random.default_rng(10)
    s = lookup_scene(rng, n_groups=64, group=4, n_head_kv=1, states=["complete"] * 64)
    s.layer.summaries[:] = s.layer.summaries[0]
    s.layer.spread[:] = 0.25
    s.layer.spread[17] = 0.5
    q = queries(rng, 1, s)
    result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.0, 0.01), scale=0.125)
    assert list(result.lists[0][0]) == [17]


def test_heads_share_by_probability(core) -> None:
    """A head with large scores does not outvote a head with small ones: each is certain of another group.

    Two heads point at groups 3 and 40, one with scores ten times as large. With a budget of two both get theirs.
    """
    rng = np.random.default_rng(11)
    s = lookup_scene(rng, n_groups=64, group=4, n_head_kv=1, states=["complete"] * 64)
    directions = np.eye(64, dtype=np.float32)[[5, 6]]
    for place, direction in zip((3, 40), directions, strict=True):
        keys = np.tile(8 * direction, (4, 1, 1)).astype(np.float32)
        fold(s.layer, Current(keys, keys), np.array([[place, *(current(r) for r in range(4))]], np.int32))
    s.layer.summaries[[g for g in range(64) if g not in (3, 40)]] = 0
    s.layer.spread[:] = 0
    q = np.stack([10 * directions[0], 1 * directions[1]])[None]
    result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.03, 0.03), scale=1.0)
    assert list(result.lists[0][0]) == [3, 40]


@pytest.mark.parametrize("n_q", [1, 4])
def test_pool(core, n_q: int) -> None:
    """Candidates of a pool only; the share stays one of all complete groups."""
    rng = np.random.default_rng([12, n_q])
    s = lookup_scene(rng, n_groups=200, group=4)
    mask, _ = two_sequences(rng, n_q, s)
    for size in (0, 1, 40, 150):
        pool = [[np.sort(rng.permutation(200)[:size]) for _ in range(2)] for _ in range(n_q)]
        compare(core, s, queries(rng, n_q, s), TENTH_TO_FIFTH, mask, pool=pool)


def test_pool_of_the_best_changes_little(core) -> None:
    """As layers make one: a list of a fixed number of tokens is the pool of another selection."""
    rng = np.random.default_rng(13)
    s = lookup_scene(rng, n_groups=120, group=4, states=["complete"] * 120)
    q = queries(rng, 2, s)
    pool = lookup.select(core, s.layer, s.cell_src, q, Budget(0, 0, min_tokens=240), scale=0.125)
    assert all(len(groups) == 60 for query in pool.lists for groups in query)
    free = lookup.select(core, s.layer, s.cell_src, q, Budget(0.2, 0.2), scale=0.125)
    within = lookup.select(core, s.layer, s.cell_src, q, Budget(0.2, 0.2), scale=0.125, pool=pool.lists)
    for a, b in zip(free.lists, within.lists, strict=True):
        for x, y in zip(a, b, strict=True):
            assert len(x) == len(y) == 24 and len(np.intersect1d(x, y)) >= 23


def test_lists_without_room(core) -> None:
    """Partial groups go first, then the best candidates."""
    rng = np.random.default_rng(14)
    states = ["complete"] * 30 + ["partial"] * 10 + ["complete"] * 30
    s = lookup_scene(rng, n_groups=70, group=4, n_head_kv=1, states=states)
    q = queries(rng, 1, s)
    choice = choose(s.layer, s.cell_src, q, Budget(0.5, 0.5), scale=0.125)[0][0]
    for room in (0, 3, 10, 11, 25, 39):
        result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.5, 0.5), scale=0.125, capacity=room)
        expected = np.sort(np.concatenate([choice.partial[:room], choice.order()[: max(0, min(30, room - 10))]]))
        assert np.array_equal(result.lists[0][0], expected)
        assert result.taken == len(expected) - min(10, room)


def test_many_groups_in_several_rounds(core) -> None:
    """More scores than are kept at a time: queries are done in rounds."""
    rng = np.random.default_rng(15)
    s = lookup_scene(rng, n_groups=1100, group=2, n_head_kv=1, share={"complete": 0.99, "partial": 0.01})
    q = queries(rng, 16, s, 64)  # 16 * 64 * 1100 is more than 2 ** 20
    compare(core, s, q, Budget(0.05, 0.1, threshold=0.3), threads=(1, 3))


def test_scores_that_are_no_numbers(core) -> None:
    """A NaN query or an infinite spread spoils its own selection at most: lists stay valid."""
    rng = np.random.default_rng(16)
    s = lookup_scene(rng, n_groups=100, group=4, states=["complete"] * 100)
    q = queries(rng, 3, s)
    fine = lookup.select(core, s.layer, s.cell_src, q, TENTH_TO_FIFTH, scale=0.125)
    bad = q.copy()
    bad[1] = np.nan
    result = lookup.select(core, s.layer, s.cell_src, bad, TENTH_TO_FIFTH, scale=0.125)
    for i in (0, 2):
        assert all(np.array_equal(a, b) for a, b in zip(result.lists[i], fine.lists[i], strict=True))
    s.layer.spread[7] = np.inf
    result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.1, 0.1), scale=0.125)
    for query in result.lists:
        for groups in query:
            assert len(groups) == 10 and 7 in groups and np.array_equal(groups, np.unique(groups))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"budget": Budget(0.3, 0.2)}, "lookup"),
        ({"budget": Budget(0.1, 1.5)}, "lookup"),
        ({"budget": Budget(0.1, 0.2, threshold=-1)}, "threshold"),
        ({"budget": Budget(0.1, 0.2, min_tokens=-1)}, "min_tokens"),
        ({"pool": [[np.array([3, 2]), np.array([1])]]}, "pool"),
        ({"pool": [[np.array([3]), np.array([400])]]}, "pool"),
        ({"rotation": (96, 0)}, "rotation"),
    ],
)
def test_errors_name_the_argument(core, change: dict, name: str) -> None:
    rng = np.random.default_rng(17)
    s = lookup_scene(rng, n_groups=20, group=4)
    arguments = {"budget": TENTH_TO_FIFTH, **change}
    with pytest.raises(ValueError, match=name):
        lookup.select(core, s.layer, s.cell_src, queries(rng, 1, s), **arguments)


def test_estimates_find_attention(core) -> None:
    """The taken groups hold far more of the exact attention than their share: 20 % of the groups, over half of it."""
    rng = np.random.default_rng(18)
    s = lookup_scene(rng, n_groups=256, group=4, states=["complete"] * 256)
    q = queries(rng, 4, s)
    masses = exact_masses(s.layer, s.cell_src, q, None, scale=0.125)
    result = lookup.select(core, s.layer, s.cell_src, q, Budget(0.2, 0.2), scale=0.125)
    recalled = [masses[i, head, result.lists[i][head // 3]].sum() for i in range(4) for head in range(6)]
    assert np.mean(recalled) > 0.5
    assert (s.cell_src != HIDDEN).all()
