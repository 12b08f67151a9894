"""The compiled operations, called with the oracle's structures. Layers are changed in place."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from oracle.memory import Current, Layer


def store(core: ModuleType, layer: Layer, cur: Current, dst: np.ndarray, n_threads: int) -> None:
    core.kv_store(layer.near_k, layer.near_v, cur.k, cur.v, np.asarray(dst, np.int32), n_threads=n_threads)


def fold(core: ModuleType, layer: Layer, cur: Current, plan: np.ndarray, n_threads: int) -> None:
    core.kv_fold(
        layer.far_k,
        layer.far_v,
        layer.side,
        layer.near_k,
        layer.near_v,
        cur.k,
        cur.v,
        np.ascontiguousarray(plan, np.int32),
        group=layer.group,
        n_threads=n_threads,
    )


def attend(
    core: ModuleType,
    layer: Layer,
    cur: Current,
    cell_src: np.ndarray,
    q: np.ndarray,
    mask: np.ndarray | None,
    *,
    sinks: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    n_threads: int = 1,
) -> np.ndarray:
    return np.asarray(
        core.kv_attend(
            layer.far_k,
            layer.far_v,
            layer.side,
            layer.near_k,
            layer.near_v,
            cur.k,
            cur.v,
            np.ascontiguousarray(cell_src, np.int32),
            np.ascontiguousarray(q),
            None if mask is None else np.ascontiguousarray(mask),
            sinks,
            group=layer.group,
            scale=float(scale),
            softcap=softcap,
            n_threads=n_threads,
        )
    )
