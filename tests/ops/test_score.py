"""Scores for eviction against their definition, and statistics of queries."""

from __future__ import annotations

import numpy as np
import pytest
from oracle.memory import Layer
from oracle.score import observe, score
from scenes import MIXES, scene

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
def test_score_is_its_definition(core, n_head_kv, head_dim, group, gqa, mix: str, n_threads: int) -> None:
    """In mixes of all kinds of cells; whatever is not far holds NaN."""
    rng = np.random.default_rng(1)
    s = scene(rng, n_cells=200, n_head_kv=n_head_kv, head_dim=head_dim, group=group, share=MIXES[mix])
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
