"""Byte layout of a layer's *side* memory: summaries, spreads, counters, the epoch, and what spans have."""

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
    spans      as summaries and spread, for ``n_spans``; aligned to 16 bytes; absent without spans
    """

    n_head_kv: int
    head_dim: int
    n_groups: int
    n_spans: int = 0

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
    def span_offset(self) -> int:
        return -(-(self.epoch_offset + 4) // 16) * 16

    @property
    def span_spread_offset(self) -> int:
        return self.span_offset + self.summary_row_bytes * self.n_spans

    @property
    def bytes(self) -> int:
        if not self.n_spans:
            return self.epoch_offset + 4
        return self.span_spread_offset + 2 * self.n_spans * self.n_head_kv

    def summaries(self, side: np.ndarray) -> np.ndarray:
        """View of the summary bytes, ``uint8 [n_groups, n_head_kv, 36 * head_dim / 64]``."""
        return self._rows(side, 0, self.n_groups)

    def spread(self, side: np.ndarray) -> np.ndarray:
        """View of the spreads, ``float16 [n_groups, n_head_kv]``."""
        return self._numbers(side, self.spread_offset, self.n_groups)

    def span_summaries(self, side: np.ndarray) -> np.ndarray:
        """View of the summary bytes of spans, ``uint8 [n_spans, n_head_kv, 36 * head_dim / 64]``."""
        return self._rows(side, self.span_offset, self.n_spans)

    def span_spread(self, side: np.ndarray) -> np.ndarray:
        """View of the spreads of spans, ``float16 [n_spans, n_head_kv]``."""
        return self._numbers(side, self.span_spread_offset, self.n_spans)

    def _rows(self, side: np.ndarray, start: int, n: int) -> np.ndarray:
        row = self.summary_row_bytes // self.n_head_kv
        return side[start : start + n * self.summary_row_bytes].reshape(n, self.n_head_kv, row)

    def _numbers(self, side: np.ndarray, start: int, n: int) -> np.ndarray:
        return side[start : start + 2 * n * self.n_head_kv].view(np.float16).reshape(n, self.n_head_kv)
