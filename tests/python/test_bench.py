"""``kvfold bench``: runs are real, results can be kept, shown, drawn and compared."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_probe import check_refusal

from kvfold import cli
from kvfold.bench import report
from kvfold.bench.sweep import RunFailed, Sweep, agreement, recommend_threads, run_one, run_sweep, thread_counts
from kvfold.config import KvConfig
from kvfold.progress import Progress


@pytest.fixture(scope="module")
def stored(core: object, talking_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of four runs, written by the command."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    arguments = ["bench", str(talking_tiny), "-c", "256,1k", "--kv-types", "fp4_csa2", "-n", "4", "-t", "1"]
    before = sys.argv
    sys.argv = ["kvfold", *arguments, "-o", str(path)]
    try:
        assert cli.main(sys.argv[1:]) == 0
    finally:
        sys.argv = before
    return path


def test_results_hold_what_a_reader_needs(stored: Path, talking_tiny: Path) -> None:
    data = report.load(stored)
    assert data["model"]["name"] == talking_tiny.name
    assert data["model"]["bytes"] == talking_tiny.stat().st_size
    assert data["command"].startswith("kvfold bench talking.gguf -c 256,1k")
    assert "/" not in data["command"]
    for key in ("cpu", "cores", "commit", "kvfold", "gpus"):
        assert key in data["machine"]
    runs = data["runs"]
    assert [(r["kv"]["kv_type"], r["n_ctx"]) for r in runs] == [
        ("f16", 256),
        ("fp4_csa2", 256),
        ("f16", 1024),
        ("fp4_csa2", 1024),
    ]
    for run in runs:
        assert run["prefill"] > 0 and run["decode"] > 0 and run["load_seconds"] > 0
        assert run["peak_bytes"] >= run["settled_bytes"] > run["weights_bytes"] // 2
        assert run["spill"] is False
        assert run["bandwidth"] == pytest.approx((run["weights_bytes"] + run["kv_bytes"]) * run["decode"], rel=1e-3)
    assert runs[0]["kld"] == pytest.approx(0, abs=1e-6) and runs[0]["same_top"] == 1
    assert 0 < runs[3]["kld"] < 0.1
    assert runs[3]["kv_bytes"] < 0.6 * runs[3]["f16_bytes"] == 0.6 * runs[2]["kv_bytes"]


def test_models_without_a_tokenizer_are_measured_on_any_tokens(
    core: object, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    sweep = Sweep(tiny_path("gemma3-256-iswa"), (256,), (KvConfig("fp4"),), (1,), n_decode=4)
    runs = run_sweep(sweep, Progress(quiet=True), ["kvfold", "bench"])["runs"]
    assert [("error" in run, run.get("decode", 0) > 0) for run in runs] == [(False, True)] * 2
    assert not any("kld" in run for run in runs)


def test_report(stored: Path, capsys: Any) -> None:
    assert cli.main(["bench", "report", str(stored)]) == 0
    text = capsys.readouterr().out
    assert "# talking.gguf" in text and "kvfold bench" in text
    assert text.count("| fp4_csa2 |") == 2


def test_plots_are_drawn(stored: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.md"
    assert cli.main(["bench", "report", str(stored), "--plot", "-o", str(page)]) == 0
    picture = tmp_path / "results.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
    assert "(results.png)" in page.read_text()


def test_comparison_names_what_changed(stored: Path, tmp_path: Path, capsys: Any) -> None:
    data = report.load(stored)
    other = copy.deepcopy(data)
    other["machine"]["commit"] = "0123456789ab"
    for run in other["runs"]:
        run["decode"] *= 2
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    assert report.differences(data, data) == []
    assert len(report.differences(data, other)) == 1
    assert cli.main(["bench", "report", str(stored), str(path)]) == 0
    text = capsys.readouterr().out
    assert "other.json against results.json" in text
    assert text.count("x 2.000") == 4
    assert "more than one thing" not in text
    other["machine"]["cpu"] = "another"
    assert "more than one thing changed" in report.compare(data, other, ("a", "b"))
    for run in other["runs"]:
        run["n_threads"] = 7
    assert "No settings in common" in report.compare(data, other, ("a", "b"))


def test_agreement_of_known_distributions() -> None:
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]])).astype(np.float16)
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])).astype(np.float16)
    result = agreement(p, q)
    assert result["kld"] == pytest.approx(0.5 * 0.25 * np.log(2), abs=1e-3)
    assert result["same_top"] == 0.5


def test_runs_that_fail_say_why(core: object, talking_tiny: Path, tmp_path: Path) -> None:
    settings = {
        "model": str(tmp_path / "missing.gguf"),
        "text": str(talking_tiny),
        "kv": {"kv_type": "fp4"},
        "n_ctx": 256,
        "n_decode": 4,
        "n_threads": 1,
        "n_ubatch": 512,
        "n_gpu_layers": 0,
        "logits": None,
    }
    with pytest.raises(RunFailed, match=r"missing\.gguf"):
        run_one(settings)


def test_f16_comes_first() -> None:
    sweep = Sweep(Path("m.gguf"), (512,), (KvConfig("fp4"), KvConfig("f16")), (1, 2))
    assert [(s["n_threads"], s["kv"]["kv_type"]) for s in sweep.settings()] == [
        (1, "f16"),
        (1, "fp4"),
        (2, "f16"),
        (2, "fp4"),
    ]


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_worth_trying() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 4, 6]
    assert thread_counts(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("speeds", "best"),
    [({1: 10.0, 2: 19.0, 4: 19.5, 8: 12.0}, 2), ({1: 10.0, 2: 15.0, 4: 20.0}, 4), ({4: 1.0}, 4), ({}, None)],
)
def test_the_fewest_threads_that_are_good_enough(speeds: dict[int, float], best: int | None) -> None:
    assert recommend_threads([{"n_threads": t, "decode": s} for t, s in speeds.items()]) == best


def test_thread_sweep(core: object, talking_tiny: Path, capsys: Any) -> None:
    arguments = ["bench", "threads", str(talking_tiny), "-t", "1,2", "-c", "128", "-n", "4", "--json"]
    assert cli.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["n_threads"] for r in result["runs"]] == [1, 2]
    assert result["recommended"] in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-c", "32", "-n", "32"], "too short"),
        (["--kv-types", "fp5"], "fp5"),
        (["-t", "0"], "0"),
    ],
)
def test_errors(talking_tiny: Path, core: object, capsys: Any, arguments: list[str], word: str) -> None:
    check_refusal(capsys, ["bench", str(talking_tiny), *arguments], word)


def test_other_files_are_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert cli.main(["bench", "report", str(path)]) == 1
    assert "no results of kvfold bench" in capsys.readouterr().err
