"""GGUF files with the header of a real model and no weights: a hole in the file stands for them, which reads as zeros.

They take no room on the disk, load like the real thing, and have its sizes.

    python tests/sparse_models.py llama-8b OUT.gguf
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import synth_gguf

SHAPES = {name: synth_gguf.SHAPES[name] for name in ("llama-8b", "qwen3-4b", "gemma3-4b")}


def write(path: Path, name: str, layers: int | None = None) -> Path:
    """Write the header of a model (all layers, or the first few) with matrices in Q4_0, and a hole behind it."""
    shape = SHAPES[name]
    shape = shape._replace(layers=layers or shape.layers)
    writer = gguf.GGUFWriter(path, shape.arch)
    synth_gguf.describe(writer, shape)
    size = 0
    for tensor, axes in synth_gguf.tensors(shape):
        values = math.prod(axes)
        vector = len(axes) == 1
        bytes_ = values * 4 if vector else values // 32 * 18
        kind = gguf.GGMLQuantizationType.F32 if vector else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor_info(tensor, axes, "float32", bytes_, raw_dtype=kind)
        size += -(-bytes_ // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with open(path, "r+b") as file:
        file.truncate(start + size)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: sparse_models.py {'|'.join(SHAPES)} OUT.gguf")
    write(Path(sys.argv[2]), sys.argv[1])
