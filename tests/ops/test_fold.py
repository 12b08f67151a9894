"""``kv_fold`` against the oracle: the same bytes, from every kind of source, and not a byte elsewhere."""

import native
import numpy as np
import pytest
from oracle.fold import fold
from oracle.memory import FAR, Layer
from scenes import MIXES, plan_of, scene


def assert_same(got: Layer, expected: Layer) -> None:
    assert np.array_equal(got.summaries, expected.summaries), "summaries"
    assert np.array_equal(got.far_k, expected.far_k), "keys"
    assert np.array_equal(got.far_v, expected.far_v), "values"
    # The spread is a sum over members and channels in unspecified order, then rounded to f16 (2^-11 relative).
    same = got.spread.view(np.uint16) == expected.spread.view(np.uint16)
    close = np.isclose(got.spread.astype(np.float64), expected.spread.astype(np.float64), rtol=2**-10, atol=1e-7)
    assert (same | close).all(), "spread"
    assert np.array_equal(got.side[got.layout.epoch_offset :], expected.side[got.layout.epoch_offset :]), "epoch"
    for name in ("near_k", "near_v"):
        assert np.array_equal(getattr(got, name).view(np.uint16), getattr(expected, name).view(np.uint16)), name


@pytest.mark.parametrize("mix", ["everyday", "no-far", "mostly-hidden"])
@pytest.mark.parametrize("n_head_kv", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("scale_group", [16, 32, 64])
def test_fold(core, scale_group: int, group: int, head_dim: int, n_head_kv: int, mix: str) -> None:
    rng = np.random.default_rng([group, head_dim, n_head_kv])
    shape = {"n_head_kv": n_head_kv, "head_dim": head_dim, "group": group, "scale_group": scale_group}
    s = scene(rng, n_cells=96, share=MIXES[mix], **shape)
    plan = plan_of(rng, s)
    expected = s.layer.copy()
    fold(expected, s.cur, plan)
    for n_threads in (1, 2, 3):
        got = s.layer.copy()
        native.fold(core, got, s.cur, plan, n_threads)
        assert_same(got, expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale_group", [16, 32, 64])
def test_fold_again_from_far_rows(core, scale_group: int, seed: int) -> None:
    """A group that was cut and refilled is folded from decoded rows (old summary) plus new exact ones."""
    rng = np.random.default_rng(seed)
    share = {"far": 0.6, "near": 0.2, "current": 0.2}
    s = scene(rng, n_cells=64, n_head_kv=2, head_dim=64, group=8, share=share, scale_group=scale_group)
    plan = plan_of(rng, s, share=1.0)
    assert (plan[:, 1:] == FAR).any()
    expected = s.layer.copy()
    fold(expected, s.cur, plan)
    native.fold(core, s.layer, s.cur, plan, 2)
    assert_same(s.layer, expected)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**-12, 1.0, 300.0, 20000.0])
def test_fold_at_any_magnitude(core, scale: float) -> None:
    """Tiny values must not flush to zero and large ones must saturate, as the format says."""
    rng = np.random.default_rng(7)
    s = scene(rng, n_cells=32, n_head_kv=2, head_dim=64, group=4, share={"current": 1.0})
    s.cur.k *= np.float32(scale)
    s.cur.v *= np.float32(scale)
    plan = plan_of(rng, s, share=1.0)
    expected = s.layer.copy()
    fold(expected, s.cur, plan)
    native.fold(core, s.layer, s.cur, plan, 1)
    assert_same(s.layer, expected)


def test_equal_keys_leave_a_small_difference(core) -> None:
    """Members that are all alike: only the summary's own rounding is left, and the fold repairs it."""
    rng = np.random.default_rng(8)
    s = scene(rng, n_cells=4, n_head_kv=1, head_dim=64, group=4, share={"current": 1.0})
    s.cur.k[:] = rng.standard_normal(64).astype(np.float32)
    native.fold(core, s.layer, s.cur, plan_of(rng, s, 1.0), 1)
    key = s.cur.k[0, 0]
    plain = np.linalg.norm(np.asarray(core.fp4_decode(core.fp4_encode(key[None])))[0] - key)
    folded = np.linalg.norm(s.layer.far_keys(np.array([0]))[0, 0] - key)
    assert folded < 0.25 * plain
    assert s.layer.spread[0, 0] < 1e-6


def test_empty_plan(core) -> None:
    rng = np.random.default_rng(9)
    s = scene(rng, n_cells=16, n_head_kv=1, head_dim=64, group=4, share=MIXES["everyday"])
    before = s.layer.copy()
    native.fold(core, s.layer, s.cur, np.zeros((0, 5), np.int32), 2)
    assert_same(s.layer, before)
