"""``kv_attend_sparse`` against float64 attention over the rows that it should have read.

Tolerance: as in ``test_attend.py``.
"""

from __future__ import annotations

import lookup
import native
import numpy as np
import pytest
from lookup import lookup_scene
from oracle.memory import FAR
from oracle.select import Budget, attend_listed
from scenes import Scene

SHAPES = [(64, 1), (64, 3), (64, 9), (128, 4), (128, 8), (256, 1), (256, 16)]


def queries(rng: np.random.Generator, n_q: int, s: Scene, ratio: int) -> np.ndarray:
    q = rng.standard_normal((n_q, s.layer.n_head_kv * ratio, s.layer.head_dim))
    return (1.5 * q).astype(np.float32)


def random_lists(rng: np.random.Generator, n_q: int, s: Scene, share: float) -> list[list[np.ndarray]]:
    n_groups = -(-len(s.cell_src) // s.layer.group)
    n = round(share * n_groups)
    return [[np.sort(rng.permutation(n_groups)[:n]) for _ in range(s.layer.n_head_kv)] for _ in range(n_q)]


def compare(core, s: Scene, q: np.ndarray, lists, mask=None, threads=(1, 2, 3), room: int = 0, **options) -> None:
    options.setdefault("scale", s.layer.head_dim**-0.5)
    expected = attend_listed(s.layer, s.cur, s.cell_src, q, lists, mask, **options)
    largest = max(1.0, *(float(np.abs(a[np.isfinite(a)]).max(initial=0)) for a in (s.cur.v, s.layer.near_v, expected)))
    for n_threads in threads:
        got = lookup.attend_sparse(
            core, s.layer, s.cur, s.cell_src, q, lookup.pack(lists, room), mask, n_threads=n_threads, **options
        )
        assert np.isfinite(got).all(), f"{n_threads} threads: a poisoned row was read"
        worst = np.abs(got - expected).max()
        assert worst <= 1e-4 * largest, f"{n_threads} threads: off by {worst}"


@pytest.mark.parametrize("group", [2, 4, 8, 16])
@pytest.mark.parametrize(("head_dim", "ratio"), SHAPES)
def test_shapes(core, group: int, head_dim: int, ratio: int) -> None:
    rng = np.random.default_rng([group, head_dim, ratio])
    s = lookup_scene(rng, n_groups=max(20, 160 // group), group=group, head_dim=head_dim)
    for n_q in (1, 3):
        compare(core, s, queries(rng, n_q, s, ratio), random_lists(rng, n_q, s, 0.3))


@pytest.mark.parametrize("group", [2, 4, 16])
@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 3), (128, 4), (256, 1)])
@pytest.mark.parametrize("scale_group", [32, 64])
def test_scale_groups(core, scale_group: int, head_dim: int, ratio: int, group: int) -> None:
    """Rows with fewer scales."""
    rng = np.random.default_rng([scale_group, group, head_dim, ratio])
    n_groups = max(20, 160 // group)
    s = lookup_scene(rng, n_groups=n_groups, n_head_kv=3, group=group, head_dim=head_dim, scale_group=scale_group)
    for n_q in (1, 3):
        compare(core, s, queries(rng, n_q, s, ratio), random_lists(rng, n_q, s, 0.3))


@pytest.mark.parametrize("states", [["complete"] * 100, ["complete"] * 80 + ["exact"] * 20], ids=["far", "mixed"])
def test_lengths_of_lists(core, states: list[str]) -> None:
    """Around the edges of tiles of 64 cells (16 groups of 4), with and without exact rows before them."""
    rng = np.random.default_rng(len(set(states)))
    s = lookup_scene(rng, n_groups=100, group=4, states=states)
    for n_listed in (0, 1, 15, 16, 17, 31, 32, 33, 64, 65, 100):
        compare(core, s, queries(rng, 2, s, 3), random_lists(rng, 2, s, n_listed / 100))


@pytest.mark.parametrize("room", [0, 64, 256, 5000])
def test_room_of_lists_does_not_matter(core, room: int) -> None:
    """The work is cut by the room of the lists, of which little may be in use."""
    rng = np.random.default_rng(room)
    s = lookup_scene(rng, n_groups=130, group=4, n_head_kv=1)
    compare(core, s, queries(rng, 1, s, 4), random_lists(rng, 1, s, 0.2), room=room)


@pytest.mark.parametrize("n_q", [1, 4, 16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_masks_softcap_and_sinks(core, n_q: int, softcap: float, with_sinks: bool) -> None:
    """Two interleaved sequences; lists name groups of both, the mask hides those of the other."""
    rng = np.random.default_rng([n_q, int(softcap)])
    s = lookup_scene(rng, n_groups=100, group=4)
    owner, asks = np.arange(400) // 4 % 2, rng.integers(0, 2, n_q)
    mask = np.where(owner[None, :] == asks[:, None], 0, -np.inf).astype(np.float16)
    sinks = (3 * rng.standard_normal(6)).astype(np.float32) if with_sinks else None
    compare(core, s, queries(rng, n_q, s, 3), random_lists(rng, n_q, s, 0.3), mask, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("rotation", [(64, 0), (0, 64), (64, 64), (128, 64)])
def test_rotation(core, rotation: tuple[int, int]) -> None:
    rng = np.random.default_rng(rotation)
    s = lookup_scene(rng, n_groups=80, group=4, head_dim=128)
    compare(core, s, queries(rng, 3, s, 4), random_lists(rng, 3, s, 0.3), rotation=rotation)


@pytest.mark.parametrize("group", [2, 4, 16])
@pytest.mark.parametrize(("head_dim", "ratio"), SHAPES)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_something_stands_in_for_the_unread(core, group: int, head_dim: int, ratio: int, with_sinks: bool) -> None:
    """Estimates from nothing at all to far more than what is read, which is the limit."""
    rng = np.random.default_rng([20, group, head_dim, ratio])
    s = lookup_scene(rng, n_groups=max(20, 160 // group), group=group, head_dim=head_dim)
    q = queries(rng, 3, s, ratio)
    sinks = (3 * rng.standard_normal(q.shape[1])).astype(np.float32) if with_sinks else None
    unread = (4 * rng.standard_normal(q.shape[:2]) + 3).astype(np.float32)
    unread[0, 0], unread[1, -1] = -np.inf, 90
    for softcap, turn in ((0.0, (0, 0)), (5.0, (64, 64))):
        compare(
            core,
            s,
            q,
            random_lists(rng, 3, s, 0.3),
            sinks=sinks,
            unread=unread,
            softcap=softcap,
            rotation=turn,
        )


def test_an_estimate_that_is_far_too_high_does_little_harm(core) -> None:
    """However much is said to be unread, the mean value gets a sixteenth of what the values that are read get."""
    rng = np.random.default_rng(22)
    s = lookup_scene(rng, n_groups=60, group=4, states=["complete"] * 60)
    q, lists = queries(rng, 2, s, 3), lookup.pack(random_lists(rng, 2, s, 0.9))
    plain, moved = (
        lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, lists, scale=0.1, unread=unread)
        for unread in (None, np.full((2, 6), 60, np.float32))
    )
    mean = 17 * moved - 16 * plain  # the same for the three heads of a KV head
    largest = np.abs(plain).max()
    for heads in (slice(0, 3), slice(3, 6)):
        assert np.ptp(mean[:, heads], axis=1).max() <= 1e-3 * largest
    assert np.abs(moved - plain).max() > 1e-3 * largest


def test_stand_in_of_nothing_read(core) -> None:
    """Without a value there is no mean, and without an estimate nothing changes to the bit."""
    rng = np.random.default_rng(21)
    s = lookup_scene(rng, n_groups=40, group=4, states=["complete"] * 40)
    q, nothing = queries(rng, 2, s, 3), lookup.pack([[np.zeros(0, int)] * 2] * 2, 3)
    got = lookup.attend_sparse(
        core, s.layer, s.cur, s.cell_src, q, nothing, scale=0.1, unread=np.ones((2, 6), np.float32)
    )
    assert not got.any()
    lists, none = lookup.pack(random_lists(rng, 2, s, 0.3)), np.full((2, 6), -np.inf, np.float32)
    results = [
        lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, lists, scale=0.1, unread=unread)
        for unread in (None, none)
    ]
    assert np.array_equal(*results)


def test_mask_values_are_added(core) -> None:
    rng = np.random.default_rng(1)
    s = lookup_scene(rng, n_groups=60, group=4)
    bias = rng.standard_normal((4, 240)).astype(np.float16)
    compare(core, s, queries(rng, 4, s, 3), random_lists(rng, 4, s, 0.4), bias, softcap=5.0)


def test_cells_that_a_query_does_not_see_may_hold_anything(core) -> None:
    """One sequence's exact rows are NaN; a query of the other one does not notice."""
    rng = np.random.default_rng(2)
    s = lookup_scene(rng, n_groups=60, group=4, states=["complete"] * 40 + ["exact"] * 20)
    owner = np.arange(240) // 4 % 2
    mask = np.where(owner[None, :] == np.array([[0], [1]]), 0, -np.inf).astype(np.float16)
    q, lists = queries(rng, 2, s, 3), random_lists(rng, 2, s, 0.5)
    before = lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, lookup.pack(lists), mask, scale=0.125)
    for cell in np.flatnonzero((owner == 1) & (s.cell_src >= 0)):
        s.layer.near_k[s.cell_src[cell]] = s.layer.near_v[s.cell_src[cell]] = np.nan
    after = lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, lookup.pack(lists), mask, scale=0.125)
    assert np.array_equal(before[0], after[0]) and np.isnan(after[1]).all()


def test_nothing_to_read(core) -> None:
    rng = np.random.default_rng(3)
    s = lookup_scene(rng, n_groups=20, group=4, states=["complete"] * 20)
    q = queries(rng, 2, s, 3)
    nothing = [[np.zeros(0, int)] * 2] * 2
    for sinks in (None, np.ones(6, np.float32)):
        got = lookup.attend_sparse(
            core, s.layer, s.cur, s.cell_src, q, lookup.pack(nothing, 3), sinks=sinks, scale=0.1, rotation=(64, 64)
        )
        assert not got.any()


def test_all_groups_listed_is_dense_attention(core) -> None:
    rng = np.random.default_rng(4)
    s = lookup_scene(rng, n_groups=90, group=4, head_dim=128)
    q = queries(rng, 3, s, 4)
    everything = [[np.arange(90)] * 2] * 3
    dense = native.attend(core, s.layer, s.cur, s.cell_src, q, None, scale=0.1, rotation=(128, 128))
    sparse = lookup.attend_sparse(
        core, s.layer, s.cur, s.cell_src, q, lookup.pack(everything), scale=0.1, rotation=(128, 128)
    )
    assert np.abs(dense - sparse).max() <= 1e-5 * np.abs(dense).max()


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("scale_group", [16, 64])
def test_rows_that_are_read_are_the_ones_that_are_counted(core, scale_group: int, group: int) -> None:
    """Which groups' bytes have an influence on a result is found by changing them, one group at a time.

    The number of those, summed over queries and KV heads, is what the selection counted as taken, plus partial groups.
    """
    rng = np.random.default_rng([5, group])
    share = {"complete": 0.85, "partial": 0.1, "hidden": 0.05}
    s = lookup_scene(rng, n_groups=48, group=group, share=share, scale_group=scale_group)
    q = queries(rng, 2, s, 3)
    choice = lookup.select(core, s.layer, s.cell_src, q, Budget(0.1, 0.2, threshold=0.3), scale=0.125)

    def result(layer) -> np.ndarray:
        out = lookup.attend_sparse(core, layer, s.cur, s.cell_src, q, choice.raw, scale=0.125, n_threads=2)
        return out.reshape(2, 2, 3, -1)

    before, read = result(s.layer), np.zeros((2, 2, 48), bool)
    for g in range(48):
        changed = s.layer.copy()
        scales = changed.far_parts(changed.far_v)[-1][g * group : (g + 1) * group, :, : 64 // scale_group]
        scales ^= 0x10  # by four or a quarter
        read[:, :, g] = (result(changed) != before).any(axis=(2, 3))
    far = (s.cell_src.reshape(48, group) == FAR).sum(axis=1)
    partial = (far > 0) & (far < group)
    assert read.sum() == choice.taken + 4 * partial.sum()
    for i in range(2):
        for h in range(2):
            assert np.array_equal(np.flatnonzero(read[i, h]), choice.lists[i][h])
    assert choice.taken < 0.25 * choice.visible


def test_bad_lists_are_refused(core) -> None:
    rng = np.random.default_rng(6)
    s = lookup_scene(rng, n_groups=20, group=4, n_head_kv=1)
    q = queries(rng, 1, s, 3)
    for bad in ([3, 2], [1, 1], [20], [-1]):
        with pytest.raises(ValueError, match="selected"):
            lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, lookup.pack([[np.array(bad)]]))
    with pytest.raises(ValueError, match="unread"):
        lookup.attend_sparse(
            core, s.layer, s.cur, s.cell_src, q, lookup.pack([[np.array([3])]]), unread=np.zeros((1, 2), np.float32)
        )
    with pytest.raises(ValueError, match="selected"):
        lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, np.array([[[5, 0, 1]]], np.int32))


def test_runs_are_repeatable(core) -> None:
    rng = np.random.default_rng(7)
    s = lookup_scene(rng, n_groups=130, group=4)
    q, lists = queries(rng, 2, s, 4), lookup.pack(random_lists(rng, 2, s, 0.3))
    results = [
        lookup.attend_sparse(core, s.layer, s.cur, s.cell_src, q, lists, scale=0.1, n_threads=n) for n in (1, 2, 3, 3)
    ]
    assert all(np.array_equal(results[0], r) for r in results)
