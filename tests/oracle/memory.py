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

    far_k, far_v    uint8 ``[n_cells, n_head_kv, b * head_dim / 64]``, b = 36, 34, 33 for scale groups of 16, 32, 64;
                    what these bytes are, ``far_parts`` says
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
        scale_group: int = fp4.SCALE_GROUP,
    ) -> Layer:
        """A layer whose rows hold the byte ``fill`` (0xFF makes NaN of every near row), with or without spans."""
        row = fp4.block_bytes(scale_group) * head_dim // fp4.BLOCK_VALUES
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
    def scale_group(self) -> int:
        """Channels of a far row that share a scale."""
        return fp4.scale_group_of(self.far_k.shape[-1], self.head_dim)

    def far_parts(self, far: np.ndarray) -> list[np.ndarray]:
        """Views of ``far_k`` or ``far_v``, uint8 ``[n_cells, n_head_kv, n]``, which make up the rows.

        With a scale group of 16 there is one. With 32 and 64 the values of all cells come first, then the scales.
        """
        if self.scale_group == fp4.SCALE_GROUP:
            return [far]
        cells = far.shape[:2]
        flat, values = far.reshape(-1), cells[0] * cells[1] * self.head_dim // 2
        return [flat[:values].reshape(*cells, -1), flat[values:].reshape(*cells, -1)]

    def far_rows(self, far: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Rows of some cells, uint8 ``[n, n_head_kv, b * head_dim / 64]``."""
        return np.concatenate([part[cells] for part in self.far_parts(far)], axis=-1)

    def put_far_rows(self, far: np.ndarray, cells: np.ndarray | slice, rows: np.ndarray | int) -> None:
        """Write rows, or one byte all over them."""
        first = 0
        for part in self.far_parts(far):
            end = first + part.shape[-1]
            part[cells] = rows if isinstance(rows, int) else rows[..., first:end]
            first = end

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
        differences = fp4.decode(self.far_rows(self.far_k, cells), self.scale_group)
        return fp4.decode(self.summaries[cells // self.group]) + differences

    def far_values(self, cells: np.ndarray) -> np.ndarray:
        return fp4.decode(self.far_rows(self.far_v, cells), self.scale_group)


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
