"""One layer's persistent memory and the rows of a micro-batch, as the operations see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import fp4
from .layout import SideLayout

FAR = -1  # the far tier
HIDDEN = -2  # nobody sees the cell; its bytes may be anything
CURRENT_BASE = -3  # row r of the micro-batch is CURRENT_BASE - r
SPAN = 128  # cells of a span


def current(row: int) -> int:
    """The source number of row ``row`` of the micro-batch."""
    return CURRENT_BASE - row


@dataclass
class Layer:
    """Memory of one layer.

    far_k, far_v    uint8 ``[n_cells, n_head_kv, 36 * head_dim / 64]``
    side            uint8 ``[SideLayout.bytes]``
    near_k, near_v  float16 ``[n_near, n_head_kv, head_dim]``
    """

    n_head_kv: int
    head_dim: int
    group: int
    far_k: np.ndarray
    far_v: np.ndarray
    side: np.ndarray
    near_k: np.ndarray
    near_v: np.ndarray

    @classmethod
    def empty(
        cls,
        n_head_kv: int,
        head_dim: int,
        group: int,
        n_cells: int,
        n_near: int,
        fill: int = 0,
        spans: bool = False,
    ) -> Layer:
        """A layer whose rows hold the byte ``fill`` (0xFF makes NaN of every near row), with or without spans."""
        row = fp4.BLOCK_BYTES * head_dim // fp4.BLOCK_VALUES
        layout = SideLayout(n_head_kv, head_dim, n_cells // group, n_cells // SPAN if spans else 0)
        return cls(
            n_head_kv,
            head_dim,
            group,
            np.full((n_cells, n_head_kv, row), fill, np.uint8),
            np.full((n_cells, n_head_kv, row), fill, np.uint8),
            np.full(layout.bytes, fill, np.uint8),
            np.full((n_near, n_head_kv, head_dim, 2), fill, np.uint8).view(np.float16)[..., 0],
            np.full((n_near, n_head_kv, head_dim, 2), fill, np.uint8).view(np.float16)[..., 0],
        )

    @property
    def layout(self) -> SideLayout:
        """Its side memory has spans if it is large enough for them."""
        shape = self.n_head_kv, self.head_dim, len(self.far_k) // self.group
        with_spans = SideLayout(*shape, len(self.far_k) // SPAN)
        return with_spans if with_spans.bytes == len(self.side) else SideLayout(*shape)

    @property
    def summaries(self) -> np.ndarray:
        return self.layout.summaries(self.side)

    @property
    def spread(self) -> np.ndarray:
        return self.layout.spread(self.side)

    @property
    def span_summaries(self) -> np.ndarray:
        return self.layout.span_summaries(self.side)

    @property
    def span_spread(self) -> np.ndarray:
        return self.layout.span_spread(self.side)

    def copy(self) -> Layer:
        arrays = (self.far_k, self.far_v, self.side, self.near_k, self.near_v)
        return Layer(self.n_head_kv, self.head_dim, self.group, *(a.copy() for a in arrays))

    def far_keys(self, cells: np.ndarray) -> np.ndarray:
        """Decoded keys of far cells, summary plus difference: float32 ``[n, n_head_kv, head_dim]``."""
        return fp4.decode(self.summaries[cells // self.group]) + fp4.decode(self.far_k[cells])

    def far_values(self, cells: np.ndarray) -> np.ndarray:
        return fp4.decode(self.far_v[cells])


@dataclass
class Current:
    """Rows born in the running micro-batch, float32 ``[n_rows, n_head_kv, head_dim]``."""

    k: np.ndarray
    v: np.ndarray


def read_rows(layer: Layer, cur: Current, cells: np.ndarray, src: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of cells from wherever they are, float32 ``[n, n_head_kv, head_dim]`` each."""
    cells, src = np.asarray(cells), np.asarray(src)
    if (src == HIDDEN).any():
        raise ValueError("a hidden cell has no row")
    shape = (len(cells), layer.n_head_kv, layer.head_dim)
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    near, far, now = src >= 0, src == FAR, src <= CURRENT_BASE
    keys[near], values[near] = layer.near_k[src[near]], layer.near_v[src[near]]
    keys[far], values[far] = layer.far_keys(cells[far]), layer.far_values(cells[far])
    keys[now], values[now] = cur.k[CURRENT_BASE - src[now]], cur.v[CURRENT_BASE - src[now]]
    return keys, values
