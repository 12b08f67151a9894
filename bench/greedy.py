#!/usr/bin/env python3
"""Greedy text of a GPU beside the CPU's, prompt by prompt.

usage: greedy.py MODEL.gguf TEXT.txt [--kv-type fp4_csa2] [--prompts 10] [--tokens 200] [--least 9] [--cpu-texts FILE]

TEXT is cut into as many excerpts as prompts are asked for, spread evenly; each is continued. Excerpts are long enough
(--characters) for most of their tokens to be folded before the first new one. The CPU runs in a process that sees no
GPU. A model with F32 weights (dequantize_gguf.py) shows the cache alone: with quantised weights the two devices round
activations differently, and f16 differs as often. --cpu-texts keeps what the CPU wrote, and takes it from there if the
file exists. Exit status 1 if fewer than --least texts are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


def excerpts(text: str, count: int, characters: int) -> list[str]:
    """``count`` pieces of ``text`` spread evenly, each cut between words."""
    if len(text) < count * characters:
        raise SystemExit(f"the text has {len(text)} characters, {count} prompts of {characters} were asked for")
    step = (len(text) - characters) // max(count - 1, 1)
    return [text[i * step : i * step + characters].split(" ", 1)[-1].rsplit(" ", 1)[0] for i in range(count)]


def complete(args: argparse.Namespace) -> list[str]:
    """The continuations, on whatever this process sees."""
    from kvfold import Llama

    llm = Llama(
        args.model, n_ctx=args.context, n_gpu_layers=args.gpu_layers, kv_type=args.kv_type, seed=0, verbose=False
    )
    texts = []
    for prompt in excerpts(Path(args.text).read_text(), args.prompts, args.characters):
        answer = llm.create_completion(prompt, max_tokens=args.tokens, temperature=0.0)
        texts.append(answer["choices"][0]["text"])
    return texts


def run(gpu_layers: int) -> list[str]:
    environment = {**os.environ, **({} if gpu_layers else {"CUDA_VISIBLE_DEVICES": ""})}
    command = [sys.executable, __file__, *sys.argv[1:], "--gpu-layers", str(gpu_layers)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{'the GPU' if gpu_layers else 'the CPU'}: exit status {result.returncode}")
    return [str(text) for text in json.loads(result.stdout.splitlines()[-1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--kv-type", default="fp4_csa2")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--characters", type=int, default=3000, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--least", type=int, default=9, help="texts that must be equal")
    parser.add_argument("--cpu-texts", type=Path, help="JSON; made if it is not there")
    parser.add_argument("--cpu-only", action="store_true", help="make --cpu-texts and stop")
    parser.add_argument("--gpu-layers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gpu_layers is not None:
        print(json.dumps(complete(args)))
        return 0
    if args.cpu_texts and args.cpu_texts.exists():
        on_cpu = json.loads(args.cpu_texts.read_text())
    else:
        on_cpu = run(0)
        if args.cpu_texts:
            args.cpu_texts.write_text(json.dumps(on_cpu))
    if args.cpu_only:
        return 0
    on_gpu = run(99)
    for index, (cpu, gpu) in enumerate(zip(on_cpu, on_gpu, strict=True)):
        same = next((i for i, (a, b) in enumerate(zip(cpu, gpu, strict=False)) if a != b), min(len(cpu), len(gpu)))
        verdict = "equal" if cpu == gpu else f"differ after {same} of {len(cpu)} characters"
        print(f"{index}: {verdict}: {cpu[:60]!r}")
    equal = sum(cpu == gpu for cpu, gpu in zip(on_cpu, on_gpu, strict=True))
    print(f"{args.kv_type}: {equal} of {len(on_cpu)} equal")
    return 0 if equal >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
