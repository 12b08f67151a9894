"""The ``kvfold`` command as a user runs it: answers on stdout, one line per error, exit code 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import kvfold
from kvfold import cli

QUESTION = "How many days are in a week?"


@pytest.fixture(scope="module")
def environment(smollm2_path: Path, core: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model cache in which SmolLM2 is already there."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "smollm2.gguf").symlink_to(smollm2_path)
    return {**os.environ, "KVFOLD_CACHE_DIR": str(cache)}


def run(environment: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfold", *arguments]
    return subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, timeout=600)


def test_version(environment: dict[str, str]) -> None:
    result = run(environment, "--version")
    assert result.stdout == f"kvfold {kvfold.__version__}\n"
    assert result.returncode == 0


@pytest.mark.parametrize("command", ["pull", "demo", "run", "serve", "plan", "verify", "bench", "calibrate", "doctor"])
def test_help(environment: dict[str, str], command: str) -> None:
    result = run(environment, command, "--help")
    assert result.returncode == 0
    assert "kvfold" in result.stdout


ERRORS: list[tuple[list[str], list[str]]] = [
    ([], ["COMMAND"]),
    (["paint"], ["paint", "plan", "pull", "demo", "run", "serve"]),
    (["plan"], ["model"]),
    (["pull", "smollm"], ["smollm", "smollm2"]),
    (["demo", "--kv-type", "fp5"], ["kv_type", "fp5", "fp4_csa2"]),
    (["demo", "--kv-typ"], ["--kv-typ"]),
    (["demo", "--kv-group", "3"], ["kv_group=3", "2, 4, 8, 16"]),
    (["demo", "--kv-tail", "0"], ["kv_tail=0"]),
    (["demo", "--kv-tail", "many"], ["--kv-tail", "many"]),
    (["demo", "--kv-type", "q8_0", "--kv-sinks", "4"], ["kv_sinks=4", "q8_0"]),
    (["demo", "-t", "0"], ["-t", "0"]),
    (["demo", "-c", "512"], ["512"]),
    (["run", "missing.gguf", "-p", "hi"], ["missing.gguf", "no such file", "smollm2"]),
    (["run", "smollm2", "--json"], ["--json", "-p"]),
    (["run", "smollm2", "-c", "-1", "-p", "hi"], ["n_ctx=-1"]),
]


@pytest.mark.parametrize(("arguments", "words"), ERRORS, ids=[" ".join(a) or "nothing" for a, _ in ERRORS])
def test_errors_are_one_line_and_exit_code_1(
    environment: dict[str, str], arguments: list[str], words: list[str]
) -> None:
    result = run(environment, *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("a handbook of")]
    assert len(lines) == 1, result.stderr
    for word in ("kvfold", *words):
        assert word in lines[0]


@pytest.mark.parametrize("name", ["llama-80", "mpt-alibi", "deepseek2-mla"])
def test_unfit_models_are_one_line(environment: dict[str, str], tiny_folder: Path, name: str) -> None:
    path = tiny_models.write_named(tiny_folder, name)
    result = run(environment, "run", str(path), "-p", "hi")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert tiny_models.REFUSED[name][1] in result.stderr


def test_damaged_models_are_one_line(environment: dict[str, str], tiny_folder: Path) -> None:
    for path in tiny_models.write_damaged(tiny_folder).values():
        result = run(environment, "run", str(path), "-p", "hi", "--kv-type", "f16")
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert path.name in result.stderr


def test_run_answers_one_question(environment: dict[str, str]) -> None:
    result = run(environment, "run", "smollm2", "-p", QUESTION, "--temperature", "0", "-n", "24")
    assert result.returncode == 0, result.stderr
    assert "7" in result.stdout
    assert "kv fp4_csa2:" in result.stderr
    assert "t/s" in result.stderr


def test_run_reports_as_json(environment: dict[str, str]) -> None:
    arguments = ["--temperature", "0", "-n", "24", "--kv-type", "fp4", "--kv-group", "16", "-c", "1024", "--json"]
    result = run(environment, "run", "smollm2", "-p", QUESTION, *arguments)
    report = json.loads(result.stdout)
    assert "7" in report["answer"]
    assert report["kv"]["kv_type"] == "fp4"
    assert report["kv"]["group"] == 16
    assert report["prompt_tokens"] > 10
    assert report["answer_tokens"] > 2
    assert result.stderr == ""


def test_conversation(environment: dict[str, str]) -> None:
    talk = "My name is Ines.\nWhat is my name?\n\n"
    result = run(environment, "run", "smollm2", "-c", "2048", "-n", "32", "--temperature", "0", stdin=talk)
    assert result.returncode == 0, result.stderr
    second = result.stdout.split("> ")[2]
    assert "Ines" in second, result.stdout


def test_serve_hands_over_to_llama_server(monkeypatch: pytest.MonkeyPatch, smollm2_path: Path) -> None:
    from kvfold import _launch

    started: list[list[str]] = []
    monkeypatch.setattr(_launch, "server", lambda: started.append(list(sys.argv)))
    options = ["--kv-tail", "64", "-c", "2048", "-t", "2", "--", "--port", "8123", "--kv-unified"]
    assert cli.main(["serve", str(smollm2_path), *options]) == 0
    (command,) = started
    assert command[0] == "llama-server"
    assert command[-3:] == ["--port", "8123", "--kv-unified"]
    pairs = dict(zip(command[1:-3:2], command[2:-3:2], strict=True))
    assert pairs["-m"] == str(smollm2_path)
    assert pairs["-c"] == "2048"
    assert pairs["--kv-type"] == "fp4_csa2"
    assert pairs["--kv-group"] == "4"
    assert pairs["--kv-lookup"] == "0.2,0.2"
    assert pairs["--kv-tail"] == "64"
    started.clear()
    assert cli.main(["serve", str(smollm2_path), "--kv-type", "q8_0"]) == 0
    assert started[0][-2:] == ["--kv-type", "q8_0"]


def test_demo_document_holds_the_answer() -> None:
    text = cli.demo_document()
    assert "brass hook behind the blue barometer" in text
    assert len(text.split()) > 2000


@pytest.fixture(scope="module")
def demo(environment: dict[str, str]) -> dict[str, Any]:
    result = run(environment, "demo", "--json")
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_demo_answers_from_the_text(demo: dict[str, Any]) -> None:
    assert "barometer" in demo["answer"]


def test_demo_shows_the_real_size(demo: dict[str, Any]) -> None:
    kv = demo["kv"]
    assert kv["kv_type"] == "fp4_csa2"
    assert kv["bytes"] < 0.36 * kv["f16_bytes"]
    # 30 layers, keys and values, 3 heads of 64 channels, 2 bytes each.
    assert kv["f16_bytes"] == cli.DEMO_CONTEXT * 30 * 2 * 3 * 64 * 2
    assert kv["folded_tokens"] > 2000
    assert demo["prompt_tokens"] > 2500
    assert demo["answer_tokens_per_second"] > 0
