"""Reference of ``kv_store``: rows of the micro-batch that stay exact are rounded to f16 and put into the near pool."""

from __future__ import annotations

import numpy as np

from .memory import Current, Layer


def store(layer: Layer, cur: Current, dst: np.ndarray) -> None:
    """Write row ``i`` of the micro-batch to near row ``dst[i]``; a negative ``dst`` leaves the pool alone."""
    for row, target in enumerate(dst):
        if target >= 0:
            layer.near_k[target] = cur.k[row].astype(np.float16)
            layer.near_v[target] = cur.v[row].astype(np.float16)
