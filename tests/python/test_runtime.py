"""Which llama.cpp is loaded: ours, or a message. Each case is a process of its own, because loading happens once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.threads import SPIN_COUNT


def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    for name, value in environment.items():
        if value is not None:
            env[name] = value
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def lib_dir(core: object) -> Path:
    from kvfold._runtime import find_lib_dir

    found = find_lib_dir()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def other_lib_dir(lib_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second copy of the libraries, standing for any other build of llama.cpp."""
    copy = tmp_path_factory.mktemp("other")
    for library in lib_dir.glob("*.so*"):
        shutil.copy(library, copy / library.name)
    return copy


def test_ours_is_loaded_once(lib_dir: Path) -> None:
    code = """
import os, kvfold
from kvfold import Llama
import llama_cpp.llama_cpp as native
print(os.path.realpath(native._lib._name))
paths = {os.path.realpath(l.split()[-1]) for l in open('/proc/self/maps') if 'libllama.so' in l}
print(len(paths))
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    where, copies = result.stdout.split()
    assert where == os.path.realpath(lib_dir / "libllama.so")
    assert copies == "1"


def test_llama_cpp_imported_after_kvfold_is_fine() -> None:
    result = run("import kvfold, llama_cpp; from kvfold import Llama; print(issubclass(Llama, llama_cpp.Llama))")
    assert result.stdout.strip() == "True", result.stderr


def test_another_library_already_loaded(other_lib_dir: Path, lib_dir: Path) -> None:
    code = f"""
import os
os.environ["LLAMA_CPP_LIB_PATH"] = {str(other_lib_dir)!r}
import llama_cpp
from kvfold import Llama
"""
    result = run(code)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: llama_cpp is already loaded from")
    assert str(other_lib_dir) in last
    assert "import kvfold before llama_cpp" in last


def test_variable_points_elsewhere(other_lib_dir: Path, lib_dir: Path) -> None:
    result = run("from kvfold import Llama", LLAMA_CPP_LIB_PATH=str(other_lib_dir))
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "LLAMA_CPP_LIB_PATH" in last
    assert str(other_lib_dir) in last
    assert "unset it" in last


def test_settings_need_no_runtime() -> None:
    result = run("from kvfold import KvConfig; import sys; print(KvConfig('fp4').group, 'llama_cpp' in sys.modules)")
    assert result.stdout.split() == ["32", "False"], result.stderr


def test_wrong_override_is_named(tmp_path: Path) -> None:
    result = run("from kvfold import Llama", KVFOLD_LIB_DIR=str(tmp_path))
    assert "KVFOLD_LIB_DIR" in result.stderr.strip().splitlines()[-1]


def test_another_version_of_the_package_is_refused() -> None:
    code = "import kvfold, llama_cpp; llama_cpp.__version__ = '0.3.35'; from kvfold import Llama"
    result = run(code)
    last = result.stderr.strip().splitlines()[-1]
    assert "0.3.36" in last
    assert "0.3.35" in last


def test_a_library_that_is_not_ours_is_refused(lib_dir: Path) -> None:
    """The handshake: kvfold's build says so by a symbol."""
    code = """
import kvfold, llama_cpp
import llama_cpp.llama_cpp as native
class Plain:
    _name = "/somewhere/libllama.so"
from kvfold import _runtime
native_lib, native._lib = native._lib, Plain()
_runtime._check_no_other_library = lambda lib_dir: None
from kvfold import Llama
"""
    result = run(code)
    last = result.stderr.strip().splitlines()[-1]
    assert "/somewhere/libllama.so is not kvfold's build" in last


@pytest.mark.parametrize(("given", "expected"), [(None, f"passive {SPIN_COUNT}"), ("active", "active None")])
def test_waiting_threads_sleep_soon_unless_told_otherwise(given: str | None, expected: str) -> None:
    code = "import kvfold, os; print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
    assert run(code, OMP_WAIT_POLICY=given).stdout.strip() == expected
