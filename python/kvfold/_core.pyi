"""The compiled module: configuration scope, statistics of a context, codecs, operations, and build information."""

from typing import Any

import numpy as np
import numpy.typing as npt

SRC_HIDDEN: int
SRC_FAR: int
SRC_CURRENT_BASE: int

def version() -> str:
    """Version of the compiled runtime."""

def build_info() -> dict[str, Any]:
    """How the runtime was built: pinned llama.cpp, compiler, instruction sets, backends."""

def scope_push(settings: dict[str, Any]) -> None:
    """Use these settings for contexts created by this thread until ``scope_pop``.

    Keys: ``kv_type`` (str), ``group``, ``tail``, ``sinks`` (int), ``swa_type`` (str), ``scale_group`` (int), and for
    look-ups ``lookup`` ("0.1,0.2"), ``threshold``, ``min_tokens``, ``max_tokens``, ``min_context``, ``layers``,
    ``calibration``, ``hierarchical`` (str), ``span_pool``, for evictions ``keep`` and ``score`` (str). Raises
    ``ValueError``.
    """

def scope_pop() -> None:
    """Undo this thread's last ``scope_push``."""

def check_config(settings: dict[str, Any]) -> None:
    """Raises ``ValueError`` for settings that ``scope_push`` would refuse."""

def last_error() -> str:
    """Why the last kvfold call on this thread failed, an empty string if none did."""

def alignment(ctx: int) -> list[tuple[int, int, int, float, float, float, float]]:
    """What look-ups find of the attention.

    Tuples: layer, head, tokens, mean share found, mean and largest divergence, share of the groups that are read.
    """

def model_fingerprint(model: int) -> int:
    """A number that two models (``llama_model`` at this address) share only by being the same model; never 0."""

def context_stats(ctx: int) -> dict[str, Any] | None:
    """What the cache of the ``llama_context`` at this address holds; ``None`` if it is not a kvfold cache.

    Keys: ``kv_type``, ``group``, ``tail``, ``sinks``, ``swa_type``, ``scale_group``, ``bytes``, ``f16_bytes``,
    ``near_bytes``, ``far_bytes``, ``side_bytes``, ``swa_bytes``, ``n_cells``, ``tokens``, ``near_tokens``,
    ``folded_tokens``, ``folds``, ``backend``, ``lookup_visible``, ``lookup_read``, ``lookup_share``, ``lookup_steps``,
    ``dense_fallbacks``; with look-up also its settings.
    """

def memory_breakdown(ctx: int) -> list[dict[str, Any]]:
    """Memory of the ``llama_context`` at this address, one dict per buffer type.

    Keys: ``buffer``, ``device`` (names), ``host`` (bool), and the bytes of weights (``model``), caches (``context``)
    and scratch (``compute``). Of a model loaded with ``no_alloc``: what would be allocated.
    """

def fp4_encode(x: npt.NDArray[np.float32], *, scale_group: int = 16) -> npt.NDArray[np.uint8]:
    """FP4 rows of f32 rows, a scale for every 16, 32 or 64 channels; the last axis is a multiple of 64 channels."""

def fp4_decode(data: npt.NDArray[np.uint8], *, scale_group: int = 16) -> npt.NDArray[np.float32]:
    """The f32 rows that FP4 rows stand for."""

def fp4_scales() -> npt.NDArray[np.float32]:
    """The value of every scale byte."""

def fp4_values() -> npt.NDArray[np.float32]:
    """The value of every 4-bit code."""

def side_bytes(n_head_kv: int, head_dim: int, n_groups: int) -> int:
    """Size of one layer's summaries and spreads."""

def rotate(x: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.float32]:
    """Rows in the basis of the cache: every ``n`` channels (64, 128, 256) by the Hadamard matrix; its own inverse."""

def kv_store(
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cur_k: npt.NDArray[Any],
    cur_v: npt.NDArray[Any],
    dst: npt.NDArray[Any],
    *,
    rotation: tuple[int, int] = (0, 0),
    n_threads: int = 1,
) -> None:
    """The operation ``kv_store`` on arrays, in place. ``rotation``: sizes for keys and values, 0 for none."""

def kv_fold(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cur_k: npt.NDArray[Any],
    cur_v: npt.NDArray[Any],
    plan: npt.NDArray[Any],
    *,
    group: int,
    rotation: tuple[int, int] = (0, 0),
    n_threads: int = 1,
) -> None:
    """The operation ``kv_fold`` on arrays, in place."""

def kv_attend(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cur_k: npt.NDArray[Any],
    cur_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    q: npt.NDArray[Any],
    mask: npt.NDArray[Any] | None = None,
    sinks: npt.NDArray[Any] | None = None,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    rotation: tuple[int, int] = (0, 0),
    n_threads: int = 1,
) -> npt.NDArray[np.float32]:
    """The operation ``kv_attend`` on arrays."""

def kv_select(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    q: npt.NDArray[Any],
    mask: npt.NDArray[Any] | None = None,
    pool: npt.NDArray[Any] | None = None,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    rotation: tuple[int, int] = (0, 0),
    lookup: tuple[float, float] = (0.1, 0.2),
    threshold: float = 0.1,
    min_tokens: int = 0,
    max_tokens: int = 0,
    ready: npt.NDArray[Any] | None = None,
    most_spans: int = 1,
    capacity: int | None = None,
    n_threads: int = 1,
) -> tuple[npt.NDArray[np.int32], int, int, npt.NDArray[np.float32]]:
    """The operation ``kv_select`` on arrays: lists, groups seen, groups taken, log of the unread attention."""

def kv_align(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cur_k: npt.NDArray[Any],
    cur_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    q: npt.NDArray[Any],
    selected: npt.NDArray[Any],
    mask: npt.NDArray[Any] | None = None,
    sinks: npt.NDArray[Any] | None = None,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    rotation: tuple[int, int] = (0, 0),
    n_threads: int = 1,
) -> npt.NDArray[np.float64]:
    """The operation ``kv_align`` on arrays."""

def kv_attend_sparse(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cur_k: npt.NDArray[Any],
    cur_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    q: npt.NDArray[Any],
    selected: npt.NDArray[Any],
    mask: npt.NDArray[Any] | None = None,
    sinks: npt.NDArray[Any] | None = None,
    unread: npt.NDArray[Any] | None = None,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    rotation: tuple[int, int] = (0, 0),
    n_threads: int = 1,
) -> npt.NDArray[np.float32]:
    """The operation ``kv_attend_sparse`` on arrays."""

def kv_score(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    queries: npt.NDArray[Any] | None = None,
    before: npt.NDArray[Any] | None = None,
    *,
    group: int,
    n_head: int,
    scale: float = 1.0,
    softcap: float = 0.0,
    n_threads: int = 1,
) -> npt.NDArray[np.float32]:
    """The operation ``kv_score`` on arrays: novelty, size and attention of each cell."""

def kv_receive(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cur_k: npt.NDArray[Any],
    cur_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    q: npt.NDArray[Any],
    mask: npt.NDArray[Any] | None = None,
    sinks: npt.NDArray[Any] | None = None,
    dropped: npt.NDArray[Any] | None = None,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    rotation: tuple[int, int] = (0, 0),
    n_threads: int = 1,
) -> npt.NDArray[Any]:
    """The operation ``kv_receive`` on arrays: each far cell's largest attention weight by KV head; or ``kv_lose``."""

def order_by_need(received: npt.NDArray[Any], novelty: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The order in which groups of a text go when it is compacted, the least needed first."""

def kv_sample(
    q: npt.NDArray[Any], samples: npt.NDArray[Any], *, score: str, rotation: int = 0, n_threads: int = 1
) -> None:
    """The operation ``kv_sample`` on arrays: keeps some of the queries, in place."""

def kv_sampled(
    far_k: npt.NDArray[Any],
    far_v: npt.NDArray[Any],
    side: npt.NDArray[Any],
    near_k: npt.NDArray[Any],
    near_v: npt.NDArray[Any],
    cell_src: npt.NDArray[Any],
    age: npt.NDArray[Any],
    samples: npt.NDArray[Any],
    *,
    score: str,
    group: int,
    scale: float = 1.0,
    softcap: float = 0.0,
    n_threads: int = 1,
) -> npt.NDArray[np.float32]:
    """The operation ``kv_sampled`` on arrays: how much attention sampled queries give to each far cell."""

def kv_observe(q: npt.NDArray[Any], queries: npt.NDArray[Any], *, rotation: int = 0, n_threads: int = 1) -> None:
    """The operation ``kv_observe`` on arrays: adds queries to statistics, in place."""

def prefix_usable(ctx: int, seq: int, n_pos: int) -> bool:
    """Whether the first positions of a sequence can stand for a text of that length (``kvfold_prefix_usable``)."""

def evicted(ctx: int, seq: int, n_pos: int) -> int:
    """Positions below ``n_pos`` that eviction has taken from a sequence."""

def pin(ctx: int, seq: int, start: int, stop: int) -> None:
    """Never evict a range of positions; an empty one forgets all pins of the sequence. Raises ``ValueError``."""

def compact_alignment(
    ctx: int, seq: int, tokens: list[int], keep: float
) -> list[tuple[int, int, int, float, float, float]]:
    """What that would miss, by part of the text and layer (``kvfold_part_alignment``)."""

def compact(ctx: int, seq: int, tokens: list[int], keep: float) -> int:
    """Drop what a sequence's tokens can do without when they are read again (``kvfold_compact``): how many went."""
