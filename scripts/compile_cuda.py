"""Compile kvfold's CUDA sources for several GPU architectures, without building llama.cpp.

    compile_cuda.py [--nvcc NVCC] [--arch 75 80 86 89 90 120]

Needs nvcc but no GPU. Headers come from the patched llama.cpp tree of an earlier build (the newest below build/).
Exit status 1 when a file does not compile; architectures that this nvcc does not know are named and skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Command line; see the module text."""
    parser = argparse.ArgumentParser(description="Compile kvfold's CUDA sources for several GPU architectures.")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", nargs="+", default=["75", "80", "86", "89", "90", "120"])
    parser.add_argument("--llama", type=Path, help="patched llama.cpp tree")
    args = parser.parse_args()

    trees = sorted(ROOT.glob("build/**/llama.cpp/.kvfold-patched"), key=os.path.getmtime)
    llama: Path | None = args.llama or (trees[-1].parent if trees else None)
    if llama is None:
        print("error: no patched llama.cpp tree in build/; build kvfold first or give --llama", file=sys.stderr)
        return 1
    listed = subprocess.run([args.nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"compute_(\d+)", listed))
    for arch in args.arch:
        if arch not in known:
            print(f"skipped sm_{arch}: unknown to {args.nvcc}")
    archs = [arch for arch in args.arch if arch in known]
    flags = [f"-I{ROOT / path}" for path in ("cpp", "cpp/include")]
    flags += [f"-I{llama / path}" for path in ("ggml/include", "ggml/src", "ggml/src/ggml-cuda")]
    options = ["-c", "-O3", "-std=c++17", "-use_fast_math", "-extended-lambda", "-t", "2", "-Xcompiler=-fPIC"]
    if "90" in archs:
        options.append("-DKVFOLD_WGMMA")  # as LlamaBuild.cmake does
    # Headers of the CUDA toolkit and of llama.cpp are full of these two.
    options += ["-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-Wno-unused-function"]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for source in sorted((ROOT / "cpp" / "ops").glob("*.cu")):
            # Hopper's matrix instructions are no part of the plain architecture.
            wanted = [f"{a}a" for a in archs if a == "90"] if source.stem.endswith("wgmma") else archs
            if not wanted:
                continue
            codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
            command = [args.nvcc, *options, *codes, *flags, str(source), "-o", f"{scratch}/{source.stem}.o"]
            ok = subprocess.run(command, check=False).returncode == 0
            print(f"{'compiled' if ok else 'FAILED  '} {source.name} for {' '.join(wanted)}")
            failed += not ok
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
