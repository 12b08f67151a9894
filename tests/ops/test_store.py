"""``kv_store`` against its definition: f16 rounding into the named near rows, and nothing else."""

import native
import numpy as np
import pytest
from oracle.memory import Current, Layer
from oracle.store import store


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("n_head_kv", [1, 3])
@pytest.mark.parametrize("scale_group", [16, 32, 64])
def test_store(core, scale_group: int, n_head_kv: int, head_dim: int, n_threads: int) -> None:
    rng = np.random.default_rng(head_dim + n_head_kv)
    layer = Layer.empty(n_head_kv, head_dim, 4, 32, 20, fill=0xFF, scale_group=scale_group)
    shape = (17, n_head_kv, head_dim)
    cur = Current(*((rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 4, shape)).astype(np.float32) for _ in "kv"))
    dst = rng.permutation(20)[:17].astype(np.int32)
    dst[rng.integers(0, 17, 5)] = -1
    expected = layer.copy()
    store(expected, cur, dst)
    native.store(core, layer, cur, dst, n_threads)
    for name in ("near_k", "near_v"):
        assert np.array_equal(getattr(layer, name).view(np.uint16), getattr(expected, name).view(np.uint16)), name
    for name in ("side", "far_k", "far_v"):
        assert np.array_equal(getattr(layer, name), getattr(expected, name)), name


def test_nothing_to_store(core) -> None:
    layer = Layer.empty(2, 64, 4, 8, 5, fill=0xFF)
    cur = Current(np.ones((3, 2, 64), np.float32), np.ones((3, 2, 64), np.float32))
    before = layer.copy()
    native.store(core, layer, cur, np.full(3, -1, np.int32), 2)
    assert np.array_equal(layer.near_k.view(np.uint16), before.near_k.view(np.uint16))
