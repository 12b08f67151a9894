#!/usr/bin/env python3
"""Decode and prefill speed on a GPU by model shape, kv type and depth, with the bytes read and the bandwidth reached.

usage: gpu_decode.py --bin DIR [--shapes llama-1b,...] [--types f16,...] [--depths 0,8192,...] [--rounds 3]
                     [--repeats 3] [--tokens 64] [--prompt 0] [--folder DIR] [--json OUT.json]
                     [-- options for llama-bench]
       gpu_decode.py --bin DIR --check --check-model M.gguf --check-text FILE [--types fp4,...]

Models are synthetic (synth_gguf.py): the published dimensions, random Q4_0 weights. They are kept in --folder if given.
Every round runs every type once at every depth (one llama-bench process a type, every second round backwards), so that
a change of the machine's speed meets all types. A process measures --repeats times at every depth, as llama-bench does
by itself: the first time is slower, because kernels are loaded when they are first used. Tables show medians of all. A
type that fails, for example because memory runs out, is reported, the others go on, and the exit status is 1.

KV read  bytes of the cache that one token at this depth has to read: rows and scales, summaries (and their spreads if
         decoding looks up), exact rows. Layers with a sliding window count their window. When decoding looks up, how
         much it reads depends on the text: the largest share allowed is counted, so the bandwidth is an upper bound.
GB/s     KV read / (time a token at this depth - time at depth 0). At depth 0 attention has fixed costs, too; only what
         depth adds is compared.

--check compares outputs instead: llama-perplexity's KL divergence of a type from f16 on the GPU and on the CPU (-ngl 0,
no device), and of the GPU from the CPU with the same type, in micro-batches of 256 (prefill kernels) and of 8 (decode
kernels). It needs a real model, for the tokenizer. Exit status 1 if a type costs more on one of them, or if GPU and CPU
are too far apart (see below).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import decode
import gguf
import synth_gguf
from synth_gguf import SHAPES, Shape

SHAPES_MEASURED = ("llama-1b", "llama-3b", "llama-8b", "qwen3-4b", "qwen3-8b", "gemma3-4b")
TYPES = "f16,q8_0,q4_0,fp4,fp4_csa2/layers=dense,fp4_csa2"
DEPTHS = "0,8192,32768,65536,131072"
BASE = "f16"
BATCH = ["-ub", "2048", "-b", "2048"]

# -- bytes -------------------------------------------------------------------------------------------------------------

#: Values and bytes of a block of llama.cpp's types.
BLOCKS = {"f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_0": (32, 22), "q4_1": (32, 20), "q4_0": (32, 18)}
#: A folded row (docs/design.md): 64 values in 32 bytes, and 4 scales.
FOLDED = (64, 36)
GROUPS = {"fp4": 32, "fp4_csa2": 4}
TAIL, SINKS, WINDOW_TYPE = 128, 4, "f16"  # defaults of kv_tail, kv_sinks and kv_swa_type
# Look-up (fp4_csa2): the first layers stay dense; defaults of kv_lookup, kv_min_tokens and, on a GPU, kv_min_context.
DENSE_LAYERS, LOOKUP, MIN_TOKENS, MIN_CONTEXT = 2, 0.2, 256, 2**31 - 1


def row_bytes(block: tuple[int, int], values: int) -> int:
    return values // block[0] * block[1]


def layer_bytes(shape: Shape, settings: dict[str, str], cells: int, looks_up: bool) -> int:
    """Bytes of keys and values that one token reads in a layer that sees ``cells`` tokens."""
    width = shape.kv_heads * shape.head
    kv_type = settings["type"]
    if kv_type in BLOCKS:
        return 2 * cells * row_bytes(BLOCKS[kv_type], width)
    if kv_type not in GROUPS:
        raise SystemExit(f"kv type {kv_type!r}: bytes not known; possible: {', '.join([*BLOCKS, *GROUPS])}")
    group = int(settings.get("group", GROUPS[kv_type]))
    tail, sinks = int(settings.get("tail", TAIL)), int(settings.get("sinks", SINKS))
    # A group is folded when it has left the tail as a whole; sinks never are.
    end = max(0, cells - tail) // group * group
    far = max(0, end - sinks)
    groups = end // group - sinks // group if far else 0
    row = row_bytes(FOLDED, width)
    exact = 2 * (cells - far) * row_bytes(BLOCKS["f16"], width)
    summaries = groups * row
    if looks_up and cells >= int(settings.get("min_context", MIN_CONTEXT)):
        summaries += groups * 2 * shape.kv_heads  # a spread is an f16 a head
        share = float(settings.get("lookup", LOOKUP))
        read = max(int(share * far), int(settings.get("min_tokens", MIN_TOKENS)))
        # The summary of a chosen group is read once more, with its rows.
        if read < far:
            return exact + summaries + read * 2 * row + read // group * row
    return exact + summaries + far * 2 * row


def kv_bytes(shape: Shape, kv_type: str, cells: int) -> int:
    """Bytes of the cache that decoding one token reads when ``cells`` tokens are there."""
    settings = decode.settings_of(kv_type)
    modes = settings.get("layers", "auto")
    if modes not in ("auto", "dense"):
        raise SystemExit(f"kv type {kv_type!r}: bytes not known with layers={modes}; possible: auto, dense")
    window = {"type": settings.get("swa_type", WINDOW_TYPE) if settings["type"] in GROUPS else settings["type"]}
    total = 0
    for i in range(shape.layers):
        if shape.sees_all(i):
            looks_up = settings["type"] == "fp4_csa2" and modes == "auto" and i >= DENSE_LAYERS
            total += layer_bytes(shape, settings, cells, looks_up)
        else:
            total += layer_bytes(shape, window, min(cells, shape.window), False)
    return total


def bandwidth(size: int, speed: float, speed_at_0: float) -> float | None:
    """Bytes a second, from tokens a second at a depth and at depth 0; None where depth adds no time."""
    added = 1 / speed - 1 / speed_at_0
    return size / added if added > 0 else None


# -- tables ------------------------------------------------------------------------------------------------------------


def decode_table(shape: Shape, samples: decode.Samples, types: list[str], depths: list[int]) -> str:
    middle = decode.medians(samples)
    rows = []
    for depth in depths:
        for kv_type in types:
            speed = middle.get((kv_type, depth, "tg"))
            size = kv_bytes(shape, kv_type, depth)
            start = middle.get((kv_type, 0, "tg")) if depth else None
            rate = bandwidth(size, speed, start) if speed and start else None
            cells = [str(depth), kv_type, *speed_cells(middle, kv_type, depth, "tg"), f"{size / 1e6:.1f}"]
            rows.append([*cells, f"{rate / 1e9:.0f}" if rate else "-"])
    return decode.markdown(["depth", "type", "t/s", f"/ {BASE}", "KV read, MB", "GB/s"], rows)


def prefill_table(samples: decode.Samples, types: list[str], depths: list[int]) -> str:
    middle = decode.medians(samples)
    rows = [[str(d), t, *speed_cells(middle, t, d, "pp")] for d in depths for t in types]
    return decode.markdown(["depth", "type", "t/s", f"/ {BASE}"], rows)


def speed_cells(middle: dict[tuple[str, int, str], float], kv_type: str, depth: int, test: str) -> list[str]:
    speed, base = middle.get((kv_type, depth, test)), middle.get((BASE, depth, test))
    return [f"{speed:.1f}" if speed else "failed", f"{speed / base:.2f}" if speed and base else "-"]


# -- measuring ---------------------------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    """The first line a program prints; empty where it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return result.stdout.strip().split("\n")[0] if result.returncode == 0 else ""


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and the code."""
    gpu = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    commit = args.commit or output_of("git", "rev-parse", "--short", "HEAD")
    if not args.commit and output_of("git", "status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    # Where things lie on the machine is of no use to a reader.
    command = ["gpu_decode.py", *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]
    return {"gpu": gpu or "unknown", "commit": commit or "unknown", "command": command}


def require_gpu(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if rows and not rows[0].get("gpu_info") and not args.cpu:
        raise SystemExit(
            f"llama-bench in {args.bin} finds no GPU (backends: {rows[0].get('backends')}): build with "
            "CMAKE_ARGS=-DGGML_CUDA=ON, or pass --cpu to try the command without one"
        )


def make_model(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")  # an interrupted run must not leave half a model
        synth_gguf.write(SHAPES[name], str(part))
        part.rename(path)
    return path


def measure(args: argparse.Namespace, name: str, model: Path, record: dict[str, Any]) -> decode.Samples:
    """Run all rounds of one shape; ``record`` is saved after every run, because machines go away."""
    samples: decode.Samples = {}
    entry: dict[str, Any] = {"shape": name, "dimensions": SHAPES[name]._asdict(), "errors": []}
    record["shapes"].append(entry)
    options = ["-ngl", "0" if args.cpu else "99", *BATCH, *args.options]
    for index in range(args.rounds):
        for kv_type in args.types if index % 2 == 0 else reversed(args.types):
            rows, error = decode.llama_bench(
                args.bin, str(model), kv_type, args.depths, args.tokens, args.prompt, options, args.repeats
            )
            require_gpu(rows, args)
            decode.add_samples(samples, kv_type, rows)
            if error:
                print(error, file=sys.stderr, flush=True)
                entry["errors"].append({"type": kv_type, "round": index, "error": error})
            if rows:
                record["build"] = {key: rows[0].get(key) for key in ("build_commit", "backends", "gpu_info")}
            entry["rows"] = decode.sample_rows(samples)
            for row in entry["rows"]:
                row["kv_bytes"] = kv_bytes(SHAPES[name], row["type"], row["depth"])
            save(args, record)
    return samples


def save(args: argparse.Namespace, record: dict[str, Any]) -> None:
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1))


def benchmark(args: argparse.Namespace) -> int:
    for name in args.shapes:
        for kv_type in args.types:
            kv_bytes(SHAPES[name], kv_type, 0)  # a type that is not known should not be found out after an hour
    record: dict[str, Any] = {**describe(args), "shapes": []}
    print(f"{record['gpu']}; commit {record['commit']}; `{' '.join(record['command'])}`", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.shapes:
            model = make_model(name, folder)
            samples = measure(args, name, model, record)
            if args.tokens:
                print(f"\n{name}, decode of {args.tokens} tokens\n")
                print(decode_table(SHAPES[name], samples, args.types, args.depths), flush=True)
            if args.prompt:
                print(f"\n{name}, prefill of {args.prompt} tokens\n")
                print(prefill_table(samples, args.types, args.depths), flush=True)
            if not args.folder:
                model.unlink()
    return 1 if any(entry["errors"] for entry in record["shapes"]) else 0


# -- check -------------------------------------------------------------------------------------------------------------

CHECK_CONTEXT, CHECK_CHUNKS = 1024, 2
CHECK_MICRO_BATCHES = (256, 8)
#: GPU and CPU add up in another order, the GPU multiplies small batches of F32 weights in TF32, and with quantised
#: weights activations are rounded to 8 bits before every product: f16's own divergence (printed, upstream's code) shows
#: what all that does. Rows that differ by so little are now and then rounded to another FP4 value. So a folding type on
#: one device must be nearer to itself on the other than this share of what it costs against f16 ...
NEARER = 0.5
#: ... and must cost the same on both within so many standard errors.
ERRORS = 3.0


def has_f32_weights(model: str) -> bool:
    tensors = gguf.GGUFReader(model).tensors
    return all(t.tensor_type == gguf.GGMLQuantizationType.F32 for t in tensors if len(t.shape) > 1)


def agree(apart: float, on_cpu: tuple[float, float], on_gpu: tuple[float, float]) -> bool:
    """Whether a type does the same on GPU and CPU.

    Args:
        apart: divergence of the GPU from the CPU.
        on_cpu: divergence from f16 there, and its standard error.
        on_gpu: the same on the GPU.
    """
    near = apart <= NEARER * on_cpu[0]
    return near and abs(on_gpu[0] - on_cpu[0]) <= ERRORS * math.hypot(on_cpu[1], on_gpu[1])


def mean_kld(output: str) -> tuple[float, float]:
    """The mean KL divergence that llama-perplexity reports, and its standard error."""
    found = re.search(r"Mean +KLD: +(-?(?:nan|inf|[0-9.]+)) +\S+ +(-?(?:nan|inf|[0-9.]+))", output)
    if not found:
        raise SystemExit(f"llama-perplexity reports no mean KLD:\n{output[-2000:]}")
    return float(found[1]), float(found[2])


def check(args: argparse.Namespace) -> int:
    types = [t for t in args.types if t.startswith("fp4")]
    if not types:
        raise SystemExit("--check needs an fp4 type in --types")
    cpu, gpu = ["-ngl", "0", "-dev", "none"], ["-ngl", "99"]
    if args.cpu:
        gpu = cpu

    with tempfile.TemporaryDirectory() as temporary:

        def perplexity(where: list[str], kv_type: str, micro_batch: int, logits: str, compare: bool) -> str:
            command = [str(Path(args.bin) / "llama-perplexity"), "-m", args.check_model, "-f", args.check_text]
            command += ["-c", str(CHECK_CONTEXT), "--chunks", str(CHECK_CHUNKS), "-fa", "on", "-b", "256"]
            command += ["-ub", str(micro_batch), *where, *decode.type_flags(kv_type)]
            path = str(Path(temporary) / logits)
            command += ["--kl-divergence-base", path, *(["--kl-divergence"] if compare else []), *args.options]
            result = decode.execute(command)
            if result.returncode != 0:
                raise SystemExit(decode.failure(result))
            return result.stdout + result.stderr

        def divergence(where: list[str], kv_type: str, micro_batch: int, logits: str) -> tuple[float, float]:
            return mean_kld(perplexity(where, kv_type, micro_batch, logits, True))

        rows, bad = [], []
        for size in CHECK_MICRO_BATCHES:
            perplexity(cpu, BASE, size, "f16-cpu", False)
            perplexity(gpu, BASE, size, "f16-gpu", False)
            noise, _ = divergence(gpu, BASE, size, "f16-cpu")
            rows.append([str(size), BASE, "", "", f"{noise:.6f}", ""])
            for kv_type in types:
                perplexity(cpu, kv_type, size, "type-cpu", False)
                apart, _ = divergence(gpu, kv_type, size, "type-cpu")
                on_cpu = divergence(cpu, kv_type, size, "f16-cpu")
                on_gpu = divergence(gpu, kv_type, size, "f16-gpu")
                same = agree(apart, on_cpu, on_gpu)
                costs = [f"{mean:.6f} ± {error:.6f}" for mean, error in (on_cpu, on_gpu)]
                rows.append([str(size), kv_type, *costs, f"{apart:.6f}", "yes" if same else "NO"])
                if not same:
                    bad.append(f"{kv_type} in micro-batches of {size}: {', '.join(costs)}, apart {apart:.6f}")
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    weights = "F32" if has_f32_weights(args.check_model) else "quantised"
    machine = describe(args)
    print(f"{machine['gpu']}; commit {machine['commit']}; {Path(args.check_model).name}, {weights} weights; KLD\n")
    print(decode.markdown(["micro-batch", "type", "from f16, CPU", "from f16, GPU", "GPU from CPU", "same"], rows))
    for text in bad:
        print(f"GPU and CPU differ: {text}", file=sys.stderr)
    return 1 if bad else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="folder with llama-bench and llama-perplexity")
    parser.add_argument("--shapes", default=",".join(SHAPES_MEASURED))
    parser.add_argument("--types", default=TYPES, help="fp4_csa2/layers=dense: a type with settings of its own")
    parser.add_argument("--depths", default=DEPTHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="measurements a depth in every llama-bench process")
    parser.add_argument("--tokens", type=int, default=64, help="decoded at every depth; 0: no decoding")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of prefill at every depth; 0: none")
    parser.add_argument("--folder", help="where models are kept (default: a temporary folder)")
    parser.add_argument("--json", help="keeps every sample, saved after every run")
    parser.add_argument("--commit", help="of the measured sources, where there is no git")
    parser.add_argument("--cpu", action="store_true", help="no GPU: only to try this script")
    parser.add_argument("--check", action="store_true", help="compare outputs with the CPU's instead")
    parser.add_argument("--check-model", help="a small real model, best with F32 weights (dequantize_gguf.py)")
    parser.add_argument("--check-text", help=f"prose of {CHECK_CONTEXT * CHECK_CHUNKS} tokens at least")
    own, options = decode.split_options(argv)
    args = parser.parse_args(own)
    args.options = options
    args.shapes, args.types = args.shapes.split(","), args.types.split(",")
    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"--shapes: {name!r} is not known; possible: {', '.join(SHAPES)}")
    try:
        args.depths = [int(d) for d in args.depths.split(",")]
    except ValueError:
        parser.error(f"--depths: {args.depths!r} is no list of numbers")
    for program in ["llama-perplexity" if args.check else "llama-bench"]:
        if not (Path(args.bin) / program).exists():
            parser.error(f"--bin: no {program} in {args.bin}")
    if args.check and not (args.check_model and args.check_text):
        parser.error("--check needs --check-model and --check-text")
    return args


def main() -> int:
    args = parse(sys.argv[1:])
    return check(args) if args.check else benchmark(args)


if __name__ == "__main__":
    sys.exit(main())
