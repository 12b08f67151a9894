"""Sizes and counts as people write them, and tables as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([km]?)\s*", re.IGNORECASE)

GIB = 2**30
MIB = 2**20


def parse_size(text: str) -> int:
    """Bytes of ``8GiB``, ``8G`` (both binary), ``8GB`` (decimal), ``500MiB`` or a plain number.

    Raises:
        ValueError: something else, or nothing at all.
    """
    match = _SIZE.fullmatch(text)
    size = 0
    if match:
        number, prefix, binary, unit = match.groups()
        base = 1000 if unit and not binary and prefix else 1024
        size = int(float(number) * base ** _POWERS[prefix.lower()])
    if size <= 0:
        raise ValueError(f"size {text!r}: write it as 8GiB, 7.5GiB, 500MiB or in bytes")
    return size


def parse_count(text: str) -> int:
    """``65536``, ``64k`` (65536) or ``1m`` (1048576) tokens.

    Raises:
        ValueError: something else, or not a whole positive number.
    """
    match = _COUNT.fullmatch(text)
    count = 0.0
    if match:
        count = float(match.group(1)) * 1024 ** _POWERS[match.group(2).lower()]
    if count < 1 or count != math.floor(count):
        raise ValueError(f"{text!r}: write a number of tokens as 65536 or 64k")
    return int(count)


def size_text(size: float) -> str:
    """Bytes in the unit that suits them."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size >= GIB:
        return f"{sign}{size / GIB:.2f} GiB"
    if size >= 100 * 1024:
        return f"{sign}{size / MIB:.1f} MiB"
    return f"{sign}{size:.0f} B"


def count_text(tokens: int) -> str:
    """``64k`` for 65536, the plain number where that would not be exact."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain-text table; columns after the first are aligned to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    out = []
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        out.append("  ".join(cells).rstrip())
        if number == 0:
            out.append("  ".join("-" * w for w in widths))
    return "\n".join(out)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    lines = [list(header), ["---"] + ["---:"] * (len(header) - 1), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
