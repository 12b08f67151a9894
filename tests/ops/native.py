"""The compiled operations, called with the oracle's structures. Layers are changed in place."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from oracle.memory import Current, Layer
from oracle.rotate import Rotation


def memory(layer: Layer, cur: Current) -> tuple[np.ndarray, ...]:
    """The arrays that ``kv_fold`` and ``kv_attend`` begin with."""
    return layer.far_k, layer.far_v, layer.side, layer.near_k, layer.near_v, cur.k, cur.v


def store(
    core: ModuleType, layer: Layer, cur: Current, dst: np.ndarray, n_threads: int, rotation: Rotation = (0, 0)
) -> None:
    core.kv_store(
        layer.near_k,
        layer.near_v,
        cur.k,
        cur.v,
        np.asarray(dst, np.int32),
        rotation=rotation,
        n_threads=n_threads,
    )


def fold(
    core: ModuleType,
    layer: Layer,
    cur: Current,
    plan: np.ndarray,
    n_threads: int,
    rotation: Rotation = (0, 0),
    spans: list[int] | None = None,
) -> None:
    core.kv_fold(
        *memory(layer, cur),
        np.ascontiguousarray(plan, np.int32),
        None if spans is None else np.array(spans, np.int32),
        group=layer.group,
        rotation=rotation,
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
    rotation: Rotation = (0, 0),
    n_threads: int = 1,
) -> np.ndarray:
    return np.asarray(
        core.kv_attend(
            *memory(layer, cur),
            np.ascontiguousarray(cell_src, np.int32),
            np.ascontiguousarray(q),
            None if mask is None else np.ascontiguousarray(mask),
            sinks,
            group=layer.group,
            scale=float(scale),
            softcap=softcap,
            rotation=rotation,
            n_threads=n_threads,
        )
    )
