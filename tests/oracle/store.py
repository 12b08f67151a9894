"""Reference of ``kv_store``: rows of the micro-batch that stay exact are rounded to f16 and put into the near pool."""

from __future__ import annotations

import numpy as np

from .memory import Current, Layer
from .rotate import Rotation, rotate_f32


def store(layer: Layer, cur: Current, dst: np.ndarray, rotation: Rotation = (0, 0)) -> None:
    """Write row ``i`` of the micro-batch, rotated, to near row ``dst[i]``; a negative ``dst`` leaves the pool alone."""
    for row, target in enumerate(dst):
        if target >= 0:
            layer.near_k[target] = rotate_f32(cur.k[row], rotation[0]).astype(np.float16)
            layer.near_v[target] = rotate_f32(cur.v[row], rotation[1]).astype(np.float16)
