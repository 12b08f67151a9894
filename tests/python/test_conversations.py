"""Conversations on real models: a warm cache tells the same as a cold one, and little is evaluated twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_probe import count_evaluated, divergence, last_logits

from kvfold.cli import demo_document

FOLDING = [{"kv_type": "fp4"}, {"kv_type": "fp4_csa2"}]
NAMES = ["fp4", "fp4_csa2"]


def probabilities(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(weights / weights.sum())


def prompt_of(llm: Any, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation in the ChatML form that SmolLM2 was trained on."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return list(llm.tokenize((text + "<|im_start|>assistant\n").encode(), add_bos=False, special=True))


def opening(llm: Any, paragraphs: int) -> list[dict[str, str]]:
    text = "\n\n".join(demo_document().split("\n\n")[:paragraphs])
    return [
        {"role": "user", "content": text + "\n\nWhere does the town lie?"},
        {
            "role": "assistant",
            "content": "Port Ellin lies at the head of a narrow bay on the north side.",
        },
        {"role": "user", "content": "What are the piers made of?"},
        {"role": "assistant", "content": "The old pier is made of stone and the new pier is made of concrete."},
        {"role": "user", "content": "What stands at the end of the old pier?"},
    ]


@pytest.mark.parametrize("settings", [{"kv_type": "f16"}, *FOLDING], ids=["f16", *NAMES])
def test_third_turn_warm_and_cold(make_llm: Callable[..., Any], smollm2_path: Path, settings: dict[str, Any]) -> None:
    """Case 6.

    Compared are probabilities: quantised weights round differently with another split into batches, and what was folded
    in between is read from the far tier. A total variation of 0.1 is far below what a lost turn changes.
    """
    llm = make_llm(smollm2_path, n_ctx=2048, **settings)
    messages = opening(llm, 7)
    sizes = count_evaluated(llm)
    for turn in (1, 3, 5):
        before = llm.n_tokens
        prompt = prompt_of(llm, messages[:turn])
        sizes.clear()
        next(llm.generate(prompt, temp=0.0))
        # What the cache holds is not evaluated again (the template repeats history as it was).
        assert sum(sizes) <= len(prompt) - before + 8
    warm = probabilities(last_logits(llm))
    llm.reset()
    next(llm.generate(prompt_of(llm, messages), temp=0.0))
    cold = probabilities(last_logits(llm))
    assert np.abs(warm - cold).sum() / 2 < 0.1
    assert warm.argmax() == cold.argmax() or abs(warm.max() - cold.max()) < 0.1


@pytest.mark.parametrize("settings", FOLDING, ids=NAMES)
def test_five_turns_on_a_model_with_sliding_windows(
    make_llm: Callable[..., Any], gemma3_path: Path, settings: dict[str, Any]
) -> None:
    """Case 18: with windows instead of full-size caches no turn is read twice."""
    llm = make_llm(gemma3_path, n_ctx=4096, n_ubatch=256, n_batch=256, **settings)
    assert not llm.context_params.swa_full
    sizes = count_evaluated(llm)
    document = llm.tokenize("\n\n".join(demo_document().split("\n\n")[:10]).encode())
    turns = [document, *(llm.tokenize(f" Question {i}: who rings the bell?".encode(), add_bos=False) for i in range(4))]
    history: list[int] = []
    for turn in turns:
        sizes.clear()
        history += turn
        for token, _ in zip(llm.generate(history, temp=0.0), range(6), strict=False):
            history.append(token)
        # New tokens, the answer, and at most one group: a prompt that is complete in the cache replays its last token.
        assert sum(sizes) <= len(turn) + 6 + 32
    assert llm.kv.folded_tokens > 500
    # 18 layers, of which 3 look at everything: the windows are a large part, and f16 windows cannot be smaller.
    assert llm.kv.bytes < llm.kv.f16_bytes


@pytest.mark.parametrize("settings", FOLDING, ids=NAMES)
def test_eight_bit_windows_take_less(make_llm: Callable[..., Any], gemma3_path: Path, settings: dict[str, Any]) -> None:
    f16 = make_llm(gemma3_path, n_ctx=4096, **settings)
    q8 = make_llm(gemma3_path, n_ctx=4096, kv_swa_type="q8_0", **settings)
    told, less = f16.kv.to_dict(), q8.kv.to_dict()
    assert less["swa_bytes"] * 16 == told["swa_bytes"] * 8.5
    assert told["bytes"] - less["bytes"] == told["swa_bytes"] - less["swa_bytes"]
    tokens = f16.tokenize(demo_document()[:2500].encode())
    f16.eval(tokens)
    q8.eval(tokens)
    assert divergence(last_logits(f16), last_logits(q8)) < 0.05
