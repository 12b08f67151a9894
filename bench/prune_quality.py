#!/usr/bin/env python3
"""What dropping tokens costs (kv type fp4_csa2_ced), by share kept and by score.

    prune_quality.py text MODEL.gguf TEXT [--types T,...] [--context 4096] [--tokens 256] [--windows 2]
    prune_quality.py needle MODEL.gguf TEXT [--types T,...] [--context 4096] [--windows 2]

text    divergence of the next-token distributions from those of f16, and ratio of the perplexities, over the last
        tokens of windows of the text that fill the context: given 16 at a time, few enough for a look-up
needle  log-probability of pass keys that were told at four depths of a text that fills the context, per digit, when
        they are asked for at its end; each of the contexts has other keys. What is asked is not known while the text
        is read.

A type is a name, with settings behind a colon: fp4_csa2_ced:kv_keep=0.5:kv_score=keydiff+vnorm. Decoding reads
everything unless a type sets kv_min_context (2^30 is the default here). Prints Markdown. For small differences take
F32 weights (bench/dequantize_gguf.py).
"""

from __future__ import annotations

import argparse
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

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        from kvfold import Llama

        given: dict[str, Any] = dict(settings_of(name))
        if "kv_min_context" in given:
            given["kv_min_context"] = int(given["kv_min_context"])
        batch = {"n_batch": MICRO_BATCH, "n_ubatch": MICRO_BATCH, "n_threads": args.threads}
        self.llm = Llama(
            args.model, n_ctx=args.context, flash_attn=True, logits_all=True, verbose=False, **batch, **given
        )

    def restart(self) -> None:
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()

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
            run.restart()
            run.llm.eval(window[:first])
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


def needle(args: argparse.Namespace) -> None:
    names = ["red", "green", "white", "black"]
    print_head(["type", "cache / f16", "tokens kept", "mean per digit", *(f"depth {100 * d:.0f} %" for d in DEPTHS)])
    for name in [BASE, *args.types.split(",")]:
        run = Run(args, name)
        tokenize = run.llm.tokenize
        prose = read_tokens(run, args, args.windows * args.context)
        found: list[list[float]] = []
        for context in range(args.windows):
            rng = np.random.default_rng(context)
            keys = ["".join(map(str, rng.integers(0, 10, 5))) for _ in DEPTHS]
            told = [
                f" The {n} pass key is {k}. Remember it: {k} is the {n} pass key."
                for n, k in zip(names, keys, strict=True)
            ]
            needles = [tokenize(t.encode(), add_bos=False) for t in told]
            asked = [
                tokenize(f"\nWhat is the {n} pass key? The {n} pass key is ".encode(), add_bos=False) for n in names
            ]
            answers = [tokenize(k.encode(), add_bos=False) for k in keys]
            room = (
                args.context
                - sum(map(len, needles))
                - max(len(q) + len(a) for q, a in zip(asked, answers, strict=True))
            )
            body = prose[context * args.context :][:room]
            tokens: list[int] = []
            for start, stop, n in zip((0.0, *DEPTHS), (*DEPTHS, 1.0), [*needles, []], strict=True):
                tokens += body[int(start * room) : int(stop * room)] + n
            scores = []
            for question, answer in zip(asked, answers, strict=True):
                # The text is read once; what a question adds is taken back before the next one.
                if not scores:
                    run.restart()
                    run.llm.eval(tokens)
                run.llm.n_tokens = len(tokens)
                run.go_on(question)
                scores.append(float(run.go_on(answer)[np.arange(len(answer)), answer].mean()))
            found.append(scores)
        kept, size = run.kept(), run.size()
        run.llm.close()
        by_depth = np.mean(found, axis=0)
        print_row([name, size, kept, f"{by_depth.mean():.3f}", *(f"{x:.2f}" for x in by_depth)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (text, needle):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("model")
        command.add_argument("text", help="a file of prose")
        command.add_argument("--types", default="q4_0,fp4_csa2,fp4_csa2_ced")
        command.add_argument("--context", type=int, default=4096)
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--windows", type=int, default=2, help="parts of the text, each of which fills a context")
        if function is text:
            command.add_argument("--tokens", type=int, default=256, help="last tokens of a window, which are scored")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
