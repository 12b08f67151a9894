"""Listens to llama.cpp's log: keeps the reasons of failures and the sizes it announces, prints only when verbose."""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp
from llama_cpp import _logger

# Numbers of ``enum ggml_log_level``. (llama_cpp's own table is off by one for them.)
_INFO = 2
_ERROR = 4
_CONTINUED = 5

_FUNCTION_PREFIX = re.compile(r"^(?:[A-Za-z_][\w:~]*: )+")


class LogRecorder:
    """Collects log lines of one stretch of work."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.infos: list[str] = []

    def reason(self) -> str:
        """The first error line that says more than that something failed, without function names."""
        lines = [_FUNCTION_PREFIX.sub("", line).strip() for line in self.errors]
        lines = [line for line in lines if line]
        told = [line for line in lines if not re.match(r"^(failed to|error:? )?(load|initialize) (the )?\w+$", line)]
        return (told or lines or [""])[0]


_recorders: list[LogRecorder] = []
_recorders_lock = threading.Lock()
_last_level = threading.local()
#: Recent errors of the running process, for failures outside of any recorded stretch.
recent_errors: deque[str] = deque(maxlen=8)


@contextmanager
def recording() -> Iterator[LogRecorder]:
    """Record what llama.cpp logs inside the block (by any thread: loading uses several)."""
    recorder = LogRecorder()
    with _recorders_lock:
        _recorders.append(recorder)
    try:
        yield recorder
    finally:
        with _recorders_lock:
            _recorders.remove(recorder)


@contextmanager
def quiet() -> Iterator[None]:
    """Print nothing of what llama.cpp logs inside the block (recorders still hear it)."""
    before = _logger.logger.level
    _logger.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _logger.logger.setLevel(before)


def _receive(level: int, text: bytes, _user_data: object) -> None:
    line = text.decode("utf-8", errors="replace")
    effective = getattr(_last_level, "value", _INFO) if level == _CONTINUED else level
    _last_level.value = effective
    if effective == _ERROR:
        recent_errors.append(line)
        for recorder in list(_recorders):
            recorder.errors.append(line)
    elif effective == _INFO:
        for recorder in list(_recorders):
            recorder.infos.append(line)
    if _logger.logger.level <= logging.DEBUG:
        print(line, end="", flush=True, file=sys.stderr)


_callback = llama_cpp.llama_log_callback(_receive)
llama_cpp.llama_log_set(_callback, ctypes.c_void_p(0))
