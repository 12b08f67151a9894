"""The compiled module: configuration scope, statistics of a context, and build information."""

from typing import Any

def version() -> str:
    """Version of the compiled runtime."""

def build_info() -> dict[str, Any]:
    """How the runtime was built: pinned llama.cpp, compiler, instruction sets, backends."""

def scope_push(settings: dict[str, Any]) -> None:
    """Use these settings for contexts created by this thread until ``scope_pop``.

    Keys: ``kv_type`` (str), ``group``, ``tail``, ``sinks`` (int), ``swa_type`` (str). Raises ``ValueError``.
    """

def scope_pop() -> None:
    """Undo this thread's last ``scope_push``."""

def last_error() -> str:
    """This thread's last error message of the kvfold runtime, an empty string if there was none; reading clears it."""

def context_stats(ctx: int) -> dict[str, Any] | None:
    """What the cache of the ``llama_context`` at this address holds; ``None`` if it is not a kvfold cache.

    Keys: ``kv_type``, ``group``, ``tail``, ``sinks``, ``bytes``, ``f16_bytes``, ``near_bytes``, ``far_bytes``,
    ``side_bytes``, ``swa_bytes``, ``n_cells``, ``tokens``, ``near_tokens``, ``folded_tokens``, ``folds``, ``backend``.
    """
