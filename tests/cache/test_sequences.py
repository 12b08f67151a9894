"""Contracts 1 and 2: editing sequences works as with an f16 cache, and no sequence sees another one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from contract import CONFIGS, FOLDED, allowed, text
from harness import Context, kld, take_log
from oracle.cells import Cells

Step = Callable[[Context], np.ndarray | None]


def interleaved(context: Context, texts: list[list[int]], n: int, chunk: int) -> list[np.ndarray]:
    """Decode several sequences at once, their tokens alternating inside every micro-batch."""
    logits: list[list[np.ndarray]] = [[] for _ in texts]
    for first in range(0, n, chunk):
        rows = [(t[pos], pos, (seq,)) for pos in range(first, min(n, first + chunk)) for seq, t in enumerate(texts)]
        out = context.decode(rows)
        for seq in range(len(texts)):
            logits[seq].append(out[seq :: len(texts)])
    return [np.concatenate(parts) for parts in logits]


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize(("n_seq", "chunk"), [(2, 1), (2, 9), (4, 5)])
def test_interleaved_sequences(open_context, fresh, budget, config: str, n_seq: int, chunk: int) -> None:
    texts = [text(seed, 150) for seed in range(n_seq)]
    context = open_context(config, n_seq=n_seq, n_ctx=n_seq * 192)
    for seq, got in enumerate(interleaved(context, texts, 150, chunk)):
        assert kld(fresh("f16", seed=seq, n=150), got) <= budget(seed=seq, n=150, chunk=1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 6])
def test_other_sequences_do_not_matter(open_context, config: str, chunk: int) -> None:
    """The bits of sequence 0 are the same whatever its neighbours say."""
    runs = []
    for other in (1, 2):
        texts = [text(0, 120), text(other, 120), text(other + 10, 120)]
        runs.append(interleaved(open_context(config, n_seq=3, n_ctx=3 * 160), texts, 120, chunk)[0])
    assert np.array_equal(*runs)


# -- removing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 16, 31, 32, 33, 102, 150, 176, 186, 190, 191, 192, 199])
def test_cut_and_go_on(open_context, fresh, budget, config: str, cut: int) -> None:
    """Cut inside sinks, at and inside folded groups, at the border of the tail and inside it; then write it again."""
    tokens = text(0, 300)
    context = open_context(config)
    context.feed(tokens[:200], chunk=9)
    assert context.seq_rm(0, cut)
    assert context.pos_max() == cut - 1
    got = context.feed(tokens[cut:], chunk=9)
    assert kld(fresh("f16")[cut:], got) <= 1.3 * budget(chunk=1)


@pytest.mark.parametrize("config", CONFIGS)
def test_cut_and_say_something_else(open_context, model, config: str) -> None:
    """What was cut away must not be remembered: the new continuation is that of a fresh run."""
    prefix, old, new = text(0, 101), text(1, 60), text(2, 120)
    with Context(model("llama-64-mha")) as reference:
        expected = reference.feed(prefix + new, chunk=32)[101:]
    with Context(model("llama-64-mha"), "q4_0") as baseline:
        own = kld(expected, baseline.feed(prefix + new, chunk=1)[101:])
    context = open_context(config)
    context.feed(prefix + old, chunk=9)
    assert context.seq_rm(0, 101)
    assert kld(expected, context.feed(new, chunk=9)) <= 1.3 * allowed(own)


@pytest.mark.parametrize("config", CONFIGS)
def test_many_cuts_in_a_row(open_context, fresh, budget, config: str) -> None:
    """Regenerate a reply ten times, each time cutting a little deeper: no drift."""
    tokens = text(0, 300)
    context = open_context(config)
    context.feed(tokens[:280], chunk=16)
    for cut in range(270, 170, -11):
        assert context.seq_rm(0, cut)
        context.feed(tokens[cut : cut + 10], chunk=4)
        assert context.seq_rm(0, cut)
        context.feed(tokens[cut:280], chunk=32)
    got = context.feed(tokens[280:], chunk=4)
    assert kld(fresh("f16")[280:], got) <= 1.5 * allowed(kld(fresh("f16")[280:], fresh("q4_0", chunk=1)[280:]))


# -- rollback ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("length", [192, 193, 194, 195, 196, 197, 198, 199, 200, 201, 202, 203])
def test_rollback_is_exact(open_context, config: str, length: int) -> None:
    """Draft k tokens, reject them all, twice: the same bits as if they had never been drafted.

    Exactness is promised while the draft makes nothing old: it does not push the end of a group out of the tail.
    """
    _, settings = CONFIGS[config]
    m, tail = settings.get("group", 4), settings.get("tail", 10)
    room = m - (length - tail) % m - 1  # tokens until the next fold
    k = 5 if config == "f16" else min(room, 9)
    tokens, draft = text(0, 240), text(9, 20)
    plain = open_context(config)
    plain.feed(tokens[:length], chunk=16)
    expected = plain.feed(tokens[length:], chunk=1)
    drafted = open_context(config)
    drafted.feed(tokens[:length], chunk=16)
    for attempt in range(2):
        if k > attempt:
            drafted.feed(draft[attempt : attempt + k - attempt], chunk=k)
            assert drafted.seq_rm(0, length)
    assert np.array_equal(expected, drafted.feed(tokens[length:], chunk=1))


@pytest.mark.parametrize("config", FOLDED)
def test_rollback_across_group_borders(open_context, config: str) -> None:
    """A draft that crosses the border of a group of near tokens, with a tail that is no multiple of the group."""
    tokens, draft = text(0, 240), text(9, 20)
    settings = {"group": 8, "tail": 13, "sinks": 4}
    length = 8 * 20 + 5  # the end of the last folded group is 152 = 165 - 13; 168 is a border; the next fold is at 173
    plain = open_context(config, settings=settings)
    plain.feed(tokens[:length], chunk=16)
    expected = plain.feed(tokens[length:], chunk=1)
    drafted = open_context(config, settings=settings)
    drafted.feed(tokens[:length], chunk=16)
    for k in (7, 4, 7):
        drafted.feed(draft[:k], chunk=k)
        assert drafted.seq_rm(0, length)
    assert np.array_equal(expected, drafted.feed(tokens[length:], chunk=1))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("k", [1, 4, 8, 16, 40])
def test_rollback_of_long_drafts(open_context, fresh, budget, config: str, k: int) -> None:
    """Drafts that do make rows old cost no more than the type's own error."""
    tokens, draft = text(0, 300), text(9, 64)
    context = open_context(config)
    context.feed(tokens[:200], chunk=16)
    parts = []
    for first in range(200, 300, 5):
        context.feed(draft[:k], chunk=k)
        assert context.seq_rm(0, first)
        parts.append(context.feed(tokens[first : first + 5], chunk=5))
    baseline = kld(fresh("f16")[200:], fresh("q4_0", chunk=1)[200:])
    assert kld(fresh("f16")[200:], np.concatenate(parts)) <= 1.5 * allowed(baseline)


# -- copying -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shared", [1, 4, 30, 98, 100, 101, 103, 112])
def test_shared_prefix(open_context, fresh, budget, config: str, shared: int) -> None:
    """One prefix, three continuations: each equals a run of its own."""
    prefix = text(0, shared)
    context = open_context(config, n_seq=3)
    context.feed(prefix, chunk=16)
    for seq in (1, 2):
        context.seq_cp(0, seq)
        assert context.pos_max(seq) == shared - 1
    tails = [text(20 + seq, 60) for seq in range(3)]
    got: list[list[np.ndarray]] = [[], [], []]
    for first in range(0, 60, 6):  # in turns, two tokens of each a micro-batch
        for step in range(first, first + 6, 2):
            rows = [(tails[s][step + i], shared + step + i, (s,)) for i in range(2) for s in range(3)]
            out = context.decode(rows)
            for s in range(3):
                got[s].append(out[s::3])
    for seq in range(3):
        with Context(context.model) as reference, Context(context.model, "q4_0") as baseline:
            expected = reference.feed(prefix + tails[seq], chunk=32)[shared:]
            own = kld(expected, baseline.feed(prefix + tails[seq], chunk=1)[shared:])
        assert kld(expected, np.concatenate(got[seq])) <= 1.3 * allowed(own), f"sequence {seq}"


@pytest.mark.parametrize("config", CONFIGS)
def test_keep_one(open_context, fresh, budget, config: str) -> None:
    tokens = text(0, 200)
    context = open_context(config, n_seq=3, n_ctx=768)
    interleaved(context, [text(1, 100), tokens[:100], text(2, 100)], 100, 4)
    context.seq_keep(1)
    assert [context.pos_max(seq) for seq in range(3)] == [-1, 99, -1]
    got = context.feed(tokens[100:], seq=1, chunk=9)
    assert kld(fresh("f16", n=200)[100:], got) <= 1.3 * budget(n=200, chunk=1)


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_of_two_sequences_at_once(open_context, fresh, budget, config: str) -> None:
    """A prompt decoded for two sequences in one go, then one of them goes on alone."""
    tokens = text(0, 200)
    context = open_context(config, n_seq=2)
    for first in range(0, 120, 8):
        context.decode([(t, first + i, (0, 1)) for i, t in enumerate(tokens[first : first + 8])])
    assert context.seq_rm(0)
    got = context.feed(tokens[120:], seq=1, chunk=9)
    assert kld(fresh("f16", n=200)[120:], got) <= 1.3 * budget(n=200, chunk=1)


# -- random edits ------------------------------------------------------------------------------------------------------


def random_script(seed: int, n_seq: int, n_steps: int) -> list[tuple]:
    """Steps that an f16 cache accepts: feeding, cutting ends, cutting holes, dropping and copying sequences."""
    rng = np.random.default_rng(seed)
    present: list[set[int]] = [set() for _ in range(n_seq)]
    steps: list[tuple] = []

    def remove(seq: int, p0: int, p1: int) -> None:
        steps.append(("rm", seq, p0, p1))
        present[seq] = {pos for pos in present[seq] if pos < p0 or (p1 >= 0 and pos >= p1)}

    for _ in range(n_steps):
        seq = int(rng.integers(n_seq))
        length = max(present[seq], default=-1) + 1
        kind = rng.choice(["feed", "cut", "hole", "drop", "copy"], p=[0.6, 0.2, 0.06, 0.04, 0.1])
        if kind == "feed" and length < 150:
            n = int(rng.integers(1, 40))
            steps.append(("feed", seq, length, n, int(rng.integers(1, 12)), int(rng.integers(1 << 30))))
            present[seq] |= set(range(length, length + n))
        elif kind == "cut" and length > 2:
            remove(seq, int(rng.integers(1, length)), -1)
        elif kind == "hole" and length > 30:
            p0 = int(rng.integers(1, length - 20))
            remove(seq, p0, p0 + int(rng.integers(1, 10)))
        elif kind == "drop":
            remove(seq, -1, -1)
        elif kind == "copy" and length:
            target = (seq + 1) % n_seq
            end = int(rng.integers(1, length + 1)) if rng.random() < 0.5 else length
            remove(target, -1, -1)
            steps.append(("cp", seq, target, 0, end))
            present[target] = {pos for pos in present[seq] if pos < end}
    return steps


def play(context: Context, steps: list[tuple], after: Callable[[tuple], None] = lambda _: None) -> np.ndarray:
    """Play a script: the logits of everything fed; return values and positions are checked on the way."""
    parts = [np.empty((0, context.n_vocab), np.float32)]
    for step in steps:
        if step[0] == "feed":
            _, seq, start, n, chunk, seed = step
            parts.append(context.feed(text(seed, n), start=start, seq=seq, chunk=chunk))
        elif step[0] == "rm":
            assert context.seq_rm(*step[1:])
        else:
            context.seq_cp(*step[1:])
        after(step)
    return np.concatenate(parts)


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("seed", range(8))
def test_random_edits(open_context, config: str, seed: int) -> None:
    """Forty random steps on three sequences, against the same steps on f16 (and on q4_0, for the tolerance)."""
    steps = random_script(seed, 3, 40)
    reference = play(open_context("f16", n_seq=3, n_ctx=768), steps)
    baseline = play(open_context("q4_0", n_seq=3, n_ctx=768), steps)
    context = open_context(config, n_seq=3, n_ctx=768)
    got = play(context, steps)
    assert kld(reference, got) <= 1.2 * allowed(kld(reference, baseline))


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("seed", range(6))
def test_bookkeeping_follows_the_rule(open_context, config: str, seed: int) -> None:
    """Cells in use, exact rows and folds are what the written rule says, after every step of a random script."""
    context = open_context(config, n_seq=3, n_ctx=768)
    settings = CONFIGS[config][1]
    cells = Cells(
        context.stats()["n_cells"] // settings["group"], settings["group"], settings["tail"], settings["sinks"]
    )

    def follow(step: tuple) -> None:
        if step[0] == "feed":
            _, seq, start, n, chunk, _ = step
            for first in range(0, n, chunk):
                batch = range(start + first, start + min(n, first + chunk))
                assert cells.place([(pos, frozenset({seq})) for pos in batch])
        elif step[0] == "rm":
            _, seq, p0, p1 = step
            cells.seq_rm(seq, max(p0, 0), None if p1 < 0 else p1)
        else:
            cells.seq_cp(*step[1:])
        stats = context.stats()
        assert stats["tokens"] == cells.n_used, step
        if step[0] == "feed":  # after an edit, rows of removed tokens may be released only with the next micro-batch
            assert stats["near_tokens"] == cells.n_near, step
            assert stats["folds"] == cells.folds, step

    play(context, random_script(100 + seed, 3, 40), follow)


# -- room --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_the_whole_context_fits(open_context, config: str) -> None:
    """At least n_ctx tokens in one sequence; what does not fit is refused, and the cache is still good."""
    context = open_context(config, n_ctx=256, n_ubatch=32)
    tokens = text(0, 400)
    context.feed(tokens[:256], chunk=32)
    n_cells = 256 if config == "f16" else context.stats()["n_cells"]
    assert n_cells < 300
    last = context.feed(tokens[256:n_cells], chunk=1) if n_cells > 256 else None
    code, _ = context.try_decode([(tokens[n_cells], n_cells, (0,))])
    assert code == 1
    assert context.seq_rm(0, n_cells - 1)
    again = context.feed(tokens[n_cells - 1 : n_cells], chunk=1)
    assert last is None or np.array_equal(last[-1:], again)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (3, 3, 3, 247), (1, 85, 85, 85), (61, 65, 63, 67)])
def test_the_whole_context_fits_in_several_sequences(open_context, config: str, lengths: tuple[int, ...]) -> None:
    """n_ctx tokens in four sequences of a unified cache, whatever their lengths: partial groups do not cost room."""
    context = open_context(config, n_seq=4, n_ctx=256, n_ubatch=32)
    for seq, n in enumerate(lengths):
        context.feed(text(seq, n), seq=seq, chunk=32)
    assert [context.pos_max(seq) + 1 for seq in range(4)] == list(lengths)


@pytest.mark.parametrize("config", CONFIGS)
def test_edits_do_not_leak_cells(open_context, fresh, config: str) -> None:
    """200 rounds of append and cut in a nearly full cache: never refused, and still right at the end."""
    rng = np.random.default_rng(0)
    context = open_context(config, n_ctx=256, n_ubatch=32)
    tokens = text(0, 256)
    length = 0
    for _ in range(200):
        context.feed(tokens[length:], chunk=32)
        length = int(rng.integers(200, 256))
        assert context.seq_rm(0, length)
    if config != "f16":
        assert context.stats()["tokens"] == length
    got = context.feed(tokens[length:], chunk=32)
    reference = fresh("f16", n=256)[length:]
    assert kld(reference, got) <= 2 * allowed(kld(reference, fresh("q4_0", n=256, chunk=1)[length:]))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shared", [1, 33, 62])
def test_the_whole_context_fits_after_branching(open_context, config: str, shared: int) -> None:
    """A shared prefix and eight branches with n_ctx tokens in all."""
    context = open_context(config, n_seq=8, n_ctx=256, n_ubatch=32)
    context.feed(text(0, shared), chunk=32)
    for seq in range(1, 8):
        context.seq_cp(0, seq)
    room = 256 - shared
    lengths = [room // 8 + (1 if seq < room % 8 else 0) for seq in range(8)]
    for first in range(0, max(lengths), 3):
        for seq, n in enumerate(lengths):
            part = text(seq, n)[first : first + 3]
            if part:
                context.feed(part, seq=seq, chunk=3)
    assert [context.pos_max(seq) + 1 - shared for seq in range(8)] == lengths


@pytest.mark.parametrize("config", CONFIGS)
def test_branches_do_not_leak(open_context, fresh, config: str) -> None:
    """200 branches off one prefix, each fed and dropped: cells and exact rows come back, the trunk is unharmed."""
    rng = np.random.default_rng(1)
    context = open_context(config, n_seq=2, n_ctx=512)
    tokens = text(0, 300)
    context.feed(tokens[:101], chunk=16)
    for index in range(200):
        context.seq_cp(0, 1)
        context.feed(text(index, int(rng.integers(1, 60))), seq=1, chunk=32)
        assert context.seq_rm(1)
    if config != "f16":
        assert context.stats()["tokens"] == 101
    got = context.feed(tokens[101:], chunk=8)
    if config != "f16":
        s = context.stats()
        assert s["near_tokens"] <= s["tail"] + s["group"] - 1 + s["sinks"]
    reference = fresh("f16")[101:]
    assert kld(reference, got) <= 1.2 * allowed(kld(reference, fresh("q4_0", chunk=1)[101:]))


@pytest.mark.parametrize("config", CONFIGS)
def test_holes_are_filled_again(open_context, config: str) -> None:
    """A fragmented cache (every third token removed) takes as many new tokens as it has free cells."""
    context = open_context(config, n_seq=1, n_ctx=256, n_ubatch=32)
    context.feed(text(0, 256), chunk=32)
    for pos in range(1, 256, 3):
        assert context.seq_rm(0, pos, pos + 1)
    got = context.feed(text(1, 85), start=256, chunk=5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("config", FOLDED)
def test_holes_do_not_harm(open_context, config: str) -> None:
    """The same on f16, with a tolerance."""
    logits = {}
    for each in ("f16", "q4_0", config):
        context = open_context(each, n_ctx=256, n_ubatch=32)
        context.feed(text(0, 256), chunk=32)
        for pos in range(5, 250, 3):
            assert context.seq_rm(0, pos, pos + 1)
        logits[each] = context.feed(text(1, 80), start=256, chunk=5)
    assert kld(logits["f16"], logits[config]) <= 1.3 * allowed(kld(logits["f16"], logits["q4_0"]))


@pytest.mark.parametrize("config", FOLDED)
def test_context_shift_is_refused(open_context, config: str) -> None:
    """Contract 4: keys that are coded as differences cannot be rotated in place; trying says so and changes nothing."""
    context, plain = open_context(config), open_context(config)
    assert not context.can_shift()
    for each in (context, plain):
        each.feed(text(0, 100), chunk=9)
    take_log()
    context.seq_add(0, 50, 100, 5)
    assert "shift" in take_log()
    context.seq_div(0, 50, 100, 2)
    assert "shift" in take_log()
    assert context.pos_max() == 99
    assert np.array_equal(*(each.feed(text(1, 40), chunk=1) for each in (context, plain)))
