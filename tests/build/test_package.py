"""What is installed: plain library files that find each other, and nothing of llama.cpp's development files."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvfold import _core, _launch

PACKAGE = _launch.package_dir()
installed = pytest.mark.skipif((PACKAGE / "lib").is_symlink(), reason="a development build, run from the checkout")


def dynamic(file: Path) -> str:
    if not shutil.which("readelf"):
        pytest.skip("readelf is not installed")
    return subprocess.run(["readelf", "-dW", str(file)], capture_output=True, text=True, check=True).stdout


@installed
def test_only_what_is_needed_is_installed() -> None:
    suffixes = {p.suffix for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert suffixes <= {".py", ".pyi", ".typed", ".so", ".txt", ".toml", ".json", ""}
    assert not any(p.is_symlink() for p in (PACKAGE / "lib").iterdir())


@installed
def test_libraries_have_one_name_and_relative_run_paths() -> None:
    libraries = sorted((PACKAGE / "lib").glob("*.so"))
    names = {p.name for p in libraries}
    assert {"libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so", "libmtmd.so"} <= names
    for file in libraries:
        text = dynamic(file)
        assert re.search(r"SONAME.*\[(.*)\]", text)[1] == file.name  # type: ignore[index]
        assert re.search(r"(?:RUNPATH|RPATH).*\[(.*)\]", text)[1] == "$ORIGIN"  # type: ignore[index]
        for needed in re.findall(r"NEEDED.*\[(lib(?:llama|ggml|mtmd)[^]]*)\]", text):
            assert needed in names, f"{file.name} needs {needed}"


@installed
def test_programs_find_the_libraries() -> None:
    for file in (PACKAGE / "bin").iterdir():
        assert re.search(r"(?:RUNPATH|RPATH).*\[(.*)\]", dynamic(file))[1] == "$ORIGIN/../lib"  # type: ignore[index]
    result = subprocess.run([str(PACKAGE / "bin" / "llama-server"), "--version"], capture_output=True, check=False)
    assert result.returncode == 0


def test_build_information() -> None:
    info = _core.build_info()
    assert info["version"] == _core.__version__
    assert info["llama_cpp_python"] == "0.3.36"
    assert re.fullmatch(r"[0-9a-f]{40}", info["llama_cpp_commit"])
    assert "cpu" in info["backends"]
    assert info["compiler"]
