"""A guard against contexts that no memory holds: the kernel would kill the process, or its neighbours."""

from __future__ import annotations

import os
from pathlib import Path

from .gguf_header import GgufHeader
from .model_check import head_sizes
from .threads import cgroup_directories

# Bits per value that a cache type takes at the very least, everything else left out.
_LEAST_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0}
_FOLDED_BITS = 4.125  # with the largest kv_scale_group


def usable_memory() -> int | None:
    """Physical memory of the machine, or the limit of the process's control group; ``None`` if unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    limits = [total]
    for directory in cgroup_directories(""):
        try:
            limits.append(int((directory / "memory.max").read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def least_cache_bytes(header: GgufHeader, n_ctx: int, kv_type: str) -> int:
    """A lower bound of the cache size; 0 for models whose layers do not all keep the whole context."""
    if header.arch("attention.sliding_window"):
        return 0
    kv_heads = header.arch("attention.head_count_kv") or header.arch("attention.head_count") or 0
    layers = int(header.arch("block_count") or 0)
    heads = sum(int(n) for n in kv_heads) if isinstance(kv_heads, list) else int(kv_heads) * layers
    if any(key.startswith(f"{header.architecture}.ssm.") for key in header.metadata):
        heads = 0
    bits = _LEAST_BITS.get(kv_type, _FOLDED_BITS)
    return int(heads * sum(head_sizes(header)) * n_ctx * bits / 8)


def require_memory(header: GgufHeader, n_ctx: int, kv_type: str) -> None:
    """Refuse a context whose cache alone is larger than all memory.

    Raises:
        ValueError: naming the context, what it needs and what there is.
    """
    have = usable_memory()
    length = n_ctx or int(header.arch("context_length") or 0)
    need = least_cache_bytes(header, length, kv_type)
    if have is not None and need > have:
        raise ValueError(
            f"n_ctx={n_ctx}: with kv_type={kv_type!r} the cache of {Path(header.path).name} takes at least "
            f"{need / 2**30:.1f} GiB, this machine has {have / 2**30:.1f}"
        )
