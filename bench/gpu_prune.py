#!/usr/bin/env python3
"""What a GPU keeps of a text beside what the CPU keeps: by every score, and after compacting.

usage: gpu_prune.py MODEL.gguf TEXT.txt [--context 1024] [--keep 0.5] [--least 0.9]

The text, cut to the context, is read with ``fp4_csa2_ced`` and each score, and into ``fp4_csa2``, which is then
compacted. The CPU runs in a process that sees no GPU. Printed is which share of the positions that one device has
dropped the other has dropped too, and how far ``compact_alignment`` is apart. A model with F32 weights
(dequantize_gguf.py) shows the cache alone. Which groups go at the edge hangs on roundings, and what was dropped changes
what is scored later. Exit status 1 if a share is below --least, or if nothing was dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCORES = ("keydiff+attn", "snapkv", "entropy", "snapkv+entropy")


def dropped(llm: Any, n: int) -> list[int]:
    """Positions below ``n`` that the cache lacks."""
    from kvfold import _core

    counts = [_core.evicted(llm._ctx.ctx, 0, end) for end in range(n + 1)]
    return [p for p in range(n) if counts[p + 1] > counts[p]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Dropped positions by score, and the report of compacting, on whatever this process sees."""
    from kvfold import Llama

    def read(**settings: Any) -> tuple[Any, int]:
        llm = Llama(args.model, n_ctx=args.context, n_gpu_layers=-1, seed=0, verbose=False, **settings)
        # room for the parts of a second reading
        tokens = llm.tokenize(Path(args.text).read_bytes())[: args.context - 128]
        llm.eval(tokens)
        return llm, len(tokens)

    found: dict[str, Any] = {}
    for score in SCORES:
        llm, n = read(kv_type="fp4_csa2_ced", kv_keep=args.keep, kv_score=score, kv_tail=32)
        found[score] = dropped(llm, n)
        llm.close()
    llm, n = read(kv_type="fp4_csa2")
    found["alignment"] = [(row.recalled, row.divergence) for row in llm.kv.compact_alignment(keep=args.keep)]
    llm.kv.compact(keep=args.keep)
    found["compact"] = dropped(llm, n)
    llm.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--least", type=float, default=0.9)
    parser.add_argument("--only-measure", action="store_true", help="print what this process finds, as JSON")
    args = parser.parse_args()
    if args.only_measure:
        print(json.dumps(measure(args)))
        return 0
    cpu = json.loads(
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only-measure"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    )
    gpu = measure(args)
    good = True
    for what in (*SCORES, "compact"):
        there, here = set(cpu[what]), set(gpu[what])
        share = len(there & here) / max(len(there), len(here), 1)
        good &= share >= args.least
        print(f"{what}: dropped {len(there)} on the CPU, {len(here)} on the GPU, {100 * share:.1f} % of them the same")
    for i, name in enumerate(("recalled", "divergence")):
        apart = max(abs(a[i] - b[i]) for a, b in zip(cpu["alignment"], gpu["alignment"], strict=True))
        print(f"compact_alignment: {name} at most {apart:.4f} apart, by part and layer")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
