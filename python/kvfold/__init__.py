"""kvfold: llama.cpp with a folded FP4 key/value cache.

>>> from kvfold import Llama
>>> llm = Llama("model.gguf", n_ctx=8192, kv_type="fp4_csa2")
>>> llm.kv.ratio

``Llama`` and ``KvStats`` load the compiled runtime on first use; everything else is plain Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _runtime
from .config import KvConfig

if TYPE_CHECKING:
    from .llama import Llama
    from .stats import KvStats

__all__ = ["KvConfig", "KvStats", "Llama", "__version__"]

__version__ = _runtime.package_version()

_runtime.prepare_environment()


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from .llama import Llama

        return Llama
    if name == "KvStats":
        from .stats import KvStats

        return KvStats
    raise AttributeError(f"module 'kvfold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
