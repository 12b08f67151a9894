"""What the contract tests have in common: the caches under test, texts, tolerances.

Everything is shrunk: with a tail of about ten tokens and groups of 2 to 16 a text of 300 tokens is long, and most of it
is folded, cut through and folded again within a second.
"""

from __future__ import annotations

import numpy as np

#: Configuration of each tested cache: kv type and settings.
CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "f16": ("f16", {}),
    "fp4": ("fp4", {"group": 16, "tail": 10, "sinks": 4}),
    "fp4_csa2": ("fp4_csa2", {"group": 4, "tail": 10, "sinks": 4}),
}
FOLDED = [name for name in CONFIGS if name != "f16"]

#: Default settings, for tests of sizes.
DEFAULTS: dict[str, tuple[str, dict[str, int]]] = {f"default-{name}": (name, {}) for name in FOLDED}


def text(seed: int, n: int, n_vocab: int = 256) -> list[int]:
    """``n`` random token ids; the tiny models make as much sense of them as of anything."""
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def allowed(own: float) -> float:
    """Largest acceptable KL divergence to f16 where upstream's q4_0 cache, doing the same, has ``own``.

    q4_0 takes 4.5 bits for keys and values and has no exact rows, so a kvfold cache may not be worse. The floor is the
    noise of f16 attention itself. A row read from the wrong place costs more than 0.1 in the tiny models.
    """
    return 1.1 * own + 2e-5
