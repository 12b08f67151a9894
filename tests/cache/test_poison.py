"""Contract 2: nothing depends on what is in rows that a sequence does not own, NaN included.

The models of these tests have a token whose keys and values are NaN in every layer. A sequence of such tokens fills
near rows, and rows that are folded, with NaN and leftovers of NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
from contract import CONFIGS, FOLDED, allowed
from harness import kld
from tiny_models import NAN_TOKEN

MODELS = ["llama-64-nan", "llama-128-nan"]


def words(seed: int, n: int) -> list[int]:
    """Random tokens without the poisonous one."""
    return np.random.default_rng(seed).integers(0, NAN_TOKEN, n).tolist()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 5])
def test_poison_beside(open_context, config: str, name: str, chunk: int) -> None:
    """Sequence 1 consists of NaN and shares every micro-batch with sequence 0, whose bits do not change."""
    runs = []
    for neighbour in (words(1, 100), [NAN_TOKEN] * 100):
        context = open_context(config, name, n_seq=2)
        mine, parts = words(0, 100), []
        for first in range(0, 100, chunk):
            rows = [(t[p], p, (seq,)) for p in range(first, first + chunk) for seq, t in enumerate((mine, neighbour))]
            parts.append(context.decode(rows)[0::2])
        runs.append(np.concatenate(parts))
    assert np.isfinite(runs[0]).all()
    assert np.array_equal(*runs)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_poison_in_freed_rows(open_context, config: str, name: str, chunk: int) -> None:
    """A full cache of NaN is cleared or removed; a text then finds its cells as good as new."""
    expected = open_context(config, name, n_ctx=256).feed(words(0, 200), chunk=chunk)
    context = open_context(config, name, n_ctx=256)
    for clear in (lambda: context.seq_rm(0), lambda: context.clear(data=False), lambda: context.seq_rm(0, 0)):
        context.feed([NAN_TOKEN] * 256, chunk=32)
        clear()
        got = context.feed(words(0, 200), chunk=chunk)
        assert np.isfinite(got).all()
        assert kld(expected, got) <= 1e-5
        context.clear(data=False)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_poisonous_drafts(open_context, config: str, name: str) -> None:
    """Rejected drafts of NaN after every few tokens leave no trace: near rows are exact again."""
    tokens = words(0, 200)
    logits = {}
    for each in ("f16", "q4_0", config):
        context = open_context(each, name)
        parts = []
        for first in range(0, 200, 4):
            parts.append(context.feed(tokens[first : first + 4], chunk=4))
            if each == config:
                # At most the tail, so that no group with good tokens in it is folded together with a draft.
                context.feed([NAN_TOKEN] * 3, chunk=3)
                assert context.seq_rm(0, first + 4)
        logits[each] = np.concatenate(parts)
    assert kld(logits["f16"], logits[config]) <= allowed(kld(logits["f16"], logits["q4_0"]))


@pytest.mark.parametrize("config", FOLDED)
def test_poison_is_not_saved_with_others(open_context, config: str) -> None:
    """The state of sequence 0 does not change with its neighbour's rows."""
    states = []
    for neighbour in (words(1, 100), [NAN_TOKEN] * 100):
        context = open_context(config, "llama-64-nan", n_seq=2)
        for first in range(0, 100, 5):
            context.decode([(t[p], p, (s,)) for p in range(first, first + 5)
                            for s, t in enumerate((words(0, 100), neighbour))])  # fmt: skip
        states.append(context.seq_state(0))
    assert states[0] == states[1]
