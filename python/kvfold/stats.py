"""``llm.kv``: what the cache of a context really allocates and what happened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Alignment:
    """What look-ups find of the attention of one query head, over the tokens that looked up since the last clear.

    Exact attention is the softmax over everything that a token sees. What it reads has a share of that, and the softmax
    over what is read has a divergence (Kullback-Leibler, in nats) of ``-log(share)`` from it.

    Attributes:
        layer: of the model.
        head: query head.
        tokens: that looked up.
        recalled: mean share.
        divergence: mean.
        largest: the largest divergence of a token.
        read: share of the groups that look-ups of the layer saw; 0 where it chooses none itself.
    """

    layer: int
    head: int
    tokens: int
    recalled: float
    divergence: float
    largest: float
    read: float


@dataclass(frozen=True)
class PartAlignment:
    """What a layer's attention in a part of the text would miss after ``KvStats.compact``, all heads together.

    Without the dropped tokens attention has a share of what it has with them, and diverges from it by ``-log(share)``.

    Attributes:
        layer: of the model.
        start, stop: positions of the part, ``stop`` not included.
        recalled: mean share.
        divergence: mean, Kullback-Leibler, in nats.
        largest: the largest divergence of a token and head.
    """

    layer: int
    start: int
    stop: int
    recalled: float
    divergence: float
    largest: float


class KvStats:
    """Live view of one context's key/value cache; every attribute is read from the runtime when it is asked for.

    Sizes are in bytes and count everything: rows, scales, summaries, near tier, sliding-window layers, maps.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, Any]],
        alignment: Callable[[], Iterable[tuple[Any, ...]]] = tuple,
        compact: Callable[[float, bool], Any] | None = None,
    ) -> None:
        self._read = read
        self._alignment = alignment
        self._compact = compact

    def _get(self, key: str) -> Any:
        return self._read()[key]

    @property
    def kv_type(self) -> str:
        """The kv type in use."""
        return str(self._get("kv_type"))

    @property
    def bytes(self) -> int:
        """Allocated cache size."""
        return int(self._get("bytes"))

    @property
    def f16_bytes(self) -> int:
        """What an f16 cache of the same context would take."""
        return int(self._get("f16_bytes"))

    @property
    def ratio(self) -> float:
        """``bytes / f16_bytes``."""
        values = self._read()
        f16 = int(values["f16_bytes"])
        return int(values["bytes"]) / f16 if f16 else 1.0

    @property
    def near_bytes(self) -> int:
        """Size of the near tier, which holds exact rows."""
        return int(self._get("near_bytes"))

    @property
    def backend(self) -> str:
        """Where attention over the cache runs."""
        return str(self._get("backend"))

    @property
    def tokens(self) -> int:
        """Tokens in the cache, all sequences together."""
        return int(self._get("tokens"))

    @property
    def folded_tokens(self) -> int:
        """Tokens whose exact copy has been released."""
        return int(self._get("folded_tokens"))

    @property
    def evicted_tokens(self) -> int:
        """Tokens dropped for good, since the context was made."""
        return int(self._read().get("evicted_tokens", 0))

    @property
    def lookup_share(self) -> float:
        """Share of the folded groups that look-ups read, of those they saw; 1.0 while nothing has been looked up."""
        return float(self._read().get("lookup_share", 1.0))

    @property
    def dense_fallbacks(self) -> int:
        """Decode steps that had to read everything although they were to look up."""
        return int(self._read().get("dense_fallbacks", 0))

    def alignment(self) -> list[Alignment]:
        """How much of the attention look-ups find, by layer and head.

        Raises:
            ValueError: the model was not opened with ``kv_alignment=True``, or no layer looks up on the CPU.
        """
        rows = [Alignment(*row) for row in self._alignment()]
        if not rows:
            raise ValueError("alignment is measured with kv_alignment=True and kv_type='fp4_csa2', on the CPU")
        return rows

    def compact(self, keep: float = 0.5) -> int:
        """Drop what the text in the context can do without, down to a share of its tokens, to ask it often afterwards.

        The text is read a second time; groups of tokens go first that get little attention from the second reading
        (Kim et al., *KVzip*, 2025) and whose keys are like the others', both compared with the text around. That takes
        as long as the first reading. What stays in any case: the first tokens, the exact tail, pinned ranges. The
        context goes on as before, in fewer cells: nothing is freed for others.

        Args:
            keep: share of the tokens that is kept, above 0 and up to 1; what was dropped before counts as dropped.

        Returns:
            Number of tokens that were dropped.

        Raises:
            ValueError: an impossible share, an empty context, a cache that is not kvfold's, or one
                without room for the second reading.
            RuntimeError: another thread uses this object.
            KeyboardInterrupt: Ctrl-C; all of it was done then, or nothing.
        """
        return int(self._compacted(keep, False))

    def compact_alignment(self, keep: float = 0.5) -> list[PartAlignment]:
        """What ``compact`` would miss, by part of the text (up to 512 tokens) and layer; nothing is dropped.

        The text is read a second time to choose what would go, and a third time to see who attends to it.

        Raises:
            ValueError, RuntimeError, KeyboardInterrupt: as ``compact``.
        """
        return [PartAlignment(*row) for row in self._compacted(keep, True)]

    def _compacted(self, keep: float, report: bool) -> Any:
        if self._compact is None:
            raise ValueError("compact: this cache cannot be compacted")
        return self._compact(keep, report)

    def to_dict(self) -> dict[str, Any]:
        """All of the above, and the runtime's further counters, at one moment."""
        values = dict(self._read())
        f16 = int(values["f16_bytes"])
        values["ratio"] = int(values["bytes"]) / f16 if f16 else 1.0
        values.setdefault("evicted_tokens", 0)
        values.setdefault("lookup_share", 1.0)
        values.setdefault("dense_fallbacks", 0)
        return values

    def __str__(self) -> str:
        v = self.to_dict()
        return (
            f"kv {v['kv_type']}: {v['bytes'] / _MIB:.1f} MiB, f16 would be {v['f16_bytes'] / _MIB:.1f} "
            f"({100 * v['ratio']:.1f} %); near {v['near_bytes'] / _MIB:.1f} MiB; attention on {v['backend']}; "
            f"{v['tokens']} tokens, {v['folded_tokens']} folded"
        )

    def __repr__(self) -> str:
        return f"<KvStats {self}>"
