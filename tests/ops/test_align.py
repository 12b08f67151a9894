"""``kv_align`` against softmax sums of the reference, and against what selections are known to read."""

from __future__ import annotations

import lookup
import native
import numpy as np
import pytest
from lookup import lookup_scene
from oracle.memory import FAR, HIDDEN
from oracle.select import mean_and_mass
from scenes import Scene


def align(core, s: Scene, q: np.ndarray, lists, mask=None, sinks=None, n_threads: int = 1, **options) -> np.ndarray:
    arrays = native.memory(s.layer, s.cur)
    return core.kv_align(
        *arrays, s.cell_src, q, lookup.pack(lists), mask, sinks, group=s.layer.group, n_threads=n_threads, **options
    )


def expected(s: Scene, q: np.ndarray, lists, mask=None, sinks=None, **options) -> np.ndarray:
    """Sums by definition: masses over all cells, and over those that are listed or exact."""
    n_q, n_head, _ = q.shape
    sums = np.zeros((n_head, 4))
    ratio = n_head // s.layer.n_head_kv
    groups = np.arange(len(s.cell_src)) // s.layer.group
    for i in range(n_q):
        row = None if mask is None else mask[i : i + 1]
        for h in range(s.layer.n_head_kv):
            read = np.where((s.cell_src == FAR) & ~np.isin(groups, lists[i][h]), HIDDEN, s.cell_src)
            masses = [
                mean_and_mass(s.layer, s.cur, src, q[i : i + 1], row, sinks, h, **options)[1:]
                for src in (s.cell_src, read)
            ]
            if not masses[0][0].any():
                continue
            share = masses[1][1] / masses[0][1]
            rows = sums[h * ratio : (h + 1) * ratio]
            rows[:, :3] += np.stack([np.ones(ratio), share, -np.log(share)], axis=1)
            rows[:, 3] = np.maximum(rows[:, 3], -np.log(share))
    return sums


@pytest.mark.parametrize("group", [2, 4, 16])
@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 1), (64, 3), (128, 4), (256, 2)])
@pytest.mark.parametrize("case", ["plain", "softcap", "sinks", "two sequences", "scales of 32"])
def test_sums(core, group: int, head_dim: int, ratio: int, case: str) -> None:
    rng = np.random.default_rng([group, head_dim, ratio])
    scale_group = 32 if case == "scales of 32" else 16
    shape = {"group": group, "head_dim": head_dim, "scale_group": scale_group}
    s = lookup_scene(rng, n_groups=max(24, 120 // group), **shape)
    n_groups = len(s.cell_src) // group
    q = (1.5 * rng.standard_normal((3, 2 * ratio, head_dim))).astype(np.float32)
    lists = [[np.sort(rng.permutation(n_groups)[: n_groups // 4]) for _ in range(2)] for _ in range(3)]
    options = {"scale": head_dim**-0.5, "softcap": 3.0 if case == "softcap" else 0.0, "rotation": (64, 64)}
    mask = sinks = None
    if case == "sinks":
        sinks = (3 * rng.standard_normal(2 * ratio)).astype(np.float32)
    if case == "two sequences":
        owner = np.arange(len(s.cell_src)) // group % 2
        mask = np.where(owner[None, :] == np.array([[0], [1], [0]]), 0, -np.inf).astype(np.float16)
        mask[2] = -np.inf  # a query that sees nothing does not count
    wanted = expected(s, q, lists, mask, sinks, **options)
    for n_threads in (1, 3):
        got = align(core, s, q, lists, mask, sinks, n_threads, **options)
        # Scores in float32, and a largest share of one in a few hundred.
        assert np.allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert wanted[0, 0] == (2 if case == "two sequences" else 3)


@pytest.mark.parametrize("scale_group", [16, 32, 64])
def test_everything_listed_is_aligned(core, scale_group: int) -> None:
    rng = np.random.default_rng(1)
    s = lookup_scene(rng, n_groups=40, group=4, scale_group=scale_group)
    q = rng.standard_normal((2, 6, 64)).astype(np.float32)
    got = align(core, s, q, [[np.arange(40)] * 2] * 2, scale=0.5)
    assert np.array_equal(got, np.tile([2.0, 2.0, 0.0, 0.0], (6, 1)))
