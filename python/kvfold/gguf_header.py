"""Reads the header of a GGUF file: metadata and tensor table, never the weights.

Written for the checks that have to come before a model is loaded. Arrays (vocabularies hold hundreds of thousands of
strings) are walked but kept only when short, so a header is read in a fraction of a second.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_KEPT_ARRAY_LENGTH = 4096

# GGUF value types: number -> struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9

_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table; ``offset`` is in bytes from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        metadata: scalars and strings by key; arrays as lists when they have at most 4096 entries, else ``None``.
        tensors: the tensor table, in file order.
        data_offset: where tensor data starts, in bytes.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: list[TensorInfo] = field(repr=False)
    data_offset: int

    @property
    def architecture(self) -> str:
        """``general.architecture``, an empty string if missing."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    def arch(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own keys, e.g. ``arch("context_length")``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Cursor:
    """A position in the mapped file; every read checks what is left."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def skip(self, size: int) -> None:
        self._need(size)
        self.position += size

    def text(self) -> str:
        length = self.take("Q")
        self._need(length)
        raw = self.data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", errors="replace")

    def skip_text(self) -> None:
        self.skip(self.take("Q"))

    def _need(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise ValueError(f"it ends inside its header (at byte {len(self.data)})")


def _read_value(cursor: _Cursor, value_type: int) -> Any:
    if value_type in _SCALARS:
        return cursor.take(_SCALARS[value_type])
    if value_type == _STRING:
        return cursor.text()
    if value_type == _ARRAY:
        return _read_array(cursor)
    raise ValueError(f"its header holds a value of the unknown type {value_type}")


def _read_array(cursor: _Cursor) -> list[Any] | None:
    item_type = cursor.take("I")
    count = cursor.take("Q")
    if count <= _KEPT_ARRAY_LENGTH:
        return [_read_value(cursor, item_type) for _ in range(count)]
    if item_type in _SCALARS:
        cursor.skip(struct.calcsize("<" + _SCALARS[item_type]) * count)
        return None
    step: Callable[[], object]
    if item_type == _STRING:
        step = cursor.skip_text
    elif item_type == _ARRAY:
        # Nested arrays are legal but unheard of at this length.
        def step() -> object:
            return _read_array(cursor)
    else:
        raise ValueError(f"its header holds an array of the unknown type {item_type}")
    for _ in range(count):
        step()
    return None


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.text()
    n_dims = cursor.take("I")
    if n_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {n_dims} dimensions, more than {_MAX_DIMS}")
    shape = tuple(cursor.take("Q") for _ in range(n_dims))
    return TensorInfo(name, shape, cursor.take("I"), cursor.take("Q"))


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of the GGUF file at ``path``.

    Raises:
        ValueError: no such file, not a GGUF file, another byte order or version, malformed, or cut short.
    """
    file = Path(path)
    try:
        with open(file, "rb") as handle:
            if os.fstat(handle.fileno()).st_size < 24:
                raise ValueError("it is too short to be a GGUF file")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(file, _Cursor(data), len(data))
    except FileNotFoundError:
        raise ValueError(f"Model path does not exist: {file}") from None
    except OSError as error:
        raise ValueError(f"model {str(file)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"model {str(file)!r}: {error}") from None


def _parse(file: Path, cursor: _Cursor, file_size: int) -> GgufHeader:
    if cursor.data[:4] != _MAGIC:
        raise ValueError(f"it is not a GGUF file (it starts with {cursor.data[:4]!r})")
    cursor.skip(4)
    version = cursor.take("I")
    if version not in _VERSIONS:
        hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"GGUF version {version}{hint} is not supported, only 2 and 3")
    n_tensors, n_values = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = cursor.text()
        metadata[key] = _read_value(cursor, cursor.take("I"))
    tensors = [_read_tensor(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment={alignment!r} is not a positive number")
    data_offset = -(-cursor.position // alignment) * alignment
    end = max((t.offset for t in tensors), default=0)
    if tensors and data_offset + end >= file_size:
        raise ValueError(f"it is cut short: tensor data starts at byte {data_offset + end}, the file has {file_size}")
    return GgufHeader(file, metadata, tensors, data_offset)
