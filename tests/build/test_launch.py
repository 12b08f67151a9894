"""The launchers of llama-server and its companions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold import _launch
from kvfold.threads import SPIN_COUNT

SHOW = '#!/bin/sh\necho "$OMP_WAIT_POLICY $GOMP_SPINCOUNT $*"\n'


def launch(package: Path, env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the llama-server launcher in a process of its own, as if `package` were the installed package."""
    code = (
        "import sys, pathlib; from kvfold import _launch; "
        f"_launch.package_dir = lambda: pathlib.Path({str(package)!r}); sys.argv[1:] = {list(args)!r}; _launch.server()"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**clean, **env}
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(SHOW)
    program.chmod(0o755)
    return tmp_path


def test_arguments_are_passed_and_waiting_threads_sleep_soon(package: Path) -> None:
    assert launch(package, {}, "-m", "a b").stdout == f"passive {SPIN_COUNT} -m a b\n"


def test_the_users_choice_wins(package: Path) -> None:
    assert launch(package, {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7"}).stdout == "active 7 \n"


def test_exit_status_is_the_programs(package: Path) -> None:
    (package / "bin" / "llama-server").write_text("#!/bin/sh\nexit 7\n")
    assert launch(package, {}).returncode == 7


def test_missing_program_gives_one_line(tmp_path: Path) -> None:
    result = launch(tmp_path, {})
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert str(tmp_path / "bin" / "llama-server") in result.stderr


def test_every_program_of_the_package_is_there() -> None:
    programs = _launch.package_dir() / "bin"
    for name in ("llama-server", "llama-cli", "llama-bench", "llama-perplexity", "llama-quantize"):
        assert os.access(programs / name, os.X_OK), name
