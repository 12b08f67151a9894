"""The rotation, alone and inside the operations.

What is kept (near rows, far rows) is compared to the bit; attention with the float64 oracle, whose tolerance
test_attend.py explains: a rotation does not change the size of a row, and adds a rounding for each of its 8 stages at
most.
"""

from __future__ import annotations

from typing import Any

import native
import numpy as np
import pytest
from oracle.attend import attend
from oracle.fold import fold
from oracle.memory import Current, Layer
from oracle.rotate import Rotation, hadamard, rotate, rotate_f32
from oracle.store import store
from scenes import MIXES, plan_of, scene
from test_attend import causal_mask, compare, queries
from test_fold import assert_same

SIZES = [64, 128, 256]
#: Every head size with every pair of sizes that divide it, and with keys or values alone.
CASES = [
    pytest.param(head_dim, (k, v), id=f"{head_dim}-k{k}-v{v}")
    for head_dim in SIZES
    for k in (0, *SIZES)
    for v in (0, *SIZES)
    if k + v and (not k or head_dim % k == 0) and (not v or head_dim % v == 0)
]


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def turned(cur: Current, rotation: Rotation, core: Any) -> Current:
    """The rows of a micro-batch as a caller would rotate them."""
    k, v = rotation
    return Current(core.rotate(cur.k, k) if k else cur.k, core.rotate(cur.v, v) if v else cur.v)


@pytest.mark.parametrize("n", SIZES)
def test_against_the_matrix(core, n: int) -> None:
    """Each stage, the scale and its product round once, by 2^-24 of the row's norm in the 2-norm at most."""
    x = np.random.default_rng(n).standard_normal((5, 3, 512)).astype(np.float32)
    error = np.abs(core.rotate(x, n) - rotate(x, n)).max()
    assert error <= 10 * 2.0**-24 * np.linalg.norm(x.reshape(-1, n), axis=1).max()


@pytest.mark.parametrize("n", SIZES)
def test_columns(core, n: int) -> None:
    """Unit rows give the matrix itself, exactly but for the scale's rounding: an order or a sign cannot hide."""
    got = core.rotate(np.eye(n, dtype=np.float32), n)
    assert np.array_equal(got, hadamard(n).astype(np.float32))


@pytest.mark.parametrize("n", SIZES)
def test_to_the_bit(core, n: int) -> None:
    """The order of additions is part of the format. Large and tiny channels side by side make any other order show."""
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((64, 256)) * 10.0 ** rng.integers(-12, 12, (64, 256))).astype(np.float32)
    assert np.array_equal(bits(core.rotate(x, n)), bits(rotate_f32(x, n)))
    # The same matrix from the largest distance down, which is other bits: the input tells the orders apart.
    reverse = [int(f"{i:0{n.bit_length() - 1}b}"[::-1], 2) for i in range(n)]
    blocks = rotate_f32(x.reshape(64, -1, n)[:, :, reverse], n)[:, :, reverse]
    assert not np.array_equal(blocks.reshape(64, 256), rotate_f32(x, n))


@pytest.mark.parametrize("n", SIZES)
def test_own_inverse(core, n: int) -> None:
    x = np.random.default_rng(n).standard_normal((9, 256)).astype(np.float32)
    assert np.abs(core.rotate(core.rotate(x, n), n) - x).max() <= 1e-5


def test_refusals(core) -> None:
    x = np.zeros((2, 96), np.float32)
    with pytest.raises(ValueError, match="n: 32 is not one of 64, 128, 256"):
        core.rotate(x, 32)
    with pytest.raises(ValueError, match=r"x: the last axis of shape \[2, 96\] is no multiple of 64"):
        core.rotate(x, 64)
    with pytest.raises(ValueError, match="x: expected a C-contiguous array of float32, got float64"):
        core.rotate(np.zeros((2, 64)), 64)
    layer = Layer.empty(1, 64, 4, 4, 4)
    cur = Current(np.zeros((1, 1, 64), np.float32), np.zeros((1, 1, 64), np.float32))
    for rotation, size in [((128, 0), 128), ((0, 32), 32), ((-64, 64), -64)]:
        with pytest.raises(ValueError, match=f"rotation: {size} is neither 0 nor a size .* that divides head_dim 64"):
            native.store(core, layer, cur, np.zeros(1), 1, rotation)


@pytest.mark.parametrize(("head_dim", "rotation"), CASES)
def test_store(core, head_dim: int, rotation: Rotation) -> None:
    rng = np.random.default_rng([head_dim, *rotation])
    layer = Layer.empty(3, head_dim, 4, 8, 20, fill=0xFF)
    cur = Current(*(rng.standard_normal((17, 3, head_dim)).astype(np.float32) for _ in "kv"))
    dst = rng.permutation(20)[:17].astype(np.int32)
    dst[rng.integers(0, 17, 5)] = -1
    expected, outside = layer.copy(), layer.copy()
    store(expected, cur, dst, rotation)
    native.store(core, outside, turned(cur, rotation, core), dst, 1)
    native.store(core, layer, cur, dst, 2, rotation)
    assert_same(layer, expected)
    assert_same(layer, outside)


@pytest.mark.parametrize(("head_dim", "rotation"), CASES)
@pytest.mark.parametrize("group", [4, 32])
def test_fold(core, head_dim: int, rotation: Rotation, group: int) -> None:
    """From current, near and far members at once. Only current rows are rotated."""
    rng = np.random.default_rng([head_dim, *rotation, group])
    s = scene(rng, n_cells=96, n_head_kv=2, head_dim=head_dim, group=group, share=MIXES["everyday"])
    plan = plan_of(rng, s)
    expected, outside = s.layer.copy(), s.layer.copy()
    fold(expected, s.cur, plan, rotation)
    native.fold(core, outside, turned(s.cur, rotation, core), plan, 1)
    native.fold(core, s.layer, s.cur, plan, 2, rotation)
    assert_same(s.layer, expected)
    assert np.array_equal(s.layer.side, outside.side)
    assert_same(s.layer, outside)


@pytest.mark.parametrize(("head_dim", "rotation"), CASES)
def test_attend(core, head_dim: int, rotation: Rotation) -> None:
    """Few and many queries, with and without a split over the cells."""
    rng = np.random.default_rng([head_dim, *rotation])
    s = scene(rng, n_cells=324, n_head_kv=2, head_dim=head_dim, group=4, share=MIXES["everyday"])
    q = queries(rng, 130, s, 3)
    for n_kv in (1, 64, 324):
        compare(core, s, q, n_kv, sizes=[1, 7, 130], mask=causal_mask(130, n_kv)[::-1].copy(), rotation=rotation)


@pytest.mark.parametrize(("head_dim", "rotation"), CASES)
@pytest.mark.parametrize("n_kv", [60, 1040])
def test_attend_is_the_same_to_the_bit(core, head_dim: int, rotation: Rotation, n_kv: int) -> None:
    """Rotating inside is rotating around, whatever the way the work is cut (1040 cells are split, 60 are not)."""
    rng = np.random.default_rng([head_dim, *rotation])
    few_far = {"far": 0.05, "near": 0.5, "current": 0.45}  # folding is what takes the oracle's time
    s = scene(rng, n_cells=n_kv, n_head_kv=2, head_dim=head_dim, group=4, share=few_far)
    k, v = rotation
    rows = turned(s.cur, rotation, core)
    for n_q in (1, 70):
        q = queries(rng, n_q, s, 2)
        options: dict[str, Any] = {"scale": head_dim**-0.5, "n_threads": 2}
        inside = native.attend(core, s.layer, s.cur, s.cell_src, q, None, rotation=rotation, **options)
        q = core.rotate(q, k) if k else q
        around = native.attend(core, s.layer, rows, s.cell_src, q, None, **options)
        assert np.array_equal(bits(inside), bits(core.rotate(around, v) if v else around)), f"{n_q} queries"


def test_queries_that_see_nothing_stay_zero(core) -> None:
    rng = np.random.default_rng(1)
    s = scene(rng, n_cells=130, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    mask = np.full((7, 130), -np.inf, np.float16)
    q = queries(rng, 7, s, 3)
    assert not native.attend(core, s.layer, s.cur, s.cell_src[:130], q, mask, rotation=(64, 64), n_threads=2).any()


def test_a_rotation_leaves_exact_attention_alone(core) -> None:
    """Keys, queries and values in another basis: the same attention, as long as nothing is folded."""
    rng = np.random.default_rng(2)
    s = scene(rng, n_cells=90, n_head_kv=2, head_dim=128, group=4, share={"current": 1.0})
    q = queries(rng, 5, s, 2)
    expected = attend(s.layer, s.cur, s.cell_src, q, scale=0.1)
    got = native.attend(core, s.layer, s.cur, s.cell_src, q, None, scale=0.1, rotation=(128, 64))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
