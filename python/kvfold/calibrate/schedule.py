"""Which share of the groups every layer should read, when all of them together may read so much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

#: Shares that a layer may get, in hundredths; more than the last one is ``dense``.
_SHARES = np.arange(3, 71) / 100.0


@dataclass(frozen=True)
class Curve:
    """How a layer answers to the largest share that its look-ups may read.

    Attributes:
        budgets: the shares that were tried, ascending.
        read: share that was read with each of them (the threshold may stop before).
        lost: what was lost with each of them, in any unit that is the same for all layers.
    """

    budgets: Sequence[float]
    read: Sequence[float]
    lost: Sequence[float]

    def at(self, budgets: Numbers) -> tuple[Numbers, Numbers]:
        """Share read, and lost, between and beyond the budgets that were tried.

        More never reads less nor loses more: what measurement says against that is noise.
        """
        read = np.maximum.accumulate(np.asarray(self.read, np.float64))
        lost = np.minimum.accumulate(np.maximum(np.asarray(self.lost, np.float64), 1e-12))
        return np.interp(budgets, self.budgets, read), np.exp(np.interp(budgets, self.budgets, np.log(lost)))


def allocate(curves: Sequence[Curve], share: float) -> list[float]:
    """Budgets with the least sum of losses whose shares read are ``share`` on average, or less.

    A layer that is read whole (budget 1) loses nothing. The sum of the losses is the Lagrangian's minimum for a price a
    share, and the price is found by bisection; what is left is less than one layer's step.
    """
    budgets = np.append(_SHARES, 1.0)
    read, lost = (np.stack(x) for x in zip(*(curve.at(_SHARES) for curve in curves), strict=True))
    read = np.append(read, np.ones((len(curves), 1)), axis=1)
    lost = np.append(lost, np.zeros((len(curves), 1)), axis=1)

    def choose(price: float) -> npt.NDArray[np.intp]:
        return np.asarray(np.argmin(lost + price * read, axis=1))

    def total(chosen: npt.NDArray[np.intp]) -> float:
        return float(np.mean(np.take_along_axis(read, chosen[:, None], axis=1)))

    low, high = 0.0, 1.0
    while total(choose(high)) > share and high < 1e12:
        low, high = high, high * 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(choose(middle)) > share else (low, middle)
    return [float(budgets[i]) for i in choose(high)]
