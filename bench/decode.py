#!/usr/bin/env python3
"""Decode and prefill speed by kv type and depth, interleaved, as a ratio to f16.

usage: decode.py --bin DIR --model M.gguf|SHAPE [--types f16,q8_0,...] [--depths 0,8192] [--tokens 64] [--prompt 0]
                 [--rounds 3] [--json OUT.json] [-- options for llama-bench, e.g. -ngl 99 -t 2]

SHAPE (see synth_gguf.py) makes a model of that shape with random weights in a temporary folder. Every round runs every
type once at every depth, so that a change of the machine's speed meets all of them; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import synth_gguf


def run(args: argparse.Namespace, model: str, kv_type: str, depth: int) -> dict[str, float]:
    """Tokens per second of one llama-bench run: {"tg": ..., "pp": ...}."""
    command = [str(Path(args.bin) / "llama-bench"), "-m", model, "-fa", "1", "-r", "1", "-d", str(depth)]
    command += ["-n", str(args.tokens), "-p", str(args.prompt), "--kv-type", kv_type, "-o", "json", *args.options]
    env = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", **os.environ}
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr[-2000:]}")
    return {("tg" if row["n_gen"] else "pp"): float(row["avg_ts"]) for row in json.loads(result.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="folder with llama-bench")
    parser.add_argument("--model", required=True)
    parser.add_argument("--types", default="f16,q8_0,q4_0,fp4,fp4_csa2")
    parser.add_argument("--depths", default="0,8192")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    own = sys.argv[1:]
    extra: list[str] = []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    args.options = extra

    types = args.types.split(",")
    depths = [int(d) for d in args.depths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in synth_gguf.SHAPES:
            model = str(Path(folder) / f"{args.model}.gguf")
            synth_gguf.write(synth_gguf.SHAPES[args.model], model)
        samples: dict[tuple[str, int, str], list[float]] = {}
        for _ in range(args.rounds):
            for depth in depths:
                for kv_type in types:
                    for test, speed in run(args, model, kv_type, depth).items():
                        samples.setdefault((kv_type, depth, test), []).append(speed)
                        print(f"{kv_type:9} depth {depth:6} {test} {speed:9.2f} t/s", file=sys.stderr, flush=True)

    medians = {key: statistics.median(values) for key, values in samples.items()}
    rows = []
    print("| test | depth | " + " | ".join(types) + " |")
    print("|---|---|" + "---|" * len(types))
    for test in ("tg", "pp"):
        for depth in depths:
            if (types[0], depth, test) not in medians:
                continue
            base = medians[types[0], depth, test]
            cells = [f"{medians[t, depth, test]:.1f} ({medians[t, depth, test] / base:.2f})" for t in types]
            count = args.tokens if test == "tg" else args.prompt
            print(f"| {test}{count} | {depth} | " + " | ".join(cells) + " |")
            rows += [{"type": t, "depth": depth, "test": test, "tps": samples[t, depth, test]} for t in types]
    if args.json:
        record = {"command": sys.argv, "model": args.model, "rows": rows}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
