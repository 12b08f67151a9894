"""``kvfold verify``: the measurements mean what they say, a good type passes, a bad setting fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_probe import check_refusal

from kvfold import cli
from kvfold.config import KvConfig
from kvfold.progress import Progress
from kvfold.verify.report import Job, Result, Thresholds, bundled_text, judge_needles, verify
from kvfold.verify.scoring import divergence, log_softmax

QUIET = Progress(quiet=True)


@pytest.fixture(autouse=True)
def _runtime(core: object) -> None:
    """All of these need the runtime."""


def _setup(path: Path, config: KvConfig) -> Any:
    from kvfold.verify.measures import Setup

    return Setup(path, config)


def test_divergence_of_known_distributions() -> None:
    p = log_softmax(np.log(np.array([[0.5, 0.25, 0.25]])))
    q = log_softmax(np.log(np.array([[0.25, 0.5, 0.25]])) + 3.0)
    assert divergence(p, p) == pytest.approx([0.0])
    assert divergence(p, q) == pytest.approx([0.25 * np.log(2)], abs=1e-6)


def test_repetition() -> None:
    from kvfold.verify.measures import repetition

    assert repetition(list(range(20))) == 0.0
    assert repetition([1, 2, 3, 4] * 5) == pytest.approx(1 - 4 / 17)
    assert repetition([1]) == 0.0


def test_bundled_text_is_long_enough() -> None:
    text = bundled_text()
    assert len(text) > 80_000
    assert "Rabbit-Hole" in text and "Gutenberg" not in text


def test_f16_against_itself_is_nothing(talking_tiny: Path) -> None:
    """The zero of the scale: the same type gives the same numbers, everywhere."""
    job = Job(n_ctx=256, chunks=1, lengths=(512,), prompt=64, length=16)
    result = verify(_setup(talking_tiny, KvConfig("f16")), job, Thresholds(), bundled_text(), QUIET)
    text, coherence = result.numbers["text"], result.numbers["coherence"]
    assert text["kld"] == pytest.approx(0, abs=1e-6) and text["ratio"] == 1 and text["same_top"] == 1
    assert text["tokens"] == 128
    assert coherence["kld"] == pytest.approx(0, abs=1e-6)
    assert coherence["same_until"] == coherence["tokens"] == 16
    assert result.passed


def test_perplexity_is_that_of_llama_cpp(smollm2_path: Path, make_llm: Any) -> None:
    """Losses computed from logits that ``Llama`` keeps itself, without any of verify's code."""
    from kvfold.verify.measures import measure_text

    measured = measure_text(_setup(smollm2_path, KvConfig("fp4_csa2")), bundled_text(), 160, 1, QUIET)
    llm = make_llm(smollm2_path, n_ctx=256, n_batch=80, flash_attn=True, logits_all=True)
    tokens = llm.tokenize(bundled_text().encode())[:160]
    llm.eval(tokens)
    logits = llm.scores[80:159].astype(np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(79), tokens[81:160]]
    # Another micro-batch and so other roundings of quantised activations: up to 1e-2 nat a token.
    assert np.log(measured["perplexity_f16"]) == pytest.approx(losses.mean(), abs=0.02)


def test_needles_are_where_they_are_said_to_be(smollm2_path: Path) -> None:
    """SmolLM2 finds facts in a short text; the same facts cannot be guessed where they are not."""
    from kvfold.verify import measures

    setup = _setup(smollm2_path, KvConfig("fp4_csa2"))
    found = measures.measure_needles(setup, bundled_text(), [512], QUIET)
    assert [f["depth"] for f in found] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert sum(f["found_f16"] for f in found) >= 4
    assert sum(f["found"] for f in found) >= 4
    assert all(f["loss"] < 1.5 for f in found if f["found"])


def test_alignment_follows_the_share_that_is_read(smollm2_path: Path) -> None:
    """The first two layers read everything and are not measured; those behind find more, the more they read."""
    from kvfold.verify.measures import measure_alignment

    found = []
    for share in (0.05, 0.5):
        config = KvConfig("fp4_csa2", lookup=share, min_tokens=0)
        layers = measure_alignment(_setup(smollm2_path, config), bundled_text(), 512, 8, QUIET)
        assert [layer["layer"] for layer in layers] == list(range(2, 30))
        assert all(0 < x["worst"] <= x["recalled"] <= 1 and x["divergence"] <= x["largest"] for x in layers)
        found.append(np.mean([layer["recalled"] for layer in layers]))
    assert found[0] < found[1] < 1


def test_a_good_type_passes_and_a_bad_setting_fails(smollm2_path: Path) -> None:
    """Nothing kept exact and large groups: three times the divergence of the default."""
    job = Job(n_ctx=768, chunks=1, measures=("text",))
    good = verify(_setup(smollm2_path, KvConfig("fp4_csa2")), job, Thresholds(), bundled_text(), QUIET)
    assert good.passed, good
    bad = verify(_setup(smollm2_path, KvConfig("fp4", tail=1, sinks=0)), job, Thresholds(), bundled_text(), QUIET)
    assert not bad.passed, bad
    assert bad.numbers["text"]["kld"] > 2 * good.numbers["text"]["kld"]
    assert "FAILED" in str(bad) and "passed" in str(good)


def test_verdicts_follow_the_limits() -> None:
    result = Result(_setup(Path("m.gguf"), KvConfig("fp4")))
    result.check("a", 1.0, 1.0)
    assert result.passed
    result.check("b", 1.1, 1.0)
    assert not result.passed
    assert result.to_dict()["checks"][1] == {"name": "b", "value": 1.1, "limit": 1.0, "passed": False}


def test_one_undecided_fact_is_no_failure() -> None:
    def facts(lost: int, more: float) -> list[dict[str, Any]]:
        return [
            {"found": i >= lost, "found_f16": True, "loss": 0.3 + more, "loss_f16": 0.3, "n_ctx": 1024, "depth": 0.5}
            for i in range(10)
        ]

    for lost, more, passed in ((0, 0.0, True), (1, 0.05, True), (2, 0.0, False), (0, 0.2, False)):
        result = Result(_setup(Path("m.gguf"), KvConfig("fp4")))
        judge_needles(result, facts(lost, more), Thresholds())
        assert result.passed is passed, (lost, more)


def test_command(talking_tiny: Path, capsys: Any, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text(bundled_text()[:6000])
    arguments = ["verify", str(talking_tiny), "--kv-type", "fp4", "--text", str(text), "-c", "256", "--chunks", "1"]
    arguments += ["--prompt", "64", "--length", "8", "--needle-lengths", "512", "--max-kld", "100", "--max-ratio", "9"]
    code = cli.main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["passed"] else 2)
    assert report["kv"]["kv_type"] == "fp4"
    assert len(report["needles"]) == 5
    assert report["text"]["n_ctx"] == 256
    code = cli.main([*arguments, "--only", "text", "--max-kld", "-1"])
    assert code == 2
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--only", "taste"], "taste"),
        (["--alignment", "--kv-type", "fp4"], "--alignment"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--needle-lengths", "x"], "x"),
    ],
)
def test_errors(talking_tiny: Path, capsys: Any, arguments: list[str], word: str) -> None:
    check_refusal(capsys, ["verify", str(talking_tiny), *arguments], word)
