"""Entry points of llama-server and its companions: start the program that is installed with the package."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from .threads import set_waiting


def package_dir() -> Path:
    """The directory that holds `_core`, `lib` and `bin` (in an editable install it is not that of the Python files)."""
    spec = importlib.util.find_spec("kvfold._core")
    return Path(spec.origin).parent if spec and spec.origin else Path(__file__).resolve().parent


def run(name: str) -> NoReturn:
    """Replace this process by the program `name`, with this process's arguments."""
    program = package_dir() / "bin" / name
    if not os.access(program, os.X_OK):
        sys.exit(f"{name}: '{program}' is missing; this installation of kvfold is incomplete, install it again")
    set_waiting(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [str(program), *sys.argv[1:]])


def server() -> NoReturn:
    """Run llama-server."""
    run("llama-server")


def cli() -> NoReturn:
    """Run llama-cli."""
    run("llama-cli")


def bench() -> NoReturn:
    """Run llama-bench."""
    run("llama-bench")


def perplexity() -> NoReturn:
    """Run llama-perplexity."""
    run("llama-perplexity")


def quantize() -> NoReturn:
    """Run llama-quantize."""
    run("llama-quantize")
