#!/usr/bin/env python3
"""What ``kvfold plan`` says, beside what is allocated when its advice is followed.

usage: plan_check.py [--shapes llama-8b,qwen3-4b,gemma3-4b] [--types fp4_csa2,q8_0] [--ctx 32k] [MODEL.gguf ...]

Every model is planned for the memory that is free, from its header alone, then loaded with the arguments that the plan
recommends, and a few tokens go through it. Shapes are files of the published dimensions with nothing but holes for
weights (tests/sparse_models.py). The cache must agree to the byte, all of it within 3 %; exit status 1 if not.
On a machine with a GPU all layers go there; bench/vram_limit.cu leaves it only so much.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kvfold import Llama, _runtime
from kvfold.config import UPSTREAM_TYPES, KvConfig
from kvfold.devices import gpus
from kvfold.dry_run import measure
from kvfold.plan import Wishes, make_plan
from kvfold.units import parse_count, size_text

MOST = 0.03
LOGGED = 0.005 * 2**20 + 1  #: the runtime tells sizes of upstream's caches in MiB with two digits


def check(path: Path, kv_type: str, n_ctx: int) -> bool:
    """Print a row; is the plan as good as it must be?"""
    on_gpu = bool(gpus())
    wishes = Wishes(config=KvConfig(kv_type), n_ctx=n_ctx, n_gpu_layers=-1 if on_gpu else 0)
    plan = make_plan(path, wishes, compare=False).to_dict()
    row = [path.name, kv_type, str(plan["settings"]["n_ctx"])]
    if not plan["fits"]:
        print("|", " | ".join([*row, "does not fit", *[""] * 3]), "|")
        return True
    before = sum(d.free for d in gpus())
    with Llama(path, **plan["arguments"], verbose=False) as llm:
        llm.eval(list(range(1, 65)))
        allocated = measure(_runtime.load(), llm._ctx.ctx)
        cache = llm.kv.bytes
        driver = before - sum(d.free for d in gpus())
    place = "gpu" if on_gpu else "host"
    planned, found = plan["total"][place], allocated.total(host=not on_gpu)
    rounding = LOGGED if kv_type in UPSTREAM_TYPES else 0
    exact, near = abs(plan["kv"]["bytes"] - cache) <= rounding, abs(planned / found - 1) < MOST
    row += [f"{plan['kv']['bytes']} {'=' if exact else '!='} {cache}", size_text(planned), size_text(found)]
    row += [f"{100 * (planned / found - 1):+.2f} %", size_text(driver) if on_gpu else ""]
    print("|", " | ".join(row), "|", flush=True)
    return exact and near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--shapes", default="llama-8b,qwen3-4b,gemma3-4b")
    parser.add_argument("--types", default="fp4_csa2,fp4,q8_0")
    parser.add_argument("--ctx", type=parse_count, default=32768)
    args = parser.parse_args()
    print("| model | kv type | context | cache, bytes: planned and allocated | planned | allocated | | by the driver |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        shapes = [name for name in args.shapes.split(",") if name]
        if shapes:  # they need the gguf package
            sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
            import sparse_models
        models = [*args.models, *(sparse_models.write(Path(folder) / f"{name}.gguf", name) for name in shapes)]
        for path in models:
            for kv_type in args.types.split(","):
                good &= check(path, kv_type, args.ctx)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
