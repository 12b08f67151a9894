"""Keeps two threads from using one ``Llama`` at the same time: the second one gets a clear error, never a crash."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_IN_USE = "this Llama is in use by another thread; use one object per thread, or a lock of your own"


class Turn:
    """One generation, from its first token to its end; it may be suspended between tokens."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = weakref.ref(thread)
        self.superseded = False

    def belongs_to(self, thread: threading.Thread) -> bool:
        return self._thread() is thread

    def adopt(self, thread: threading.Thread) -> None:
        """Streams may be continued by another thread, as web servers with thread pools do."""
        self._thread = weakref.ref(thread)

    def abandoned(self) -> bool:
        owner = self._thread()
        return owner is None or not owner.is_alive()


class Gate:
    """Admits one thread at a time to an object.

    * Native calls hold a re-entrant lock; a second thread does not wait for it but raises.
    * A generation is a *turn*. While a turn is open, other threads cannot start one. The thread that owns it can: the
      old one is then superseded and raises if it is continued, instead of going on with another prompt's cache.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turn: weakref.ref[Turn] | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Exclusive use for the length of the block.

        Raises:
            RuntimeError: another thread is inside, or has a stream open.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(_IN_USE)
        try:
            self._refuse_foreign_turn()
            yield
        finally:
            self._lock.release()

    def begin(self) -> Turn:
        """Open a turn for the calling thread; supersedes its own open turn.

        Raises:
            RuntimeError: another thread is inside, or has a turn open.
        """
        with self.hold():
            open_turn = self._open_turn()
            if open_turn is not None:
                open_turn.superseded = True
            turn = Turn(threading.current_thread())
            self._turn = weakref.ref(turn)
            return turn

    @contextmanager
    def step(self, turn: Turn) -> Iterator[None]:
        """Exclusive use for the next token of ``turn``.

        Raises:
            RuntimeError: another thread is inside, or a later generation has taken over the cache.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(_IN_USE)
        try:
            if turn.superseded:
                raise RuntimeError("this stream was ended by a later call on the same Llama")
            turn.adopt(threading.current_thread())
            yield
        finally:
            self._lock.release()

    def end(self, turn: Turn) -> None:
        """Close ``turn``; harmless if it was superseded."""
        if self._open_turn() is turn:
            self._turn = None

    def _open_turn(self) -> Turn | None:
        turn = self._turn() if self._turn is not None else None
        return None if turn is None or turn.superseded or turn.abandoned() else turn

    def _refuse_foreign_turn(self) -> None:
        turn = self._open_turn()
        if turn is not None and not turn.belongs_to(threading.current_thread()):
            raise RuntimeError("this Llama is generating for another thread; close that stream first")
