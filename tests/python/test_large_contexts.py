"""``kv_type="fp4_csa2_ced"`` through ``kvfold.Llama``: contexts larger than the cache in everyday use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_probe import count_evaluated, last_logits

N_CTX = 2048
SETTINGS = {"kv_type": "fp4_csa2_ced", "kv_keep": 0.5, "kv_tail": 32, "n_ctx": N_CTX}


@pytest.fixture
def tokens() -> list[int]:
    return np.random.default_rng(0).integers(100, 40000, N_CTX).tolist()


def test_a_prompt_fills_the_context(make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int]) -> None:
    llm = make_llm(talking_tiny, **SETTINGS)
    assert llm.kv.to_dict()["n_cells"] < 0.6 * N_CTX and llm.n_ctx() == N_CTX
    llm.eval(tokens[:-8])
    for _ in range(8):
        llm.eval([int(last_logits(llm).argmax())])
    assert llm.n_tokens == N_CTX and np.isfinite(last_logits(llm)).all()
    kv = llm.kv.to_dict()
    assert kv["tokens"] + kv["evicted_tokens"] == N_CTX and llm.kv.evicted_tokens > 0.3 * N_CTX
    assert kv["keep"] == 0.5 and kv["score"] == "keydiff+attn"
    with pytest.raises(ValueError, match=str(N_CTX)):
        llm.eval([5])


def test_a_prefix_that_was_thinned_out_is_read_again(
    make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int]
) -> None:
    """What fits whole is not answered from what is left of it; a text that just goes on is not read twice."""
    llm = make_llm(talking_tiny, **SETTINGS)
    expected = make_llm(talking_tiny, **SETTINGS)
    llm.eval(tokens)
    sizes = count_evaluated(llm)
    llm.n_tokens = N_CTX - 10  # an answer of ten tokens is given anew
    llm.eval(tokens[:5])
    assert sum(sizes) == 5
    sizes.clear()
    llm.n_tokens = 600
    llm.eval(tokens[:5])
    assert sum(sizes) == 605
    expected.eval(tokens[:600] + tokens[:5])
    assert np.array_equal(last_logits(llm), last_logits(expected))


def test_pins(make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int], core: Any) -> None:
    llm = make_llm(talking_tiny, **SETTINGS)
    llm.pin(300, 500)
    llm.eval(tokens)
    gone = [core.evicted(llm._ctx.ctx, 0, n) for n in (300, 500)]
    assert gone[0] == gone[1] > 0
    llm.reset()
    llm.unpin()
    llm.eval(tokens)
    gone = [core.evicted(llm._ctx.ctx, 0, n) for n in (300, 500)]
    assert gone[0] < gone[1]
    for start, stop in ((5, 5), (-1, 3), (0, N_CTX + 1)):
        with pytest.raises(ValueError, match="pin"):
            llm.pin(start, stop)
    with pytest.raises(ValueError, match="fp4_csa2_ced"):
        make_llm(talking_tiny, kv_type="fp4_csa2").pin(0, 5)


def test_all_pinned_is_one_clear_error(make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int]) -> None:
    llm = make_llm(talking_tiny, **SETTINGS)
    llm.pin(0, N_CTX)
    with pytest.raises(RuntimeError, match=r"full.*kv_keep"):
        llm.eval(tokens)
    llm.unpin()
    llm.reset()
    llm.eval(tokens[:100])


def test_state(make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int]) -> None:
    llm, other = (make_llm(talking_tiny, **SETTINGS) for _ in range(2))
    llm.eval(tokens[:1500])
    state = llm.save_state()
    assert llm.kv.evicted_tokens > 0
    other.load_state(state)
    for each in (llm, other):
        each.eval(tokens[1500:1504])
    assert other.n_tokens == 1504
    assert np.abs(last_logits(llm) - last_logits(other)).max() <= 1e-3 * np.abs(last_logits(llm)).max()
    assert other.kv.tokens == llm.kv.tokens


def test_compact(make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int]) -> None:
    """Read once, ask often: the text is not read again, and nothing more of it is lost."""
    llm = make_llm(talking_tiny, kv_type="fp4_csa2", kv_tail=32, n_ctx=N_CTX)
    text = tokens[:600]
    llm.eval(text)
    missed = llm.kv.compact_alignment(keep=0.4)
    assert {(row.start, row.stop) for row in missed} >= {(0, 512)} and all(0 < row.recalled <= 1 for row in missed)
    assert llm.kv.evicted_tokens == 0
    dropped = llm.kv.compact(keep=0.4)
    assert dropped == llm.kv.evicted_tokens and 0.4 * 600 <= 600 - dropped <= 0.4 * 600 + 4
    assert llm.kv.tokens == 600 - dropped and llm.n_tokens == 600
    sizes = count_evaluated(llm)
    for start in (700, 900):
        question = tokens[start : start + 150]
        answer = llm.create_completion(text + question, max_tokens=5, temperature=0)
        assert sum(sizes) <= len(question) + 5
        sizes.clear()
        usage = answer["usage"]
        assert usage["evicted_tokens"] == dropped and usage["prompt_tokens"] == 750
        assert usage["kept_tokens"] == llm.kv.tokens == llm.n_tokens - dropped
    # The context is as usable as before: its last logits are not those of the second reading.
    llm.create_completion(text, max_tokens=1, temperature=0)
    assert 0 < sum(sizes) <= 2
    for keep in (0, 1.5, -1):
        with pytest.raises(ValueError, match=str(keep)):
            llm.kv.compact(keep)
    llm.reset()
    with pytest.raises(ValueError, match="compact"):
        llm.kv.compact()


def test_other_caches_cannot_be_compacted(make_llm: Callable[..., Any], talking_tiny: Path, tokens: list[int]) -> None:
    llm = make_llm(talking_tiny, kv_type="f16", n_ctx=N_CTX)
    llm.eval(tokens[:50])
    with pytest.raises(ValueError, match="fp4_csa2"):
        llm.kv.compact()
    assert "kept_tokens" not in llm.create_completion(tokens[:60], max_tokens=1)["usage"]
