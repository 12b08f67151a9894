#!/usr/bin/env python3
"""What dropping tokens costs (kv type fp4_csa2_ced), by share kept and by score.

    prune_quality.py text MODEL.gguf TEXT [--types T,...] [--context 4096] [--tokens 256] [--windows 2]
    prune_quality.py needle MODEL.gguf TEXT [--types T,...] [--context 4096] [--windows 2]
    prune_quality.py alignment MODEL.gguf TEXT [--types T] [--context 4096] [--keep 0.5] [--plot FILE.png]
    prune_quality.py speed MODEL.gguf TEXT [--types T,...] [--context 4096] [--tokens 256] [--rounds 3]

text    divergence of the next-token distributions from those of f16, and ratio of the perplexities, over the last
        tokens of windows of the text that fill the context: given 16 at a time, few enough for a look-up
needle  log-probability of pass keys that were told at four depths of a text that fills the context, per digit, when
        they are asked for at its end; each of the contexts has other keys. What is asked is not known while the text
        is read.
alignment  divergence of attention without the groups that compacting would drop from that with them, by layer and
        part of the text (Llama.kv.compact_alignment), of the first type
speed   time of reading a context but for its last tokens, and of decoding those one by one, of every type, and its
        ratio to the first type's: all types do a micro-batch, or 16 tokens, in turns

A type is a name, with settings behind a colon: fp4_csa2_ced:kv_keep=0.5:kv_score=keydiff+vnorm. Decoding reads
everything unless a type sets kv_min_context (2^30 is the default here). compact=0.5 is no setting of the cache: the
text before what is scored or asked is compacted to that share (Llama.kv.compact). Prints Markdown. For small
differences take F32 weights (bench/dequantize_gguf.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality import print_head, print_row

BASE = "f16"
MICRO_BATCH = 256
STEP = 16  # tokens at a time that are scored: few enough for a look-up
DEPTHS = (0.1, 0.35, 0.6, 0.85)


def settings_of(name: str) -> dict[str, str]:
    """``fp4_csa2_ced:kv_keep=0.5`` as the settings of a cache."""
    kv_type, *settings = name.split(":")
    chosen = {"kv_min_context": str(2**30)} if kv_type.startswith("fp4_csa2") else {}
    chosen.update(setting.split("=", 1) for setting in settings)
    return {"kv_type": kv_type, **chosen}


class Run:
    """A context of one cache type."""

    def __init__(self, args: argparse.Namespace, name: str, *, logits_all: bool = True) -> None:
        from kvfold import Llama

        given: dict[str, Any] = dict(settings_of(name))
        self.share = float(given.pop("compact", 1))
        if "kv_min_context" in given:
            given["kv_min_context"] = int(given["kv_min_context"])
        n_ctx = args.context + (MICRO_BATCH if self.share < 1 else 0)  # a second reading needs room
        batch = {"n_batch": MICRO_BATCH, "n_ubatch": MICRO_BATCH, "n_threads": args.threads}
        self.llm = Llama(
            args.model, n_ctx=n_ctx, flash_attn=True, logits_all=logits_all, verbose=False, **batch, **given
        )

    def restart(self) -> None:
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()

    def read(self, tokens: list[int]) -> None:
        self.restart()
        self.llm.eval(tokens)
        if self.share < 1:
            self.llm.kv.compact(self.share)

    def go_on(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities before each of the tokens, float32 ``[len(tokens), vocabulary]``."""
        first = self.llm.n_tokens
        for start in range(0, len(tokens), STEP):
            self.llm.eval(tokens[start : start + STEP])
        x = self.llm.scores[first - 1 : first - 1 + len(tokens)].astype(np.float32)
        x -= x.max(axis=1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))

    def kept(self) -> str:
        """What the cache holds of its tokens now."""
        kv = self.llm.kv.to_dict()
        return f"{100 * kv['tokens'] / max(1, self.llm.n_tokens):.0f} %"

    def size(self) -> str:
        return f"{100 * self.llm.kv.ratio:.1f} %"


def read_tokens(run: Run, args: argparse.Namespace, n: int) -> list[int]:
    text = Path(args.text).read_bytes()[: 16 * n]  # a token of prose is three characters or more
    tokens = run.llm.tokenize(text)
    if len(tokens) < n:
        raise SystemExit(f"{args.text}: {len(tokens)} tokens, {n} are needed")
    return list(tokens[:n])


def text(args: argparse.Namespace) -> None:
    print_head(["type", "cache / f16", "tokens kept", "mean KLD", "PPL ratio", "same top token"])
    first = args.context - args.tokens
    base, windows = [], []
    for name in [BASE, *args.types.split(",")]:
        run = Run(args, name)
        if not windows:
            tokens = read_tokens(run, args, args.windows * args.context)
            windows = [tokens[i * args.context : (i + 1) * args.context] for i in range(args.windows)]
        results = []
        for window in windows:
            run.read(window[:first])
            results.append(run.go_on(window[first:]))
        kept, size = run.kept(), run.size()
        run.llm.close()
        if name == BASE:
            base = results
            continue
        kld, nll, same = [], [], []
        for window, p, q in zip(windows, base, results, strict=True):
            kld.append((np.exp(p.astype(np.float64)) * (p.astype(np.float64) - q)).sum(axis=1))
            told = np.array(window[first:])
            nll.append(p[np.arange(len(told)), told] - q[np.arange(len(told)), told])
            same.append(p.argmax(axis=1) == q.argmax(axis=1))
        error = np.concatenate(kld).std() / np.sqrt(args.tokens * args.windows)
        ratio = np.exp(np.concatenate(nll).mean())
        cells = [f"{np.mean(kld):.5f} ± {error:.5f}", f"{ratio:.4f}", f"{100 * np.mean(same):.1f} %"]
        print_row([name, size, kept, *cells])


class PassKeys:
    """Four keys, what tells them, and what asks for them; tokens all. ``seed`` chooses the digits."""

    def __init__(self, llm: Any, seed: int) -> None:
        def tokenize(text: str) -> list[int]:
            return list(llm.tokenize(text.encode(), add_bos=False))

        rng = np.random.default_rng(seed)
        keys = {name: "".join(map(str, rng.integers(0, 10, 5))) for name in ("red", "green", "white", "black")}
        self.told = [
            tokenize(f" The {name} pass key is {key}. Remember it: {key} is the {name} pass key.")
            for name, key in keys.items()
        ]
        self.questions = [
            (tokenize(f"\nWhat is the {name} pass key? The {name} pass key is "), tokenize(key))
            for name, key in keys.items()
        ]

    def hidden_in(self, prose: Sequence[int], n: int) -> list[int]:
        """A text of ``n`` tokens that tells the keys at ``DEPTHS``."""
        room = n - sum(map(len, self.told))
        tokens: list[int] = []
        for start, stop, told in zip((0.0, *DEPTHS), (*DEPTHS, 1.0), [*self.told, []], strict=True):
            tokens += [*prose[int(start * room) : int(stop * room)], *told]
        return tokens


def needle(args: argparse.Namespace) -> None:
    print_head(["type", "cache / f16", "tokens kept", "mean per digit", *(f"depth {100 * d:.0f} %" for d in DEPTHS)])
    for name in [BASE, *args.types.split(",")]:
        run = Run(args, name)
        prose = read_tokens(run, args, args.windows * args.context)
        found: list[list[float]] = []
        for context in range(args.windows):
            keys = PassKeys(run.llm, context)
            asked = max(len(question) + len(answer) for question, answer in keys.questions)
            tokens = keys.hidden_in(prose[context * args.context :], args.context - asked)
            scores = []
            for question, answer in keys.questions:
                # The text is read once; what a question adds is taken back before the next one.
                if not scores:
                    run.read(tokens)
                run.llm.n_tokens = len(tokens)
                run.go_on(question)
                scores.append(float(run.go_on(answer)[np.arange(len(answer)), answer].mean()))
            found.append(scores)
        kept, size = run.kept(), run.size()
        run.llm.close()
        by_depth = np.mean(found, axis=0)
        print_row([name, size, kept, f"{by_depth.mean():.3f}", *(f"{x:.2f}" for x in by_depth)])


def alignment(args: argparse.Namespace) -> None:
    run = Run(args, args.types.split(",")[0], logits_all=False)
    run.read(read_tokens(run, args, args.context * 3 // 4))
    rows = run.llm.kv.compact_alignment(args.keep)
    parts = sorted({(row.start, row.stop) for row in rows})
    layers = sorted({row.layer for row in rows})
    found = {(row.layer, row.start): row.divergence for row in rows}
    table = np.array([[found[layer, start] for start, _ in parts] for layer in layers])
    print_head(["layer", *(f"{start} - {stop - 1}" for start, stop in parts)])
    for layer, line in zip(layers, table, strict=True):
        print_row([str(layer), *(f"{x:.3f}" for x in line)])
    print_row(["mean", *(f"{x:.3f}" for x in table.mean(axis=0))])
    if args.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(table, aspect="auto", cmap="viridis")
        axes.set_xticks(range(len(parts)), [str(start) for start, _ in parts])
        axes.set(xlabel="position", ylabel="layer", title=f"divergence when compacted to {args.keep:g}")
        figure.colorbar(image, label="nats")
        figure.savefig(args.plot, dpi=150)


def speed(args: argparse.Namespace) -> None:
    names = args.types.split(",")
    print_head(["type", "tokens kept", "reading, s", "ratio", "decoding, ms a token", "ratio"])
    runs = [Run(args, name, logits_all=False) for name in names]
    tokens = read_tokens(runs[0], args, args.context)
    first = args.context - args.tokens
    steps = [(start, min(first, start + MICRO_BATCH)) for start in range(0, first, MICRO_BATCH)]
    turns = [(start, min(args.context, start + STEP)) for start in range(first, args.context, STEP)]
    seconds = np.zeros((2, len(runs)))
    for _ in range(args.rounds):
        for run in runs:
            run.restart()
        for n, (start, stop) in enumerate([*steps, *turns]):
            order = list(range(len(runs)))
            for i in order if n % 2 else order[::-1]:
                decoding = start >= first
                begun = time.perf_counter()
                for at in range(start, stop, 1 if decoding else MICRO_BATCH):
                    runs[i].llm.eval(tokens[at : at + 1 if decoding else stop])
                seconds[int(decoding), i] += time.perf_counter() - begun
    reading, decoding = seconds / args.rounds
    for i, name in enumerate(names):
        ratios = [f"{x[i] / x[0]:.4f}" for x in (reading, decoding)]
        cells = [f"{reading[i]:.2f}", ratios[0], f"{1000 * decoding[i] / args.tokens:.2f}", ratios[1]]
        print_row([name, runs[i].kept(), *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (text, needle, alignment, speed):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("model")
        command.add_argument("text", help="a file of prose")
        command.add_argument("--types", default="fp4_csa2" if function is alignment else "q4_0,fp4_csa2,fp4_csa2_ced")
        command.add_argument("--context", type=int, default=4096)
        command.add_argument("--threads", type=int, default=2)
        if function is alignment:
            command.add_argument("--keep", type=float, default=0.5)
            command.add_argument("--plot", help="a PNG to draw, with matplotlib")
        elif function is speed:
            command.add_argument("--rounds", type=int, default=3)
        else:
            command.add_argument(
                "--windows", type=int, default=2, help="parts of the text, each of which fills a context"
            )
        if function in (text, speed):
            command.add_argument(
                "--tokens", type=int, default=256, help="last tokens of a context, which are scored or decoded"
            )
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
