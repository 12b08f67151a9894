"""Progress on stderr: a bar with ``rich`` (extra ``tools``) on a terminal, else a line per step; silent when asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Reports that ``done`` of ``total`` steps of the current task are done.
Advance = Callable[[float], None]


class Progress:
    """``with progress.task("text", total) as advance: advance(1)``."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._rich: Any = None
        if not quiet and sys.stderr.isatty():
            try:
                self._rich = importlib.import_module("rich.progress")
                self._console = importlib.import_module("rich.console").Console(stderr=True)
            except ImportError:
                self._rich = None

    @contextmanager
    def task(self, name: str, total: float) -> Iterator[Advance]:
        """A task of ``total`` steps."""
        if self._rich is not None:
            with self._rich.Progress(console=self._console, transient=True) as bars:
                task = bars.add_task(name, total=total)
                yield lambda steps: bars.advance(task, steps)
            return
        if not self._quiet:
            print(f"{name} ...", file=sys.stderr, flush=True)
        yield lambda _steps: None
