"""Byte layout of a layer's *side* memory: summaries, spreads, counters and the epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import fp4


@dataclass(frozen=True)
class SideLayout:
    """Offsets in bytes.

    summaries  FP4 blocks ``[n_groups][n_head_kv][head_dim / 64]``
    spread     f16 ``[n_groups][n_head_kv]``
    counters   u64 ``[2]``, aligned to 8 bytes
    epoch      i32
    """

    n_head_kv: int
    head_dim: int
    n_groups: int

    @property
    def summary_row_bytes(self) -> int:
        return self.n_head_kv * (self.head_dim // fp4.BLOCK_VALUES) * fp4.BLOCK_BYTES

    @property
    def spread_offset(self) -> int:
        return self.summary_row_bytes * self.n_groups

    @property
    def counters_offset(self) -> int:
        end = self.spread_offset + 2 * self.n_groups * self.n_head_kv
        return -(-end // 8) * 8

    @property
    def epoch_offset(self) -> int:
        return self.counters_offset + 16

    @property
    def bytes(self) -> int:
        return self.epoch_offset + 4

    def summaries(self, side: np.ndarray) -> np.ndarray:
        """View of the summary bytes, ``uint8 [n_groups, n_head_kv, 36 * head_dim / 64]``."""
        view = side[: self.spread_offset]
        return view.reshape(self.n_groups, self.n_head_kv, -1)

    def spread(self, side: np.ndarray) -> np.ndarray:
        """View of the spreads, ``float16 [n_groups, n_head_kv]``."""
        view = side[self.spread_offset : self.spread_offset + 2 * self.n_groups * self.n_head_kv]
        return view.view(np.float16).reshape(self.n_groups, self.n_head_kv)
