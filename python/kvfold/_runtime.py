"""Finds kvfold's build of the llama.cpp libraries and makes ``llama_cpp`` use exactly that one.

``llama_cpp`` loads its library once, when it is imported, from ``LLAMA_CPP_LIB_PATH``. A second libllama in the same
process would have settings and caches of its own, so every way to end up with one is an error that says what to do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from .threads import set_waiting

#: The one version of ``llama-cpp-python`` whose source the runtime is built from.
LLAMA_CPP_PYTHON_VERSION = "0.3.36"

_LIB_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"
_LIB_DIR_OVERRIDE = "KVFOLD_LIB_DIR"

_lock = threading.Lock()
_loaded: ModuleType | None = None


def _library_name() -> str:
    if sys.platform == "win32":
        return "llama.dll"
    if sys.platform == "darwin":
        return "libllama.dylib"
    return "libllama.so"


def find_lib_dir() -> Path | None:
    """The directory that holds kvfold's libllama, or ``None``.

    ``KVFOLD_LIB_DIR`` comes first (development builds), then ``lib`` beside the compiled module, then beside this file
    (the two differ in editable installs).
    """
    override = os.environ.get(_LIB_DIR_OVERRIDE)
    if override:
        return Path(override)
    candidates = [Path(__file__).parent / "lib"]
    try:
        spec = importlib.util.find_spec("kvfold._core")
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin:
        candidates.insert(0, Path(spec.origin).parent / "lib")
    return next((d for d in candidates if (d / _library_name()).exists()), None)


def prepare_environment() -> None:
    """Set what must be in the environment before ``llama_cpp`` and OpenMP are loaded; never overrides the user."""
    set_waiting(os.environ)
    lib_dir = find_lib_dir()
    if lib_dir is not None and "llama_cpp" not in sys.modules:
        os.environ.setdefault(_LIB_PATH_VARIABLE, str(lib_dir))


def _require_lib_dir() -> Path:
    lib_dir = find_lib_dir()
    if lib_dir is None:
        raise ImportError(
            "kvfold's llama.cpp libraries are missing from this installation; install kvfold again with pip "
            f"(a C++ compiler is needed), or point {_LIB_DIR_OVERRIDE} at a build"
        )
    if not (lib_dir / _library_name()).exists():
        raise ImportError(f"{_LIB_DIR_OVERRIDE}={str(lib_dir)!r} holds no {_library_name()}")
    return lib_dir


def _check_no_other_library(lib_dir: Path) -> None:
    """Before ``llama_cpp`` is loaded: the path it will take, or has taken, must be ours."""
    module = sys.modules.get("llama_cpp")
    if module is not None:
        native = sys.modules.get("llama_cpp.llama_cpp")
        used = getattr(getattr(native, "_lib", None), "_name", "an unknown place")
        if not _same_file(used, lib_dir / _library_name()):
            raise ImportError(
                f"llama_cpp is already loaded from {used}, kvfold needs {lib_dir / _library_name()}; "
                "import kvfold before llama_cpp"
            )
        return
    configured = os.environ.get(_LIB_PATH_VARIABLE)
    if configured and not _same_file(configured, lib_dir):
        raise ImportError(
            f"{_LIB_PATH_VARIABLE}={configured!r} points at another llama.cpp, kvfold needs {str(lib_dir)!r}; unset it"
        )


def _same_file(a: str | Path, b: str | Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _check_versions(llama_cpp: ModuleType, core: ModuleType) -> None:
    found = getattr(llama_cpp, "__version__", "unknown")
    if found != LLAMA_CPP_PYTHON_VERSION:
        raise ImportError(
            f"kvfold is built on llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}, but {found} is installed; "
            f"pip install 'llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}'"
        )
    native: Any = sys.modules["llama_cpp.llama_cpp"]
    if not hasattr(native._lib, "kvfold_version"):
        raise ImportError(f"{native._lib._name} is not kvfold's build of llama.cpp (no kvfold_version in it)")
    package = package_version()
    runtime = core.build_info()["version"]
    if package != "unknown" and runtime != package:
        raise ImportError(f"the compiled runtime is version {runtime}, the Python package {package}; install again")


def _check_single_copy() -> None:
    """After loading: one libllama in this process (Linux can tell)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(None, 5)[5].strip() for line in maps if "libllama.so" in line}
    except OSError:
        return
    copies = {os.path.realpath(p) for p in paths}
    if len(copies) > 1:
        raise ImportError(f"two copies of libllama are loaded: {', '.join(sorted(copies))}; only kvfold's may be")


def load() -> ModuleType:
    """Load ``llama_cpp`` on kvfold's libraries, once; returns the compiled module ``kvfold._core``.

    Raises:
        ImportError: libraries missing, another llama.cpp loaded or configured, or versions that do not match.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            lib_dir = _require_lib_dir()
            _check_no_other_library(lib_dir)
            prepare_environment()
            import llama_cpp

            from kvfold import _core

            _check_versions(llama_cpp, _core)
            _check_single_copy()
            _loaded = _core
        return _loaded


def package_version() -> str:
    """Version of the installed package, ``unknown`` when run from an uninstalled source tree."""
    try:
        return importlib.metadata.version("kvfold")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
