"""Which devices the runtime sees, and how much memory is free there and in the machine."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _runtime
from .memory import usable_memory
from .threads import cgroup_directories

# Numbers of ``enum ggml_backend_dev_type``.
_GPU_TYPES = (1, 2)


@dataclass(frozen=True)
class Device:
    """A GPU: its name in the runtime (``CUDA0``), what it is, and its memory in bytes.

    ``source`` says who was asked for the free memory: ``driver`` (NVML) or ``runtime`` (ggml).
    """

    name: str
    description: str
    free: int
    total: int
    source: str


class _Props(ctypes.Structure):
    """``struct ggml_backend_dev_props``; the capabilities behind it are not looked at."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_ubyte * 64),
    )


def _library() -> Any:
    _runtime.load()
    # libllama depends on ggml's libraries: their functions are found through it.
    library = sys.modules["llama_cpp.llama_cpp"]._lib
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    library.ggml_backend_dev_get_props.restype = None
    library.ggml_backend_dev_get_props.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Props)]
    return library


def nvml() -> Any | None:
    """The driver's management library (package ``nvidia-ml-py``), initialised; ``None`` without package or driver."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        module.nvmlInit()
    except module.NVMLError:
        return None
    return module


def _driver_memory(pci_id: str | None) -> tuple[int, int] | None:
    """Free and total bytes of the NVIDIA GPU at a PCI address, as its driver says."""
    module = nvml() if pci_id else None
    if module is None:
        return None
    with contextlib.suppress(module.NVMLError):
        info = module.nvmlDeviceGetMemoryInfo(module.nvmlDeviceGetHandleByPciBusId(str(pci_id).encode()))
        return int(info.free), int(info.total)
    return None


def gpus() -> list[Device]:
    """The GPUs that this build of the runtime can use; an empty list for a CPU build."""
    library = _library()
    found = []
    for index in range(library.ggml_backend_dev_count()):
        props = _Props()
        library.ggml_backend_dev_get_props(library.ggml_backend_dev_get(index), ctypes.byref(props))
        if props.type not in _GPU_TYPES:
            continue
        pci_id = props.device_id.decode() if props.device_id else None
        told = _driver_memory(pci_id)
        free, total = told or (int(props.memory_free), int(props.memory_total))
        description = (props.description or b"").decode(errors="replace")
        found.append(Device(props.name.decode(), description, free, total, "driver" if told else "runtime"))
    return found


def free_memory() -> int | None:
    """Memory of the machine that can be had without swapping, within the control group; ``None`` if unknown."""
    available: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if available is None:
        return usable_memory()
    for directory in cgroup_directories(""):
        with contextlib.suppress(OSError, ValueError):
            limit = int((directory / "memory.max").read_text())
            used = int((directory / "memory.current").read_text())
            available = min(available, max(limit - used, 0) + _reclaimable(directory))
    return available


def _reclaimable(directory: Path) -> int:
    """File pages that count as used in a control group and go when memory is needed."""
    for line in (directory / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
