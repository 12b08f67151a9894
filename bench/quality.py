#!/usr/bin/env python3
"""What a cache type costs in quality on a real model: divergence of its next-token distributions from those of f16.

    quality.py prefill --bin DIR MODEL.gguf TEXT [--types T,...] [--context 4096] [--chunks 1] [-- options]
    quality.py decode MODEL.gguf TEXT [--types T,...] [--prompt 2048] [--tokens 512]

prefill  llama-perplexity over chunks of the text in micro-batches of 256. It scores the second half of each chunk.
decode   the tokens after a prompt, given one by one as a reply would come, through kvfold.Llama; divergence by
         position, because errors that feed on themselves would grow.

Options after -- are llama-perplexity's, e.g. -t 2.

A type is a name (q8_0, fp4_csa2, ...); fp4_csa2+q8_0 means sliding windows in q8_0, fp4/scale_group=32 another
setting. Prints Markdown. Products with quantised weights round activations and so turn tiny differences into a
divergence of up to 1e-2 of their own: for small differences take F32 weights (bench/dequantize_gguf.py).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from decode import execute, failure

BASE = "f16"
MICRO_BATCH = 256

Settings = dict[str, Any]


def settings_of(name: str) -> Settings:
    """``fp4_csa2+q8_0`` and ``fp4/scale_group=32`` as the settings of a cache."""
    name, *fields = name.split("/")
    kv_type, _, swa_type = name.partition("+")
    given = {f"kv_{key}": int(value) for key, _, value in (field.partition("=") for field in fields)}
    return {"kv_type": kv_type, **({"kv_swa_type": swa_type} if swa_type else {}), **given}


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def print_head(cells: list[str]) -> None:
    print_row(cells)
    print_row(["---"] * len(cells))


# -- prefill -----------------------------------------------------------------------------------------------------------

#: Column of the table, and how llama-perplexity names the number.
NUMBERS = {
    "mean KLD": r"Mean +KLD: +(\S+ ± +\S+)",
    "median": r"Median +KLD: +(\S+)",
    "99 %": r"99\.0% +KLD: +(\S+)",
    "PPL ratio": r"Mean PPL\(Q\)/PPL\(base\) +: +(\S+ ± +\S+)",
    "same top token": r"Same top p: +(\S+ ± +\S+) %",
}


def perplexity(args: argparse.Namespace, logits: Path, options: list[str]) -> str:
    command = [str(Path(args.bin) / "llama-perplexity"), "-m", args.model, "-f", args.text]
    command += ["-c", str(args.context), "--chunks", str(args.chunks), "-b", str(MICRO_BATCH), "-ub", str(MICRO_BATCH)]
    command += ["-fa", "on", "--kl-divergence-base", str(logits), *options, *args.options]
    result = execute(command)
    if result.returncode != 0:
        raise SystemExit(failure(result))
    return result.stdout + result.stderr


def prefill(args: argparse.Namespace) -> None:
    print_head(["type", *NUMBERS])
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(args.base or Path(folder) / "f16.logits")
        if not logits.exists():
            perplexity(args, logits, [])
        for name in args.types.split(","):
            settings = [text for key, value in settings_of(name).items() for text in (flag(key), str(value))]
            output = perplexity(args, logits, ["--kl-divergence", *settings])
            found = {column: re.search(pattern, output) for column, pattern in NUMBERS.items()}
            cells = [re.sub(" +", " ", m[1]) if m else "?" for m in found.values()]
            print_row([name, *cells])


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


# -- decode ------------------------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def decoded(args: argparse.Namespace, name: str) -> list[np.ndarray]:
    """Log-probabilities after the prompt and after each of the tokens but the last, float32 ``[vocabulary]`` each."""
    from kvfold import Llama

    options: dict[str, Any] = {"n_batch": MICRO_BATCH, "n_ubatch": MICRO_BATCH, "n_threads": args.threads}
    n_ctx = args.prompt + args.tokens
    llm = Llama(args.model, n_ctx=n_ctx, flash_attn=True, verbose=False, **options, **settings_of(name))
    try:
        # A token is three characters or more in prose; the whole text would take long.
        tokens = llm.tokenize(Path(args.text).read_bytes()[: 16 * n_ctx])[:n_ctx]
        if len(tokens) < n_ctx:
            raise SystemExit(f"{args.text}: {len(tokens)} tokens, {n_ctx} are needed")
        rows = []
        llm.eval(tokens[: args.prompt])
        for token in tokens[args.prompt :]:
            logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
            rows.append(log_softmax(logits).astype(np.float32))
            llm.eval([token])
        return rows
    finally:
        llm.close()


def decode(args: argparse.Namespace) -> None:
    base = decoded(args, BASE)
    edges = np.linspace(0, args.tokens, args.bins + 1).astype(int)
    spans = [f"{a} to {b - 1}" for a, b in pairwise(edges)]
    print_head(["type", "mean KLD", *spans, "same top token"])
    for name in args.types.split(","):
        kld, same = [], []
        for p, q in zip(base, decoded(args, name), strict=True):
            reference = p.astype(np.float64)
            kld.append(float((np.exp(reference) * (reference - q)).sum()))
            same.append(p.argmax() == q.argmax())
        parts = [float(np.mean(kld[a:b])) for a, b in pairwise(edges)]
        cells = [f"{x:.6f}" for x in (np.mean(kld), *parts)]
        print_row([name, *cells, f"{100 * np.mean(same):.1f} %"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (prefill, decode):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("model")
        command.add_argument("text", help="a file of prose")
        command.add_argument("--types", default="q4_0,q5_0,q8_0,fp4,fp4_csa2")
        if function is prefill:
            command.add_argument("--bin", required=True, help="folder with llama-perplexity")
            command.add_argument("--context", type=int, default=4096)
            command.add_argument("--chunks", type=int, default=1)
            command.add_argument("--base", help="file that keeps the logits of f16 for more runs")
        else:
            command.add_argument("--prompt", type=int, default=2048)
            command.add_argument("--tokens", type=int, default=512)
            command.add_argument("--bins", type=int, default=8, help="parts of the tokens that are averaged apart")
            command.add_argument("--threads", type=int, default=2)
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    args.options = extra
    args.function(args)


if __name__ == "__main__":
    main()
