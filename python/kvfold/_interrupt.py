"""Ctrl-C during long native calls.

Python runs signal handlers only between bytecodes, so one that arrives inside a native call waits for it to return:
many seconds in a long prefill. Here llama.cpp's abort callback, which is Python and runs on the calling thread between
graph nodes, lets the handler run and can stop the graph.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

import llama_cpp

#: A batch that ends within this time after Ctrl-C is finished rather than aborted, which keeps what is in the cache.
GRACE_SECONDS = 0.7


class Interruptible:
    """Inside the block Ctrl-C sets ``requested`` instead of raising, and stops native work that takes long.

    Does nothing outside of the main thread, or where the program has a SIGINT handler of its own.
    """

    def __init__(self, ctx: int) -> None:
        self._ctx = ctx
        self._since: float | None = None
        self._active = False

    @property
    def requested(self) -> bool:
        """Whether Ctrl-C was pressed inside the block."""
        return self._since is not None

    def __enter__(self) -> Interruptible:
        main = threading.current_thread() is threading.main_thread()
        self._active = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._active:
            self._callback = llama_cpp.ggml_abort_callback(self._should_abort)
            signal.signal(signal.SIGINT, self._on_signal)
            llama_cpp.llama_set_abort_callback(self._ctx, self._callback, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._active:
            llama_cpp.llama_set_abort_callback(self._ctx, llama_cpp.ggml_abort_callback(), None)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def _should_abort(self, _data: object) -> bool:
        return self._since is not None and time.monotonic() - self._since > GRACE_SECONDS
