"""Sequence edits on models with sliding-window layers, attention sinks and recurrent layers.

Half of such a model's memory is upstream's; whatever an f16 cache answers to an edit, a kvfold cache answers too.
"""

from __future__ import annotations

import numpy as np
import pytest
from contract import FOLDED, allowed, text
from harness import Context, kld

MODELS = ["gemma3-256-iswa", "gemma2-64-softcap", "gpt-oss-64-sinks", "lfm2-64-hybrid"]


def same_as_f16(open_context, config: str, name: str, run, **options) -> None:
    """``run(context)`` returns answers and logits: equal answers, logits within what q4_0 is off."""
    answers, logits = {}, {}
    for each in ("f16", "q4_0", config):
        answers[each], logits[each] = run(open_context(each, name, **options))
    assert answers[config] == answers["f16"]
    assert kld(logits["f16"], logits[config]) <= 1.2 * allowed(kld(logits["f16"], logits["q4_0"]))


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("back", [1, 3, 9, 16])
def test_cut_and_go_on(open_context, config: str, name: str, back: int) -> None:
    """Cut the last tokens. Recurrent models say no; then nothing has changed and the text goes on."""

    def run(context: Context) -> tuple[list, np.ndarray]:
        context.feed(text(0, 120), chunk=9)
        cut = context.seq_rm(0, 120 - back)
        start = context.pos_max() + 1
        return [cut, start], context.feed(text(1, 60), start=start, chunk=4)

    same_as_f16(open_context, config, name, run)


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", MODELS)
def test_interleaved_sequences(open_context, config: str, name: str) -> None:
    def run(context: Context) -> tuple[list, np.ndarray]:
        texts, parts = [text(seed, 120) for seed in range(2)], []
        for first in range(0, 120, 4):
            rows = [(t[p], p, (seq,)) for seq, t in enumerate(texts) for p in range(first, first + 4)]
            parts.append(context.decode(rows))
        removed = context.seq_rm(1)
        parts.append(context.feed(text(3, 30), seq=0, chunk=3))
        return [removed, context.pos_min(0), context.pos_max(0), context.pos_max(1)], np.concatenate(parts)

    same_as_f16(open_context, config, name, run, n_seq=2)


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", MODELS)
def test_shared_prefix(open_context, config: str, name: str) -> None:
    def run(context: Context) -> tuple[list, np.ndarray]:
        context.feed(text(0, 101), chunk=9)
        context.seq_cp(0, 1)
        parts = [context.feed(text(1 + seq, 50), seq=seq, chunk=5) for seq in (1, 0)]
        context.seq_keep(1)
        parts.append(context.feed(text(4, 20), seq=1, chunk=5))
        return [context.pos_max(0), context.pos_max(1)], np.concatenate(parts)

    same_as_f16(open_context, config, name, run, n_seq=2)


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", MODELS)
def test_clear_and_start_again(open_context, config: str, name: str) -> None:
    context = open_context(config, name)
    first = context.feed(text(0, 100), chunk=9)
    context.clear()
    context.feed(text(1, 100), chunk=9)
    context.clear()
    assert np.array_equal(first, context.feed(text(0, 100), chunk=9))


@pytest.mark.parametrize("swa_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["gemma3-256-iswa", "gpt-oss-64-sinks"])
def test_window_type(open_context, fresh, budget, name: str, swa_type: str) -> None:
    """Sliding-window layers keep at least 8 bits; the report counts them."""
    context = open_context("fp4_csa2", name, settings={"swa_type": swa_type})
    assert kld(fresh("f16", name), context.feed(text(0, 300), chunk=7)) <= budget(name, chunk=7)
    halves = {"f16": open_context("fp4_csa2", name).stats()["swa_bytes"], swa_type: context.stats()["swa_bytes"]}
    assert halves["f16"] > 0
    if swa_type == "q8_0":
        assert halves["q8_0"] * 32 == halves["f16"] * 17  # 34 bytes for 32 values instead of 64
