"""Rough treatment: fragmentation in a nearly full cache, aborted graphs, contexts at work in parallel."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from contract import CONFIGS, FOLDED, allowed, text
from harness import Context, HarnessError, kld


def fragment(context: Context, seed: int, rounds: int, tail_bias: float) -> np.ndarray:
    """Fill a small context, punch single-token holes, many near the end, and fill again: logits of all rounds."""
    rng = np.random.default_rng(seed)
    room, parts, present = context.n_ctx, [], []
    for index in range(rounds):
        free = room - len(present)
        start = present[-1] + 1 if present else 0
        n = int(rng.integers(1, free + 1)) if index else free
        parts.append(context.feed(text(seed * 100 + index, n), start=start, chunk=int(rng.integers(1, 9))))
        present += range(start, start + n)
        for _ in range(int(rng.integers(1, 6))):
            recent = rng.random() < tail_bias
            candidates = present[-24:-1] if recent else present[:-1]
            pos = int(rng.choice(candidates))
            assert context.seq_rm(0, pos, pos + 1)
            present.remove(pos)
    return np.concatenate(parts)


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tail_bias", [0.2, 0.8])
def test_fragmented_and_full(open_context, config: str, seed: int, tail_bias: float) -> None:
    """As many tokens as fit, again and again, into cells that holes have left all over the cache."""
    logits = {
        each: fragment(open_context(each, n_ctx=256, n_ubatch=32), seed, 12, tail_bias)
        for each in ("f16", "q4_0", config)
    }
    assert kld(logits["f16"], logits[config]) <= 1.2 * allowed(kld(logits["f16"], logits["q4_0"]))


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("end", [1, 5, 57, 64, 90, 99])
def test_partial_copies(open_context, config: str, end: int) -> None:
    """A copy that ends inside a group: part of the group then belongs to two sequences. Each goes on by itself."""
    logits = {}
    for each in ("f16", "q4_0", config):
        context = open_context(each, n_seq=2)
        context.feed(text(0, 100), chunk=9)
        context.seq_cp(0, 1, 0, end)
        assert context.pos_max(1) == end - 1
        parts = []
        for step in range(10):
            parts.append(context.feed(text(10 + step, 6), seq=1, chunk=4))
            parts.append(context.feed(text(30 + step, 5), seq=0, chunk=5))
        assert context.seq_rm(0)
        parts.append(context.feed(text(50, 40), seq=1, chunk=7))
        logits[each] = np.concatenate(parts)
    assert kld(logits["f16"], logits[config]) <= 1.2 * allowed(kld(logits["f16"], logits["q4_0"]))


@pytest.mark.parametrize("config", CONFIGS)
def test_sequences_that_are_not_unified(open_context, fresh, budget, config: str) -> None:
    """kvfold always shares its cells among sequences; asking for separate ones still gives every sequence its room."""
    context = open_context(config, n_seq=2, n_ctx=512, unified=False)
    for seq in (0, 1):
        got = context.feed(text(0, 250), seq=seq, chunk=9)
        assert kld(fresh("f16")[:250], got) <= budget(n=250, chunk=1)


@pytest.mark.parametrize("config", CONFIGS)
def test_one_large_micro_batch(open_context, fresh, budget, config: str) -> None:
    """A text in a single micro-batch: most of it is folded straight from the batch, then read by the next one."""
    context = open_context(config, n_ubatch=512)
    got = [context.feed(text(0, 300)[:280], chunk=280), context.feed(text(0, 300)[280:], chunk=5)]
    for part, where in zip(got, (slice(0, 280), slice(280, 300)), strict=True):
        assert kld(fresh("f16")[where], part) <= allowed(kld(fresh("f16")[where], fresh("q4_0", chunk=1)[where]))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_aborted_graphs(open_context, fresh, config: str, seed: int) -> None:
    """The abort callback stops every second decode somewhere in its graph; the tokens are decoded again.

    Some layers have then stored and folded, others have not.
    """
    rng = np.random.default_rng(seed)
    context = open_context(config)
    context.feed(text(0, 300)[:20], chunk=20)
    parts, aborted = [], 0
    for first in range(20, 300, 5):
        tokens = text(0, 300)[first : first + 5]
        context.abort_after(int(rng.integers(0, 80)))
        try:
            part = context.feed(tokens, start=first, chunk=5)
        except HarnessError:
            aborted += 1
            context.abort_after(None)
            context.seq_rm(0, first)
            part = context.feed(tokens, start=first, chunk=5)
        parts.append(part)
    context.abort_after(None)
    assert aborted >= 10
    baseline = kld(fresh("f16")[20:], fresh("q4_0", chunk=1)[20:])
    assert kld(fresh("f16")[20:], np.concatenate(parts)) <= 1.3 * allowed(baseline)


@pytest.mark.parametrize("config", FOLDED)
def test_a_failing_batch_changes_nothing(open_context, config: str) -> None:
    """A batch of several micro-batches that does not fit is refused as a whole."""
    context = open_context(config, n_ctx=256, n_ubatch=16, n_batch=256)
    context.feed(text(0, 180), chunk=16)
    before = context.stats()
    code, _ = context.try_decode([(t, 180 + i, (0,)) for i, t in enumerate(text(1, 200))])
    assert code == 1
    after = context.stats()
    for key in ("tokens", "near_tokens", "folds"):
        assert before[key] == after[key], key
    plain = open_context(config, n_ctx=256, n_ubatch=16)
    plain.feed(text(0, 180), chunk=16)
    assert np.array_equal(plain.feed(text(2, 40), chunk=1), context.feed(text(2, 40), chunk=1))


@pytest.mark.parametrize("config", CONFIGS)
def test_contexts_in_parallel(open_context, config: str) -> None:
    """Two contexts of one model in two threads: the bits of each alone."""
    expected = [open_context(config).feed(text(seed, 200), chunk=9) for seed in range(2)]
    contexts = [open_context(config) for _ in range(2)]
    results: list[np.ndarray | None] = [None, None]

    def work(index: int) -> None:
        results[index] = contexts[index].feed(text(index, 200), chunk=9)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert np.array_equal(expected[index], results[index])
