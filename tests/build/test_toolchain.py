"""Builds with GGML_CUDA=ON on machines that lack a part of it: the toolkit, or the driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLCHAIN = Path(__file__).resolve().parents[2] / "cmake" / "Toolchain.cmake"
CMAKE = shutil.which("cmake")

# As the runtime: a program that is linked to a library which needs the driver. A GPU's machine has libcuda.so.1; here
# no library defines the symbol, which is the same to the linker.
PROJECT = f"""\
cmake_minimum_required(VERSION 3.21)
project(probe LANGUAGES NONE)
set(GGML_CUDA ON)
include("{TOOLCHAIN}")
add_library(kernels SHARED kernels.cpp)
add_executable(program program.cpp)
target_link_libraries(program kernels)
"""
KERNELS = 'extern "C" int of_the_driver();\nint device_count() { return of_the_driver(); }\n'
PROGRAM = "int device_count();\nint main() { return device_count(); }\n"

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake on the PATH")


def cmake(*args: object) -> subprocess.CompletedProcess[str]:
    command = [str(CMAKE), *map(str, args)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def configure(folder: Path, nvcc: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure the project with a program of our own as nvcc."""
    for name, text in {"CMakeLists.txt": PROJECT, "kernels.cpp": KERNELS, "program.cpp": PROGRAM}.items():
        (folder / name).write_text(text)
    compiler = folder / "nvcc"
    compiler.write_text(f"#!/bin/sh\n{nvcc}\n")
    compiler.chmod(0o755)
    return cmake("-S", folder, "-B", folder / "build", f"-DCMAKE_CUDA_COMPILER={compiler}", *options)


def test_toolkit_that_does_not_work_is_named(tmp_path: Path) -> None:
    result = configure(tmp_path, "exit 1")
    assert result.returncode != 0
    assert "nvcc" in result.stdout and "toolkit" in result.stdout and "-DCMAKE_CUDA_COMPILER=" in result.stdout


@pytest.mark.parametrize("driver", [False, True])
def test_machine_without_a_driver_links_programs(tmp_path: Path, driver: bool) -> None:
    # With a driver the linker looks for every symbol, as ever, and misses the one that nothing defines.
    found = "libcuda.so.1" if driver else "OFF"  # a value that is there already keeps CMake from searching
    result = configure(tmp_path, "echo release 13.0", f"-DKVFOLD_CUDA_DRIVER={found}")
    assert result.returncode == 0, result.stdout
    assert ("no NVIDIA driver" in result.stdout) == (not driver)
    built = cmake("--build", tmp_path / "build")
    assert (built.returncode == 0) == (not driver), built.stdout
    assert ("of_the_driver" in built.stdout) == driver
