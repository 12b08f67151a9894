"""``kv_attend`` against float64 attention over the rows it should have read.

Tolerance: scores are float32 sums of up to 256 products of moderate size, so a score is off by about 1e-5 at most; a
weight then is off by 1e-5 relative, and an output by 1e-5 of the largest value, plus what rescaling the running sums
costs. 1e-4 of the largest value leaves room for a fast exponential, and is 50 times less than one cell of 200 matters.
"""

from __future__ import annotations

import native
import numpy as np
import pytest
from oracle.attend import attend
from oracle.memory import HIDDEN
from scenes import MIXES, Scene, rows, scene

N_Q = [1, 2, 7, 16, 33, 130]
EDGES = sorted({1, 2, 3, *(64 * k + d for k in (1, 2, 3, 5) for d in (-1, 0, 1))})
SHAPES = [(head_dim, ratio) for head_dim in (64, 128, 256) for ratio in (1, 3, 4, 8)]


def queries(rng: np.random.Generator, n_q: int, s: Scene, ratio: int) -> np.ndarray:
    """Queries whose scores have a spread of about two: neither uniform nor one-hot attention."""
    q = rng.standard_normal((n_q, s.layer.n_head_kv * ratio, s.layer.head_dim))
    return (1.5 * q).astype(np.float32)


def causal_mask(n_q: int, n_kv: int) -> np.ndarray:
    """Query i of the last n_q positions; when there are more queries than cells the first ones see nothing."""
    last = n_kv - n_q + np.arange(n_q)
    return np.where(np.arange(n_kv)[None, :] <= last[:, None], 0, -np.inf).astype(np.float16)


def compare(core, s: Scene, q: np.ndarray, n_kv: int, threads=(1, 2, 3), sizes=None, **options) -> None:
    """All sizes of ``sizes`` (numbers of queries) and thread counts against one run of the oracle."""
    src = s.cell_src[:n_kv]
    options.setdefault("scale", 1 / np.sqrt(s.layer.head_dim))
    mask = options.pop("mask", None)
    expected = attend(s.layer, s.cur, src, q, mask, **options)
    finite = [a[np.isfinite(a)] for a in (s.cur.v, s.layer.near_v)]
    largest = max(1.0, *(float(np.abs(a).max(initial=0)) for a in finite), float(np.abs(expected).max()))
    for n_q in sizes or [len(q)]:
        part = None if mask is None else mask[:n_q]
        for n_threads in threads:
            got = native.attend(core, s.layer, s.cur, src, q[:n_q], part, n_threads=n_threads, **options)
            assert got.shape == expected[:n_q].shape
            assert np.isfinite(got).all(), f"n_q {n_q}, n_kv {n_kv}, {n_threads} threads: a poisoned row was read"
            worst = np.abs(got - expected[:n_q]).max()
            assert worst <= 1e-4 * largest, f"n_q {n_q}, n_kv {n_kv}, {n_threads} threads: off by {worst}"


@pytest.mark.parametrize(("head_dim", "ratio"), SHAPES)
def test_edges(core, head_dim: int, ratio: int) -> None:
    """Every tile edge of the number of cells, numbers of queries, and threads, with causal masks."""
    rng = np.random.default_rng([head_dim, ratio])
    s = scene(rng, n_cells=324, n_head_kv=2, head_dim=head_dim, group=4, share=MIXES["everyday"])
    q = queries(rng, max(N_Q), s, ratio)
    for n_kv in EDGES:
        mask = causal_mask(max(N_Q), n_kv)[::-1].copy()  # full sight first, so that small n_q see all cells
        compare(core, s, q, n_kv, sizes=N_Q, mask=mask)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("group", [2, 4, 8, 16, 32])
def test_mixes(core, group: int, mix: str) -> None:
    """Every group size and mixture of sources, without a mask."""
    rng = np.random.default_rng([group, len(mix)])
    s = scene(rng, n_cells=200, n_head_kv=3, head_dim=64, group=group, share=MIXES[mix])
    q = queries(rng, 33, s, 3)
    for n_kv in (1, group, 65, 200):
        compare(core, s, q, n_kv, sizes=[1, 7, 33])


@pytest.mark.parametrize("group", [2, 4, 32])
@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 3), (128, 4), (256, 1)])
@pytest.mark.parametrize("scale_group", [32, 64])
def test_scale_groups(core, scale_group: int, head_dim: int, ratio: int, group: int) -> None:
    """Rows with fewer scales, for few queries and many; three KV heads, so that rows begin at all offsets of scales."""
    rng = np.random.default_rng([scale_group, head_dim, group])
    shape = {"n_head_kv": 3, "head_dim": head_dim, "group": group, "scale_group": scale_group}
    s = scene(rng, n_cells=202, share=MIXES["everyday"], **shape)
    q = queries(rng, 33, s, ratio)
    for n_kv in (1, 63, 65, 202):
        compare(core, s, q, n_kv, sizes=[1, 2, 7, 33], mask=causal_mask(33, n_kv)[::-1].copy())


@pytest.mark.parametrize("n_kv", [1, 5, 64, 300])
@pytest.mark.parametrize("softcap", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(core, n_kv: int, softcap: float, with_sinks: bool) -> None:
    rng = np.random.default_rng([n_kv, int(softcap)])
    s = scene(rng, n_cells=300, n_head_kv=2, head_dim=128, group=4, share=MIXES["everyday"])
    q = queries(rng, 16, s, 4)
    sinks = (3 * rng.standard_normal(8)).astype(np.float32) if with_sinks else None
    compare(core, s, q, n_kv, sizes=[1, 16], softcap=softcap, sinks=sinks, mask=causal_mask(16, n_kv))


def test_sink_far_above_every_score(core) -> None:
    """The sink takes all the mass: outputs vanish instead of overflowing."""
    rng = np.random.default_rng(3)
    s = scene(rng, n_cells=70, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    compare(core, s, queries(rng, 4, s, 4), 70, sinks=np.full(4, 200, np.float32))


@pytest.mark.parametrize("seed", range(4))
def test_masks_of_several_sequences(core, seed: int) -> None:
    """Each query sees the cells of its own sequence only; some see nothing at all and get zeros."""
    rng = np.random.default_rng(seed)
    s = scene(rng, n_cells=260, n_head_kv=2, head_dim=64, group=4, share=MIXES["everyday"])
    q = queries(rng, 33, s, 3)
    owner, asks = rng.integers(0, 4, 260), rng.integers(0, 6, 33)  # sequences 4 and 5 own nothing
    mask = np.where(owner[None, :] == asks[:, None], 0, -np.inf).astype(np.float16)
    compare(core, s, q, 260, sizes=[1, 33], mask=mask)
    blind = asks >= 4
    got = native.attend(core, s.layer, s.cur, s.cell_src, q, mask, scale=0.125, n_threads=2)
    assert blind.any() and not got[blind].any()


def test_all_rows_masked(core) -> None:
    rng = np.random.default_rng(1)
    s = scene(rng, n_cells=130, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    mask = np.full((7, 130), -np.inf, np.float16)
    for sinks in (None, np.ones(3, np.float32)):
        got = native.attend(
            core, s.layer, s.cur, s.cell_src[:130], queries(rng, 7, s, 3), mask, sinks=sinks, n_threads=2
        )
        assert not got.any()


def test_every_cell_hidden(core) -> None:
    rng = np.random.default_rng(2)
    s = scene(rng, n_cells=130, n_head_kv=1, head_dim=64, group=4, share={"far": 0.5, "near": 0.5})
    hidden = np.full(130, HIDDEN, np.int32)
    got = native.attend(core, s.layer, s.cur, hidden, queries(rng, 2, s, 3), None, n_threads=2)
    assert not got.any()


def test_mask_values_are_added(core) -> None:
    """Biases other than 0 and -inf join the scores after the cap."""
    rng = np.random.default_rng(4)
    s = scene(rng, n_cells=100, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    bias = rng.standard_normal((16, 100)).astype(np.float16)
    compare(core, s, queries(rng, 16, s, 4), 100, mask=bias, softcap=5.0)


@pytest.mark.parametrize("n_q", [1, 16])
def test_sharp_attention_does_not_overflow(core, n_q: int) -> None:
    """Scores of several hundred: a softmax without the running maximum would give infinities.

    One float32 score of 500 is only good to 3e-5, so the tolerance applies to weights that are off by as much.
    """
    rng = np.random.default_rng(6)
    s = scene(rng, n_cells=200, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    q = 40 * queries(rng, n_q, s, 3)
    src = s.cell_src[:200]
    expected = attend(s.layer, s.cur, src, q, None, scale=0.125)
    got = native.attend(core, s.layer, s.cur, src, q, None, scale=0.125, n_threads=2)
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()


def test_many_cells(core) -> None:
    """Several thousand cells, one query: the split over cells and the merge of its parts."""
    rng = np.random.default_rng(5)
    s = scene(rng, n_cells=3000, n_head_kv=1, head_dim=64, group=16, share=MIXES["everyday"])
    q = queries(rng, 2, s, 3)
    for n_kv in (1023, 1024, 1025, 3000):
        compare(core, s, q, n_kv, sizes=[1, 2])


def test_threads_do_not_change_the_result_much(core) -> None:
    """A run with the same number of threads is repeatable to the bit."""
    rng = np.random.default_rng(10)
    s = scene(rng, n_cells=500, n_head_kv=2, head_dim=128, group=4, share=MIXES["everyday"])
    q = queries(rng, 3, s, 4)
    for n_threads in (1, 2, 3):
        first, second = (
            native.attend(core, s.layer, s.cur, s.cell_src[:500], q, None, scale=0.1, n_threads=n_threads) for _ in "ab"
        )
        assert np.array_equal(first, second)


def test_summary_of_a_partly_hidden_group(core) -> None:
    """Hidden members of a far group hold NaN bytes; the others still decode."""
    rng = np.random.default_rng(11)
    s = scene(rng, n_cells=64, n_head_kv=1, head_dim=64, group=32, share={"far": 0.1, "hidden": 0.9})
    compare(core, s, queries(rng, 2, s, 1), 64)


def test_rows_helper_is_realistic() -> None:
    """The scenes' keys have group means worth subtracting, as real keys do (0.31 of the energy left at m = 4)."""
    x = rows(np.random.default_rng(0), 256, 2, 64).reshape(64, 4, 2, 64)
    left = ((x - x.mean(axis=1, keepdims=True)) ** 2).sum() / ((x - x.mean(axis=(0, 1))) ** 2).sum()
    assert left < 0.5
