"""Vision models with M-RoPE: hundreds of cells share one position, at the very start of a text too."""

from __future__ import annotations

import numpy as np
import pytest
from contract import FOLDED, allowed, text
from harness import Context, kld


def patches(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 256)).astype(np.float32)


def read(context: Context, first: int, n_images: int) -> np.ndarray:
    """``first`` tokens, then images of 48 patches, each followed by text."""
    parts = [context.feed(text(0, first), chunk=9)] if first else []
    pos = first
    for index in range(n_images):
        parts.append(context.feed_image(patches(index, 48), pos, 8))
        pos += 8  # an image takes as many positions as its longer side has patches
        parts.append(context.feed(text(10 + index, 30), start=pos, chunk=7))
        pos += 30
    return np.concatenate(parts)


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("first", [0, 2, 30])
def test_images(open_context, config: str, first: int) -> None:
    logits = {each: read(open_context(each, "qwen2vl-64"), first, 4) for each in ("f16", "q4_0", config)}
    assert kld(logits["f16"], logits[config]) <= 1.2 * allowed(kld(logits["f16"], logits["q4_0"]))


@pytest.mark.parametrize("config", FOLDED)
def test_as_many_patches_as_cells(open_context, config: str) -> None:
    """Images fill the context up to n_ctx; patches of one position must not waste cells."""
    context = open_context(config, "qwen2vl-64", n_ctx=256)
    for index in range(5):
        assert np.isfinite(context.feed_image(patches(index, 48), 8 * index, 8)).all()
    context.feed(text(0, 16), start=40, chunk=4)
