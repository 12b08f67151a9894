"""Scores for eviction against their definition, statistics of queries, and the attention that cells receive."""

from __future__ import annotations

import lookup
import native as compiled
import numpy as np
import pytest
from oracle import fp4
from oracle.memory import Layer
from oracle.score import RULES, observe, order_by_need, receive, sample, sampled, score
from scenes import MIXES, Scene, scene

#: Sums of up to 256 products in float32 against float64, relative to the largest score of a kind.
TOLERANCE = 2e-5


def native(core, layer: Layer, cell_src: np.ndarray, statistics=None, before=None, *, n_head: int, **options):
    return np.asarray(
        core.kv_score(
            layer.far_k,
            layer.far_v,
            layer.side,
            layer.near_k,
            layer.near_v,
            cell_src,
            statistics,
            before,
            group=layer.group,
            n_head=n_head,
            **options,
        )
    )


def some_statistics(rng: np.random.Generator, n_head: int, head_dim: int) -> np.ndarray:
    q = rng.standard_normal((40, n_head, head_dim)) + rng.standard_normal((n_head, head_dim))
    return observe(np.zeros(1 + 2 * n_head * head_dim), q.astype(np.float32)).astype(np.float32)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(got).all()
    for mine, right in zip(got, expected, strict=True):
        assert np.abs(mine - right).max() <= TOLERANCE * max(1.0, np.abs(right).max())


@pytest.mark.parametrize(("n_head_kv", "head_dim", "group", "gqa"), [(3, 64, 4, 3), (2, 128, 2, 4), (1, 256, 16, 1)])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("scale_group", [16, 32, 64])
def test_score_is_its_definition(core, scale_group, n_head_kv, head_dim, group, gqa, mix: str, n_threads: int) -> None:
    """In mixes of all kinds of cells; whatever is not far holds NaN."""
    rng = np.random.default_rng(1)
    shape = {"n_head_kv": n_head_kv, "head_dim": head_dim, "group": group, "scale_group": scale_group}
    s = scene(rng, n_cells=200, share=MIXES[mix], **shape)
    n_head = n_head_kv * gqa
    statistics = some_statistics(rng, n_head, head_dim)
    for given in (None, statistics):
        options = {"n_head": n_head, "scale": 1 / 16, "softcap": 3.0}
        got = native(core, s.layer, s.cell_src, given, n_threads=n_threads, **options)
        assert_close(got, score(s.layer, s.cell_src, given, **options))


def test_many_cells_and_threads(core) -> None:
    """Several slices of cells: the same bits for any number of threads."""
    rng = np.random.default_rng(2)
    s = scene(rng, n_cells=3000, n_head_kv=2, head_dim=64, group=4, share=MIXES["everyday"])
    statistics = some_statistics(rng, 4, 64)
    options = {"n_head": 4, "scale": 0.125}
    got = native(core, s.layer, s.cell_src, statistics, **options)
    assert_close(got, score(s.layer, s.cell_src, statistics, **options))
    for n_threads in (2, 5):
        assert np.array_equal(got, native(core, s.layer, s.cell_src, statistics, n_threads=n_threads, **options))


def test_layers_add_up(core) -> None:
    rng = np.random.default_rng(3)
    s = scene(rng, n_cells=64, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    one = native(core, s.layer, s.cell_src, n_head=1)
    before = rng.standard_normal(one.shape).astype(np.float32)
    assert np.array_equal(native(core, s.layer, s.cell_src, None, before, n_head=1), before + one)


def test_what_scores_mean(core) -> None:
    """A key that points elsewhere is the newest, a large value the largest, one along the queries the most attended."""
    from oracle.fold import fold
    from oracle.memory import Current, current

    rng = np.random.default_rng(4)
    common, query = rng.standard_normal((2, 64))
    keys = (4 * common + 0.1 * rng.standard_normal((32, 1, 64))).astype(np.float32)
    values = rng.standard_normal((32, 1, 64)).astype(np.float32)
    keys[13, 0] = rng.standard_normal(64)
    values[21, 0] *= 5
    keys[6, 0] += query
    layer = Layer.empty(1, 64, 4, 32, 1)
    fold(layer, Current(keys, values), np.array([[g, *(current(4 * g + j) for j in range(4))] for g in range(8)]))
    statistics = observe(np.zeros(129), query[None, None].astype(np.float32) * np.ones((9, 1, 1), np.float32))
    got = native(core, layer, np.full(32, -1, np.int32), statistics.astype(np.float32), n_head=1)
    assert got.argmax(axis=1).tolist() == [13, 21, 6]


@pytest.mark.parametrize("rotation", [0, 64])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_statistics_do_not_depend_on_micro_batches(core, rotation: int, n_threads: int) -> None:
    rng = np.random.default_rng(5)
    q = rng.standard_normal((700, 3, 128)).astype(np.float32)
    expected = observe(np.zeros(1 + 2 * 3 * 128), q, rotation)
    for step in (1, 32, 700):
        got = np.zeros(1 + 2 * 3 * 128, np.float32)
        for first in range(0, len(q), step):
            part = np.ascontiguousarray(q[first : first + step])
            core.kv_observe(part, got, rotation=rotation, n_threads=n_threads)
        # Sums of about 512 rounded products.
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_refusals(core) -> None:
    rng = np.random.default_rng(6)
    s = scene(rng, n_cells=16, n_head_kv=2, head_dim=64, group=4, share=MIXES["all-far"])
    with pytest.raises(ValueError, match="n_head"):
        native(core, s.layer, s.cell_src, n_head=3)
    with pytest.raises(ValueError, match="queries"):
        native(core, s.layer, s.cell_src, np.zeros(5, np.float32), n_head=2)
    with pytest.raises(ValueError, match="cell_src"):
        native(core, s.layer, s.cell_src[:-1], n_head=2)


def received(core, s: Scene, q: np.ndarray, mask=None, sinks=None, **options) -> np.ndarray:
    arrays = compiled.memory(s.layer, s.cur)
    return np.asarray(core.kv_receive(*arrays, s.cell_src, q, mask, sinks, group=s.layer.group, **options))


@pytest.mark.parametrize(("n_head_kv", "head_dim", "group", "gqa"), [(3, 64, 4, 3), (2, 128, 2, 4), (1, 256, 16, 1)])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scale_group", [16, 64])
def test_received_attention(core, scale_group, n_head_kv, head_dim, group, gqa, mix: str) -> None:
    """With masks, sinks and a cap on scores, for more queries than a task takes; the same bits for any threads."""
    rng = np.random.default_rng(7)
    shape = {"n_head_kv": n_head_kv, "head_dim": head_dim, "group": group, "scale_group": scale_group}
    s = scene(rng, n_cells=200, share=MIXES[mix], **shape)
    q = rng.standard_normal((61, n_head_kv * gqa, head_dim)).astype(np.float32)
    mask = np.where(rng.random((61, len(s.cell_src))) < 0.3, -np.inf, 0).astype(np.float16)
    mask[5] = -np.inf
    sinks = rng.standard_normal(n_head_kv * gqa).astype(np.float32)
    for case in ({}, {"mask": mask}, {"mask": mask, "sinks": sinks, "softcap": 3.0}):
        options = {"scale": 1 / 16, "rotation": (64, 64), **case}
        got = received(core, s, q, n_threads=1, **options)
        assert np.abs(got - receive(s.layer, s.cur, s.cell_src, q, **options)).max() <= TOLERANCE
        assert np.array_equal(got, received(core, s, q, n_threads=3, **options))


def test_a_key_that_is_asked_for_receives(core) -> None:
    """One query that looks for one key: the cell gets nearly all of it, whatever the other queries do."""
    rng = np.random.default_rng(8)
    s = scene(rng, n_cells=400, n_head_kv=2, head_dim=64, group=4, share=MIXES["all-far"])
    keys = s.layer.far_keys(np.arange(400))
    q = np.zeros((90, 4, 64), np.float32)
    q[77, 2] = 40 * (keys[123, 1] - keys[:, 1].mean(axis=0)) / 64
    wanted = int((keys[:, 1] @ q[77, 2]).argmax())
    got = received(core, s, q, scale=1.0)
    assert got[1].argmax() == wanted and got[1, wanted] > 0.5
    # The other KV head's queries are zero: they attend to all cells alike.
    assert np.median(got[1]) == pytest.approx(1 / 400, rel=1e-4) and got[0] == pytest.approx(1 / 400, rel=1e-4)


def test_what_nobody_sees_receives_nothing(core) -> None:
    rng = np.random.default_rng(9)
    s = scene(rng, n_cells=100, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    q = rng.standard_normal((3, 2, 64)).astype(np.float32)
    mask = np.full((3, len(s.cell_src)), -np.inf, np.float16)
    assert not received(core, s, q, mask, scale=1.0).any()


@pytest.mark.parametrize(("heads", "n"), [(1, 1), (3, 2), (4, 194), (90, 500)])
def test_order_of_need(core, heads: int, n: int) -> None:
    """Of few groups and of many; with ties, of which the earlier goes first."""
    rng = np.random.default_rng(14)
    received = (rng.integers(0, 50, (heads, n)) / 64).astype(np.float32)
    novelty = rng.random(n).astype(np.float32)
    assert core.order_by_need(received, novelty).tolist() == order_by_need(received, novelty).tolist()


def test_what_need_means(core) -> None:
    """A quarter of the heads is enough; no stretch of text pays for another; what is around a fact stays with it."""
    n, heads = 1000, 8
    rng = np.random.default_rng(15)
    quiet = (0.01 * rng.random((heads, n)) * np.linspace(1, 50, n)).astype(np.float32)  # the end gets more
    novelty = rng.random(n).astype(np.float32)
    plain = core.order_by_need(quiet, novelty)
    by_part = np.bincount(plain[: n // 2] // 250, minlength=4)
    assert (abs(by_part - 125) < 25).all()
    wanted = quiet.copy()
    wanted[2:4, 300] = 2
    place = {
        name: np.argsort(core.order_by_need(x, novelty))[299:302] for name, x in (("quiet", quiet), ("wanted", wanted))
    }
    assert (place["wanted"] > place["quiet"]).all()
    assert place["wanted"][1] > n // 2


def samples_of(core, q: np.ndarray, score: str, steps: tuple[int, ...] = (), **options) -> np.ndarray:
    """Samples of queries that come ``steps`` at a time."""
    kept = np.zeros((1 + RULES[score][1], *q.shape[1:]), np.float16)
    for part in np.split(q, np.cumsum(steps)):
        core.kv_sample(np.ascontiguousarray(part), kept, score=score, **options)
    return kept


@pytest.mark.parametrize("score", RULES)
@pytest.mark.parametrize("n", [1, 33, 700, 2000])
def test_samples(core, score: str, n: int) -> None:
    """The same ones whatever the micro-batches are."""
    rng = np.random.default_rng(10)
    q = rng.standard_normal((n, 3, 64)).astype(np.float32)
    kept = samples_of(core, q, score, rotation=64)
    expected, ages = sample(q, score, 64)
    assert (kept[0].view(np.int64)[:, 0] == n).all()
    every, rows = RULES[score]
    for row, age in zip(expected, ages, strict=True):
        assert np.array_equal(kept[1 + (n - 1 - age) // every % rows], row)
    for steps in ((1,) * (n - 1), (n // 3, n // 2)):
        assert np.array_equal(kept, samples_of(core, q, score, steps, rotation=64, n_threads=2))


@pytest.mark.parametrize(("n_head_kv", "head_dim", "group", "gqa"), [(3, 64, 4, 3), (2, 128, 2, 4), (1, 256, 16, 1)])
@pytest.mark.parametrize("score", RULES)
@pytest.mark.parametrize("mix", MIXES)
def test_sampled_attention(core, n_head_kv, head_dim, group, gqa, score: str, mix: str) -> None:
    """With few and with many queries, cells of all ages; the same bits for any number of threads."""
    rng = np.random.default_rng(11)
    s = scene(rng, n_cells=200, n_head_kv=n_head_kv, head_dim=head_dim, group=group, share=MIXES[mix])
    arrays = (s.layer.far_k, s.layer.far_v, s.layer.side, s.layer.near_k, s.layer.near_v, s.cell_src)
    for n in (20, 1000, 2200):
        q = (2 * rng.standard_normal((n, n_head_kv * gqa, head_dim))).astype(np.float32)
        age = rng.integers(0, n, len(s.cell_src)).astype(np.int32)
        options = {"score": score, "scale": 1 / 8, "softcap": 4.0}
        kept, ages = sample(q, score)
        expected = sampled(s.layer, s.cell_src, age, kept, ages, **options)
        got = [
            np.asarray(
                core.kv_sampled(*arrays, age, samples_of(core, q, score), group=group, n_threads=n_threads, **options)
            )
            for n_threads in (1, 3)
        ]
        assert_close(got[0][None], expected[None])
        assert np.array_equal(*got)


def test_what_windows_mean(core) -> None:
    """A key that only the oldest queries ask for counts less than one for the youngest, and both more than others."""
    rng = np.random.default_rng(12)
    s = scene(rng, n_cells=400, n_head_kv=1, head_dim=64, group=4, share=MIXES["all-far"])
    summaries = fp4.decode(s.layer.summaries)[:, 0]
    wanted = 30 * (summaries - summaries.mean(axis=0)) / 64
    q = np.concatenate([np.tile(wanted[20], (1000, 1)), np.tile(wanted[70], (500, 1))])[:, None].astype(np.float32)
    age = np.full(400, 5000, np.int32)
    arrays = (s.layer.far_k, s.layer.far_v, s.layer.side, s.layer.near_k, s.layer.near_v, s.cell_src, age)
    got = np.asarray(core.kv_sampled(*arrays, samples_of(core, q, "windows"), group=4, score="windows"))
    order = np.argsort(-got[::4])
    assert order[:2].tolist() == [70, 20]
    # Queries see what is as old as they are.
    age[4 * 70 : 4 * 71] = 100
    again = np.asarray(core.kv_sampled(*arrays, samples_of(core, q, "windows"), group=4, score="windows"))
    assert 0 < again[4 * 70] < got[4 * 70]


@pytest.mark.parametrize("mix", ["everyday", "all-far", "no-far"])
def test_lost_attention(core, mix: str) -> None:
    """What is left without some cells is what an attention has that does not list them."""
    rng = np.random.default_rng(13)
    s = scene(rng, n_cells=200, n_head_kv=2, head_dim=64, group=4, share=MIXES[mix])
    q = rng.standard_normal((40, 6, 64)).astype(np.float32)
    mask = np.where(rng.random((40, len(s.cell_src))) < 0.3, -np.inf, 0).astype(np.float16)
    mask[3] = -np.inf
    sinks = rng.standard_normal(6).astype(np.float32)
    kept = np.flatnonzero(rng.random(len(s.cell_src) // 4) < 0.6)
    dropped = (~np.isin(np.arange(len(s.cell_src)) // 4, kept)).astype(np.uint8)
    options = {"scale": 1 / 8, "softcap": 3.0, "rotation": (64, 64)}
    arrays = (*compiled.memory(s.layer, s.cur), s.cell_src, q)
    lists = lookup.pack([[kept, kept]] * 40)
    expected = core.kv_align(*arrays, lists, mask, sinks, group=4, **options)
    for n_threads in (1, 3):
        got = core.kv_receive(*arrays, mask, sinks, dropped, group=4, n_threads=n_threads, **options)
        assert np.allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert expected[0, 0] == 39 and (mix == "no-far") == bool(expected[0, 2] == 0)
