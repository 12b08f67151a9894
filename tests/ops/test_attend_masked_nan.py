"""A cell that some queries must not see may hold anything: its NaN reaches those that see it and nobody else."""

from __future__ import annotations

import native
import numpy as np
import pytest
from oracle.attend import attend
from oracle.memory import CURRENT_BASE
from scenes import MIXES, scene


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_q", [1, 2, 7, 33, 130])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_of_another_sequence(core, value: float, n_q: int, n_threads: int) -> None:
    rng = np.random.default_rng(n_q)
    s = scene(rng, n_cells=200, n_head_kv=2, head_dim=64, group=4, share=MIXES["everyday"])
    q = rng.standard_normal((n_q, 6, 64)).astype(np.float32)
    theirs = rng.random(200) < 0.3
    for cell in np.flatnonzero(theirs):
        src = int(s.cell_src[cell])
        if src >= 0:
            s.layer.near_k[src], s.layer.near_v[src] = value, value
        elif src <= CURRENT_BASE:
            s.cur.k[CURRENT_BASE - src], s.cur.v[CURRENT_BASE - src] = value, value
    asks = np.arange(n_q) % 3 == 2  # queries of the other sequence
    mask = np.where(theirs[None, :] == asks[:, None], 0, -np.inf).astype(np.float16)
    got = native.attend(core, s.layer, s.cur, s.cell_src, q, mask, scale=0.125, n_threads=n_threads)
    own = np.where(theirs, -2, s.cell_src)  # the same with their cells hidden
    expected = attend(s.layer, s.cur, own, q[~asks], mask[~asks], scale=0.125)
    assert np.abs(got[~asks] - expected).max() <= 1e-4 * np.abs(expected).max()
