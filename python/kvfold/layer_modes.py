"""What each layer of an ``fp4_csa2`` cache does when decoding looks up: the text of ``kv_layers``."""

from __future__ import annotations

import itertools
import re

#: dense: reads everything; full: chooses groups for itself; reuse: reads what the last full or reindex layer chose;
#: reindex: chooses among the best of the last full layer; window: reads exact rows only.
MODES = ("dense", "full", "reuse", "reindex", "window")
#: Those that may have a share of their own, as ``full:0.3``: the largest one that the layer's look-ups read.
CHOOSING = ("full", "reindex")
AUTO = "auto"
#: Longest text that the compiled runtime keeps.
MAX_TEXT = 1023
_MAX_LAYERS = 4096
_TOKEN = re.compile(r"([a-z]+|\()|(\))|(,)|\*(\d+)")
_SHARE = re.compile(r":([0-9.]+(?:e-?[0-9]+)?)")


def expand(text: str) -> list[str]:
    """The modes that a text lists: ``dense*2,(full,reuse)*2`` is dense, dense, full, reuse, full, reuse.

    The last one goes on to the last layer. ``auto`` lists none. A share stays with its mode: ``full:0.3``.

    Raises:
        ValueError: not a list of modes, or one that takes over what no layer before it has chosen.
    """
    if text == AUTO:
        return []
    if len(text) > MAX_TEXT:
        raise ValueError(f"kv_layers is longer than {MAX_TEXT} characters; use mode*N for runs of layers")
    modes, end = _list(text, 0, nested=False)
    if end != len(text):
        raise _bad(text, "not a list of modes")
    names = [mode.partition(":")[0] for mode in modes]
    for needs, sources in (("reuse", CHOOSING), ("reindex", ("full",))):
        if needs in names and not any(m in sources for m in names[: names.index(needs)]):
            raise _bad(text, f"{needs} needs a full layer before it")
    return modes


def compress(modes: list[str]) -> str:
    """A text that lists these modes, with ``*N`` for runs."""
    runs = [(mode, len(list(run))) for mode, run in itertools.groupby(modes)]
    return ",".join(mode if n == 1 else f"{mode}*{n}" for mode, n in runs)


def without_shares(text: str) -> str:
    """The same modes, all with the share of ``kv_lookup``."""
    return _SHARE.sub("", text)


def _bad(text: str, why: str) -> ValueError:
    return ValueError(
        f"kv_layers={text!r}: {why}; possible: auto, or modes ({', '.join(MODES)}) as in 'dense*2,full*10,reuse' or "
        f"'(full:0.3,reuse*3)*8'"
    )


def _list(text: str, at: int, *, nested: bool) -> tuple[list[str], int]:
    """A list from ``at`` on, and where it ends."""
    modes: list[str] = []
    while True:
        found = _TOKEN.match(text, at)
        name = found.group(1) if found else None
        if found and name == "(" and not nested:
            item, at = _list(text, found.end(), nested=True)
            if text[at : at + 1] != ")":
                raise _bad(text, "a bracket is not closed")
            at += 1
        elif found and name in MODES:
            item, at = _mode(text, str(name), found.end())
        else:
            raise _bad(text, "not a list of modes")
        if text[at : at + 1] == "*":
            times = _TOKEN.match(text, at)
            if not times or not 1 <= int(times.group(4)) <= _MAX_LAYERS:
                raise _bad(text, "after * a number of layers is expected")
            item, at = item * int(times.group(4)), times.end()
        modes += item
        if len(modes) > _MAX_LAYERS:
            raise _bad(text, "too many layers")
        if text[at : at + 1] != ",":
            return modes, at
        at += 1


def _mode(text: str, name: str, at: int) -> tuple[list[str], int]:
    """A mode, with its share if it has one, and where it ends."""
    if name not in CHOOSING or text[at : at + 1] != ":":
        return [name], at
    found = _SHARE.match(text, at)
    try:
        share = float(found.group(1)) if found else 0.0
    except ValueError:
        share = 0.0
    if not found or not 0 < share <= 1:
        raise _bad(text, "after : a share above 0 and up to 1 is expected")
    return [f"{name}:{share:g}"], found.end()
