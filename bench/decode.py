#!/usr/bin/env python3
"""Decode and prefill speed by kv type and depth, interleaved, as a ratio to the first type.

usage: decode.py --bin DIR --model M.gguf|SHAPE [--types f16,q8_0,...] [--depths 0,8192] [--tokens 64] [--prompt 0]
                 [--rounds 3] [--json OUT.json] [-- options for llama-bench, e.g. -ngl 99 -t 2]

SHAPE (see synth_gguf.py) makes a model of that shape with random weights in a temporary folder. Every round runs every
type once at every depth, so that a change of the machine's speed meets all of them; the table shows medians. A type may
carry settings of its own: fp4_csa2/layers=dense, fp4/group=8.

gpu_decode.py is the same for several shapes on a GPU, with the bytes that are read and the bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import synth_gguf

from kvfold.threads import set_waiting

#: Tokens per second of every run, by type, depth and test ("tg": decode, "pp": prefill).
Samples = dict[tuple[str, int, str], list[float]]


def split_options(argv: list[str]) -> tuple[list[str], list[str]]:
    """A command line before and after ``--``."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def settings_of(kv_type: str) -> dict[str, str]:
    """``fp4/group=8`` as ``{"type": "fp4", "group": "8"}``."""
    name, *rest = kv_type.split("/")
    settings = {"type": name}
    for text in rest:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise SystemExit(
                f"kv type {kv_type!r}: {text!r} is no setting; possible: TYPE/key=value, as in fp4/group=8"
            )
        settings[key] = value
    return settings


def type_flags(kv_type: str) -> list[str]:
    """``fp4/group=8`` as ``--kv-type fp4 --kv-group 8``."""
    return [text for k, v in settings_of(kv_type).items() for text in (f"--kv-{k.replace('_', '-')}", v)]


def execute(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of llama.cpp, whose threads wait as those of an installed one do."""
    env = dict(os.environ)
    set_waiting(env)
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def failure(result: subprocess.CompletedProcess[str]) -> str:
    """What to say about a program that failed."""
    return f"{' '.join(result.args)}: exit status {result.returncode}\n{result.stderr[-2000:]}"


def llama_bench(
    folder: str,
    model: str,
    kv_type: str,
    depths: Iterable[int],
    tokens: int,
    prompt: int,
    options: list[str],
    repeats: int = 1,
) -> tuple[list[dict[str, Any]], str]:
    """One llama-bench process: its rows, and what went wrong (empty: nothing).

    The rows of depths that were measured before a failure are there.
    """
    command = [str(Path(folder) / "llama-bench"), "-m", model, "-fa", "1", "-r", str(repeats)]
    command += ["-d", ",".join(str(d) for d in depths), "-n", str(tokens), "-p", str(prompt)]
    result = execute([*command, *type_flags(kv_type), "-o", "jsonl", *options])
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{") and line.endswith("}")]
    return rows, "" if result.returncode == 0 else failure(result)


def add_samples(samples: Samples, kv_type: str, rows: list[dict[str, Any]]) -> None:
    """Keep the speeds of llama-bench's rows and show them."""
    for row in rows:
        test, depth, speeds = "tg" if row["n_gen"] else "pp", int(row["n_depth"]), row["samples_ts"]
        samples.setdefault((kv_type, depth, test), []).extend(speeds)
        text = " ".join(f"{speed:9.2f}" for speed in speeds)
        print(f"{kv_type:9} depth {depth:6} {test} {text} t/s", file=sys.stderr, flush=True)


def medians(samples: Samples) -> dict[tuple[str, int, str], float]:
    return {key: statistics.median(values) for key, values in samples.items()}


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def sample_rows(samples: Samples) -> list[dict[str, Any]]:
    """Samples for a JSON file."""
    return [{"type": t, "depth": d, "test": test, "tps": speeds} for (t, d, test), speeds in samples.items()]


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
    own, options = split_options(sys.argv[1:])
    args = parser.parse_args(own)

    types = args.types.split(",")
    depths = [int(d) for d in args.depths.split(",")]
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in synth_gguf.SHAPES:
            model = str(Path(folder) / f"{args.model}.gguf")
            synth_gguf.write(synth_gguf.SHAPES[args.model], model)
        for _ in range(args.rounds):
            for depth in depths:
                for kv_type in types:
                    rows, error = llama_bench(args.bin, model, kv_type, [depth], args.tokens, args.prompt, options)
                    if error:
                        raise SystemExit(error)
                    add_samples(samples, kv_type, rows)

    middle = medians(samples)
    table = []
    for test, count in (("tg", args.tokens), ("pp", args.prompt)):
        for depth in depths:
            if (types[0], depth, test) not in middle:
                continue
            base = middle[types[0], depth, test]
            cells = [f"{middle[t, depth, test]:.1f} ({middle[t, depth, test] / base:.2f})" for t in types]
            table.append([f"{test}{count}", str(depth), *cells])
    print(markdown(["test", "depth", *types], table))
    if args.json:
        record = {"command": sys.argv, "model": args.model, "rows": sample_rows(samples)}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
