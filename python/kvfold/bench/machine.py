"""What a measurement ran on: machine, build, source."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .. import _runtime
from ..devices import gpus
from ..memory import usable_memory
from ..threads import cpu_quota, default_threads


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """Commit of the source tree that the package runs from, or was built from, with ``+`` if it had changes."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        if git("ls-files", __file__):
            return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    return str(_runtime.load().build_info().get("commit", ""))


def describe() -> dict[str, Any]:
    """Everything a reader needs to judge numbers; no names of people or hosts."""
    core = _runtime.load()
    build = core.build_info()
    return {
        "cpu": _processor(),
        "cores": default_threads(),
        "logical_cpus": os.cpu_count(),
        "cpu_quota": cpu_quota(),
        "memory_bytes": usable_memory(),
        "gpus": [{"name": d.name, "description": d.description, "bytes": d.total} for d in gpus()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvfold": build.get("version"),
        "llama_cpp": build.get("llama_cpp_python"),
        "compiler": build.get("compiler"),
        "backends": build.get("backends"),
        "commit": commit(),
    }
