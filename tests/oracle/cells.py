"""Reference of where tokens live and of when they are folded.

Cells come in aligned groups of ``m``. A group belongs to one set of sequences, and position ``p`` sits at offset
``p % m``, so that a group holds neighbours in the text even while several sequences are decoded at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Cell:
    pos: int
    seqs: frozenset[int]
    near: bool  # the exact row is still there


@dataclass
class Cells:
    """Bookkeeping of ``n_groups`` groups of ``m`` cells; ``tail`` and ``sinks`` as in the cache's settings."""

    n_groups: int
    m: int
    tail: int
    sinks: int
    cells: list[Cell | None] = field(default_factory=list)
    folds: int = 0
    folded_tokens: int = 0

    def __post_init__(self) -> None:
        self.cells = [None] * (self.n_groups * self.m)

    # -- what is there -------------------------------------------------------------------------------------------------

    def members(self, group: int) -> list[Cell]:
        return [c for c in self.cells[group * self.m : (group + 1) * self.m] if c is not None]

    def length(self, seq: int) -> int:
        """Last position of a sequence plus one."""
        return max((c.pos for c in self.cells if c is not None and seq in c.seqs), default=-1) + 1

    @property
    def n_used(self) -> int:
        return sum(c is not None for c in self.cells)

    @property
    def n_near(self) -> int:
        return sum(c is not None and c.near for c in self.cells)

    # -- adding tokens -------------------------------------------------------------------------------------------------

    def place(self, tokens: Iterable[tuple[int, frozenset[int]]]) -> bool:
        """Place one micro-batch and fold what has become old. False, and nothing changed, when it does not fit."""
        before = list(self.cells)
        for pos, seqs in tokens:
            target = self._find(pos, seqs)
            if target is None:
                self.cells = before
                return False
            self.cells[target] = Cell(pos, seqs, near=True)
        self._fold()
        return True

    def _owned_by(self, group: int, seqs: frozenset[int]) -> bool:
        return all(c.seqs == seqs for c in self.members(group))

    def _find(self, pos: int, seqs: frozenset[int]) -> int | None:
        offset = pos % self.m
        if offset:
            for index, cell in enumerate(self.cells):
                if cell is None or cell.pos != pos - 1 or not seqs <= cell.seqs:
                    continue
                group = index // self.m
                in_range = all(c.pos // self.m == pos // self.m for c in self.members(group))
                free = self.cells[group * self.m + offset] is None
                if in_range and free and self._owned_by(group, seqs):
                    return group * self.m + offset
        for group in range(self.n_groups):
            if not self.members(group):
                return group * self.m + offset
        for index, cell in enumerate(self.cells):
            if cell is None and self._owned_by(index // self.m, seqs):
                return index
        return None

    # -- folding -------------------------------------------------------------------------------------------------------

    def _is_old(self, cell: Cell) -> bool:
        end = (cell.pos // self.m + 1) * self.m
        return all(end <= self.length(seq) - self.tail for seq in cell.seqs)

    def _fold(self) -> None:
        for group in range(self.n_groups):
            members = self.members(group)
            waiting = [c for c in members if c.near and c.pos >= self.sinks]
            if waiting and all(self._is_old(c) for c in members):
                self.folds += 1
                self.folded_tokens += sum(c.pos >= self.sinks for c in members)
                for cell in waiting:
                    cell.near = False

    # -- editing sequences ---------------------------------------------------------------------------------------------

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions ``[p0, p1)`` of a sequence; cells that no sequence owns any more become free."""
        for index, cell in enumerate(self.cells):
            if cell is not None and seq in cell.seqs and p0 <= cell.pos and (p1 is None or cell.pos < p1):
                rest = cell.seqs - {seq}
                self.cells[index] = Cell(cell.pos, rest, cell.near) if rest else None

    def seq_cp(self, source: int, target: int, p0: int = 0, p1: int | None = None) -> None:
        """Let ``target`` own positions ``[p0, p1)`` of ``source`` too."""
        for cell in self.cells:
            if cell is not None and source in cell.seqs and p0 <= cell.pos and (p1 is None or cell.pos < p1):
                cell.seqs = cell.seqs | {target}

    def seq_keep(self, seq: int) -> None:
        for index, cell in enumerate(self.cells):
            if cell is not None:
                self.cells[index] = Cell(cell.pos, frozenset({seq}), cell.near) if seq in cell.seqs else None

    def clear(self) -> None:
        self.cells = [None] * len(self.cells)
