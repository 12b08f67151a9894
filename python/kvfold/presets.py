"""Named settings for common machines: ``Llama(preset="8gb-64k")``, ``kvfold run --preset 8gb-64k``.

A preset only fills in what is not given; what is given explicitly wins.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .units import GIB


@dataclass(frozen=True)
class Preset:
    """Settings for a memory of ``vram`` bytes on the GPU (``None``: for the CPU), as arguments of ``Llama``."""

    name: str
    vram: int | None
    arguments: Mapping[str, Any]
    note: str


def _gpu(name: str, gib: int, n_ctx: int, n_ubatch: int, note: str) -> Preset:
    batch = {"n_batch": max(n_ubatch, 512), "n_ubatch": n_ubatch}
    return Preset(name, gib * GIB, {"n_ctx": n_ctx, "kv_type": "fp4_csa2", "n_gpu_layers": -1, **batch}, note)


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _gpu("8gb-32k", 8, 32768, 512, "a GPU with 8 GiB, models up to 8B in 4 bits"),
        _gpu("8gb-64k", 8, 65536, 512, "the same with a long context"),
        _gpu("12gb-64k", 12, 65536, 1024, "a GPU with 12 GiB: prompts are read in larger pieces"),
        Preset(
            "cpu-32k",
            None,
            {"n_ctx": 32768, "kv_type": "fp4_csa2", "n_gpu_layers": 0, "n_batch": 512, "n_ubatch": 512},
            "no GPU",
        ),
    )
}


def find(name: object) -> Preset:
    """The preset of this name.

    Raises:
        ValueError: there is none; the message has those there are, and the closest.
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(str(name).lower(), PRESETS, n=1)
    hint = f"; did you mean {close[0]!r}" if close else ""
    raise ValueError(f"preset={name!r} is unknown{hint}; possible: {', '.join(PRESETS)}")


def fill(preset: str | None, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` where it is not ``None``, else the preset's value, else the default, for the names in ``defaults``."""
    named = find(preset).arguments if preset is not None else {}
    out = {}
    for name, default in defaults.items():
        value = given.get(name)
        out[name] = value if value is not None else named.get(name, default)
    return out
