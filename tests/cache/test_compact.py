"""``kvfold_compact``: a text is read a second time, and what it can do without is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from contract import text
from harness import Context, _core, kld
from test_eviction import SAME_ROWS, SHRUNK, held

SETTINGS = {"group": 4, "tail": 10, "sinks": 4}
TOKENS = text(0, 500)
MODELS = ["llama-64-gqa3", "qwen3-128-gqa4", "gemma3-256-iswa", "lfm2-64-hybrid", "gpt-oss-64-sinks"]


@pytest.fixture
def reading(open_context):
    """``reading(name, n, **options)``: a context that has read ``n`` tokens."""

    def make(name: str = "llama-64-gqa3", n: int = 300, config: str = "fp4_csa2", **options) -> Context:
        settings = {**SETTINGS, **options.pop("settings", {})}
        context = open_context(config, name, settings=settings, **options)
        context.feed(TOKENS[:n], chunk=32)
        return context

    return make


def compact(context: Context, keep: float, tokens: list[int] | None = None, seq: int = 0) -> int:
    given = TOKENS[: context.pos_max(seq) + 1] if tokens is None else tokens
    return int(_core.compact(context.address, seq, given, keep))


@pytest.mark.parametrize("config", ["fp4", "fp4_csa2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_ubatch", [32, 128])
def test_nothing_of_the_second_reading_stays(reading, config: str, name: str, n_ubatch: int) -> None:
    """Neither rows, nor positions, nor what is exact, nor sliding windows and recurrent states."""
    context, other = (reading(name, config=config, n_ubatch=n_ubatch) for _ in range(2))
    assert compact(context, 1.0) == 0
    assert context.pos_max() == 299
    for key in ("tokens", "near_tokens", "folded_tokens"):
        assert context.stats()[key] == other.stats()[key]
    assert kld(other.feed(TOKENS[300:340], chunk=10), context.feed(TOKENS[300:340], chunk=10)) <= SAME_ROWS


@pytest.mark.parametrize("name", MODELS[:2])
def test_compacting_is_removing(reading, name: str) -> None:
    """The same logits as of a context from which the same positions were removed."""
    context, other = reading(name), reading(name)
    dropped = compact(context, 0.5)
    gone = np.flatnonzero(~held(context))
    assert dropped == len(gone) > 100
    for pos in gone:
        other.seq_rm(0, int(pos), int(pos) + 1)
    assert kld(other.feed(TOKENS[300:340], chunk=10), context.feed(TOKENS[300:340], chunk=10)) <= SAME_ROWS


@pytest.mark.parametrize("keep", [0.3, 0.78])
def test_what_stays(reading, open_context, keep: float) -> None:
    """The share that was asked for; sinks, the exact tail, pinned ranges; whole groups."""
    context = reading(config="fp4_csa2_ced", settings={"keep": 0.9, "lookup": "1"})
    _core.pin(context.address, 0, 100, 121)
    dropped = compact(context, keep)
    there = held(context)
    assert there.sum() == 300 - dropped
    assert keep * 300 <= there.sum() <= keep * 300 + 4
    assert there[:4].all() and there[-10:].all() and there[100:121].all()
    groups = there.reshape(-1, 4)
    assert (groups.all(axis=1) | ~groups.any(axis=1)).all()
    assert context.stats()["evicted_tokens"] == dropped
    # Further down: what is gone counts.
    assert compact(context, keep / 2) > 0 and held(context).sum() <= keep / 2 * 300 + 4


def test_room_is_for_other_text(reading) -> None:
    """What was dropped can be filled: more tokens than the cache has cells."""
    context = reading(n=400, n_ctx=512, n_ubatch=64)
    compact(context, 0.3)
    context.feed(text(1, 300), chunk=50)
    assert context.pos_max() == 699 and context.stats()["tokens"] < 512


def test_asked_again_and_again(reading) -> None:
    """The compacted text stays usable, however long the answers were; not when it was replaced."""
    context = reading()
    compact(context, 0.4)
    for seed in range(3):
        context.feed(text(seed, 200), chunk=40)
        assert _core.prefix_usable(context.address, 0, 300) and _core.prefix_usable(context.address, 0, 295)
        assert not _core.prefix_usable(context.address, 0, 200)
        assert context.seq_rm(0, 300)
    # A text that differs in its last tokens only is the same text.
    assert context.seq_rm(0, 296)
    context.feed(text(5, 200), chunk=40)
    assert _core.prefix_usable(context.address, 0, 296)
    assert context.seq_rm(0, 150)
    context.feed(text(6, 300), chunk=40)
    assert not _core.prefix_usable(context.address, 0, 300)


@pytest.mark.parametrize("whole", [False, True])
def test_saved_and_restored(reading, open_context, whole: bool) -> None:
    """In another context, too, a compacted text is asked again and again, and what it lacks is known."""
    context, plain = reading(n_seq=2), reading(n_seq=2).seq_state()
    dropped = compact(context, 0.4)
    other = open_context("fp4_csa2", "llama-64-gqa3", settings=SETTINGS, n_seq=2)
    other.feed(text(3, 40), seq=1, chunk=20)
    seq = 0 if whole else 1
    assert (other.set_state(context.state()) if whole else other.set_seq_state(context.seq_state(), seq)) > 0
    end = 2**31 - 1
    for seed in range(2):
        other.feed(text(seed, 200), seq=seq, chunk=40)
        assert _core.evicted(other.address, seq, end) == dropped > 100
        assert _core.prefix_usable(other.address, seq, 300) and not _core.prefix_usable(other.address, seq, 200)
        assert other.seq_rm(seq, 300)
    assert _core.evicted(other.address, 1 - seq, end) == 0
    # A whole text takes its place.
    assert other.set_seq_state(plain, seq) > 0
    other.feed(text(4, 100), seq=seq, chunk=20)
    assert _core.evicted(other.address, seq, end) == 0 and _core.prefix_usable(other.address, seq, 200)


def test_other_sequences(reading) -> None:
    """They keep what they have, and what they share."""
    context = reading(n_seq=2, n_ctx=1024)
    context.seq_cp(0, 1, 0, 150)
    context.feed(text(2, 60), seq=1, chunk=30)
    before = held(context, 1)
    assert compact(context, 0.6) > 0
    assert np.array_equal(held(context, 1), before) and before.all()
    there = held(context)
    assert there[:148].all() and 0.6 * 300 <= there.sum() < 300


def test_a_cache_that_evicts_makes_room(open_context) -> None:
    """It may be full: then some tokens go before the second reading."""
    context = open_context("fp4_csa2_ced", "llama-64-gqa3", settings={**SHRUNK, "score": "keydiff"}, n_ubatch=64)
    tokens = text(0, 700)
    context.feed(tokens, chunk=50)
    assert compact(context, 0.4, tokens) > 0
    assert 0.4 * 700 <= held(context).sum() <= 0.4 * 700 + 4


def test_a_full_cache_is_refused(reading) -> None:
    context = reading(n=500, n_ctx=512)
    with pytest.raises(ValueError, match="no room"):
        compact(context, 0.5)
    assert held(context).all() and context.pos_max() == 499


def test_after_an_abort(reading) -> None:
    """Nothing has happened."""
    context, other = reading(), reading()
    context.abort_after(40)
    with pytest.raises(ValueError, match="aborted"):
        compact(context, 0.5)
    context.abort_after(None)
    assert held(context).all() and context.pos_max() == 299
    assert kld(other.feed(TOKENS[300:320], chunk=10), context.feed(TOKENS[300:320], chunk=10)) <= SAME_ROWS
    assert compact(context, 0.5, TOKENS[:320]) > 0


@pytest.mark.parametrize(
    ("keep", "tokens", "seq", "words"),
    [
        (0, None, 0, ["keep", "0"]),
        (1.5, None, 0, ["keep", "1.5"]),
        (0.5, TOKENS[:299], 0, ["299", "0 to 299"]),
        (0.5, None, 1, ["sequence 1"]),
    ],
)
def test_impossible(reading, keep: float, tokens: list[int] | None, seq: int, words: list[str]) -> None:
    context = reading()
    with pytest.raises(ValueError) as refused:
        compact(context, keep, TOKENS[:300] if tokens is None else tokens, seq)
    assert all(word in str(refused.value) for word in words)


def test_other_caches(open_context) -> None:
    context = open_context("f16")
    context.feed(TOKENS[:20])
    with pytest.raises(ValueError, match="fp4_csa2"):
        compact(context, 0.5)


def test_what_would_be_missed(reading) -> None:
    """Less when more is kept; nothing is dropped by asking."""
    context = reading(n_ubatch=128)
    reports = [np.array(_core.compact_alignment(context.address, 0, TOKENS[:300], keep)) for keep in (0.3, 0.6, 1.0)]
    assert held(context).all() and context.pos_max() == 299
    parts = [(0, 128), (128, 248), (248, 300)]  # 128 tokens, of which 8 are read before too
    n_layers = len(reports[0]) // len(parts)
    for report in reports:
        assert [tuple(row) for row in report[::n_layers, 1:3].astype(int)] == parts
        assert (report[:, 5] >= report[:, 4]).all() and (report[:, 4] >= 0).all()
    shares = [report[:, 3].mean() for report in reports]
    assert shares[0] < shares[1] < shares[2] == pytest.approx(1, abs=1e-6)
    assert not reports[2][:, 4].any() or reports[2][:, 4].max() < 1e-5
