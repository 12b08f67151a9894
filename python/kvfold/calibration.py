"""The side file of ``kvfold calibrate``: what was measured for a model, and the settings that follow.

A GGUF file without tensors. Keys, each behind ``kvfold.calibration.``:

    version              u32, of this format
    model.fingerprint    u64, ``kvfold_model_fingerprint()``: no other model may use the file
    model.name           string
    kv_group, kv_lookup, kv_threshold, kv_min_tokens, kv_layers
                         strings, as on a command line: the settings
    kv_type              string, the type that was measured
    text.hash            string, SHA-256 of the texts
    text.n_ctx, text.tokens   u32, context, and tokens that were measured in it
    measured             string, the numbers as JSON

The runtime reads the same file (``cpp/cache/calibration.h``) and holds the fingerprint against the loaded model.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gguf_header import read_gguf_header

VERSION = 1
_ARCHITECTURE = "kvfold-calibration"
_PREFIX = "kvfold.calibration."
_NUMBERS = ("version", "model.fingerprint", "text.n_ctx", "text.tokens")
_TEXTS = ("model.name", "kv_type", "kv_group", "kv_lookup", "kv_threshold", "kv_min_tokens", "kv_layers")


@dataclass(frozen=True)
class Calibration:
    """Settings for one model, and where they come from.

    Attributes:
        fingerprint, model: of the model, and its name.
        kv_type, group, lookup, threshold, min_tokens, layers: as in ``KvConfig``.
        text_hash: SHA-256 of the texts, hexadecimal.
        n_ctx, tokens: context, and how many tokens of each text were measured.
        measured: the numbers, as ``kvfold calibrate --json`` prints them.
    """

    fingerprint: int
    model: str
    kv_type: str
    group: int
    lookup: tuple[float, float]
    threshold: float
    min_tokens: int
    layers: str
    text_hash: str
    n_ctx: int
    tokens: int
    measured: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, str]:
        """The settings as they are written on a command line."""
        return {
            "kv_type": self.kv_type,
            "kv_group": str(self.group),
            "kv_lookup": ",".join(f"{share:g}" for share in self.lookup),
            "kv_threshold": f"{self.threshold:g}",
            "kv_min_tokens": str(self.min_tokens),
            "kv_layers": self.layers,
        }


def require_writer() -> Any:
    """The package that writes GGUF files.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ValueError("a calibration is written with the package gguf: pip install gguf") from None


def write_calibration(path: str | os.PathLike[str], found: Calibration) -> None:
    """Write a side file; an older one of that name is replaced only by a whole one.

    Raises:
        ValueError: it cannot be written.
    """
    gguf = require_writer()
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        writer = gguf.GGUFWriter(part, _ARCHITECTURE)
        writer.add_uint32(_PREFIX + "version", VERSION)
        writer.add_uint64(_PREFIX + "model.fingerprint", found.fingerprint)
        writer.add_uint32(_PREFIX + "text.n_ctx", found.n_ctx)
        writer.add_uint32(_PREFIX + "text.tokens", found.tokens)
        texts = {"model.name": found.model, "text.hash": found.text_hash, "measured": json.dumps(found.measured)}
        for name, text in {**texts, **found.settings()}.items():
            writer.add_string(_PREFIX + name, text)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"{str(target)!r} cannot be written: {error.strerror or error}") from None


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a side file.

    Raises:
        ValueError: it cannot be read, is cut short, is no calibration, or has another version.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise _bad(name, "is not a file")
    try:
        values = read_gguf_header(name).metadata
    except ValueError as error:
        raise _bad(name, f"cannot be read: {error}") from None
    found = {key.removeprefix(_PREFIX): value for key, value in values.items() if key.startswith(_PREFIX)}
    version = found.get("version")
    if version is None:
        raise _bad(name, "is not a calibration")
    if version != VERSION:
        raise _bad(name, f"has format version {version}, this kvfold reads version {VERSION}")
    for kind, keys in ((int, _NUMBERS), (str, (*_TEXTS, "text.hash", "measured"))):
        for key in keys:
            if not isinstance(found.get(key), kind):
                raise _bad(name, f"has no {key}")
    try:
        least, most = map(float, found["kv_lookup"].split(","))
        return Calibration(
            fingerprint=found["model.fingerprint"],
            model=found["model.name"],
            kv_type=found["kv_type"],
            group=int(found["kv_group"]),
            lookup=(least, most),
            threshold=float(found["kv_threshold"]),
            min_tokens=int(found["kv_min_tokens"]),
            layers=found["kv_layers"],
            text_hash=found["text.hash"],
            n_ctx=found["text.n_ctx"],
            tokens=found["text.tokens"],
            measured=json.loads(found["measured"]),
        )
    except ValueError as error:
        raise _bad(name, f"has an impossible value: {error}") from None


def _bad(path: str, why: str) -> ValueError:
    return ValueError(f"kv_calibration={path!r} {why}; `kvfold calibrate` makes one")
