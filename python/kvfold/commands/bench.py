"""``kvfold bench``: measure, sweep threads, and report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ..config import KvConfig
from ..models import resolve
from ..progress import Progress
from ..units import count_text, table
from .options import MODEL_HELP, count, counts, positive, positives

_TYPES = "f16,q8_0,q4_0,fp4,fp4_csa2"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the parsers. ``bench threads`` and ``bench report`` reach them as ``bench-threads`` and ``bench-report``."""
    parser = commands.add_parser(
        "bench",
        help="measure memory, speed and accuracy (also: bench threads, bench report)",
        description="Run every context with every kv type and number of threads, each in a process of its own, and "
        "keep the results as JSON. 'kvfold bench threads MODEL' finds the best number of threads; 'kvfold bench report "
        "FILE...' makes tables and plots and compares results.",
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "-c", "--ctx-sizes", type=counts, default=[1024, 4096], metavar="N,...", help="contexts (default: 1k,4k)"
    )
    parser.add_argument(
        "--kv-types", default=_TYPES, metavar="TYPE,...", help=f"kv types, compared with f16 (default: {_TYPES})"
    )
    parser.add_argument("-t", "--threads", type=positives, metavar="N,...", help="threads (default: physical cores)")
    parser.add_argument("-ub", "--ubatch-sizes", type=positives, default=[512], metavar="N,...", help="micro-batches")
    parser.add_argument("-n", "--decode", type=positive, default=32, metavar="N", help="tokens to decode")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0, metavar="N", help="layers on the GPU (-1: all)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="prose to read (default: a public-domain book)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="keep the results as JSON in this file")
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout")
    parser.set_defaults(action=run)

    parser = commands.add_parser("bench-threads", prog="kvfold bench threads", description="Sweep threads.")
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("-t", "--threads", type=positives, metavar="N,...", help="numbers to try")
    parser.add_argument("-c", "--ctx-size", type=count, default=512, metavar="N", help="context")
    parser.add_argument("--kv-type", default="fp4_csa2", metavar="TYPE", help="kv type")
    parser.add_argument("-n", "--decode", type=positive, default=32, metavar="N", help="tokens to decode")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0, metavar="N", help="layers on the GPU (-1: all)")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(action=run_threads)

    parser = commands.add_parser("bench-report", prog="kvfold bench report", description="Show stored results.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results; others are held to the first")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.md", help="write there, plots beside it")
    parser.add_argument("--plot", action="store_true", help="also draw memory, speed and accuracy (needs matplotlib)")
    parser.set_defaults(action=run_report)


def _configs(text: str) -> tuple[KvConfig, ...]:
    return tuple(KvConfig(name) for name in text.split(","))


def run(arguments: argparse.Namespace) -> None:
    """Measure."""
    from ..bench.report import markdown
    from ..bench.sweep import Sweep, run_sweep
    from ..threads import default_threads

    configs = _configs(arguments.kv_types)
    path = resolve(arguments.model, _say)
    sweep = Sweep(
        path,
        tuple(arguments.ctx_sizes),
        configs,
        tuple(arguments.threads or [default_threads()]),
        tuple(arguments.ubatch_sizes),
        arguments.decode,
        arguments.gpu_layers,
        arguments.text,
    )
    stored = run_sweep(sweep, Progress(quiet=arguments.json), _command())
    if arguments.output:
        _write(arguments.output, json.dumps(stored, indent=1) + "\n")
    print(json.dumps(stored) if arguments.json else markdown(stored))


def _command() -> list[str]:
    """The command line as others can repeat it: without the folders of this machine."""
    words = ["kvfold", *(Path(word).name if "/" in word else word for word in sys.argv[1:])]
    return [shlex.quote(word) for word in words]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None


def run_threads(arguments: argparse.Namespace) -> None:
    """Sweep threads and recommend."""
    from ..bench.sweep import RunFailed, recommend_threads, run_one, thread_counts
    from ..verify.report import BUNDLED_TEXT

    path = resolve(arguments.model, _say)
    text = Path(__file__).resolve().parent.parent / "data" / BUNDLED_TEXT
    tried = arguments.threads or thread_counts()
    base = {
        "model": str(path),
        "text": str(text),
        "kv": KvConfig(arguments.kv_type).to_dict(),
        "n_ctx": arguments.ctx_size,
        "n_decode": arguments.decode,
        "n_ubatch": 512,
        "n_gpu_layers": arguments.gpu_layers,
        "logits": None,
    }
    runs: list[dict[str, Any]] = []
    with Progress(quiet=arguments.json).task(f"{len(tried)} numbers of threads", len(tried)) as advance:
        for threads in tried:
            try:
                result = run_one({**base, "n_threads": threads})
            except RunFailed as error:
                raise ValueError(f"{threads} threads: {error}") from None
            runs.append({"n_threads": threads, "prefill": result["prefill"], "decode": result["decode"]})
            advance(1)
    best = recommend_threads(runs)
    if arguments.json:
        print(json.dumps({"model": path.name, "runs": runs, "recommended": best}))
        return
    rows = [[str(r["n_threads"]), f"{r['prefill']:.1f}", f"{r['decode']:.1f}"] for r in runs]
    print(table(["threads", "prefill t/s", "decode t/s"], rows))
    where = f"{count_text(arguments.ctx_size)} tokens of context, {arguments.kv_type}"
    print(f"recommended: {best} (the fewest within 5 % of the best decode speed; {where})")


def run_report(arguments: argparse.Namespace) -> None:
    """Render and compare."""
    from ..bench.report import compare, load, markdown, plot

    results = [load(path) for path in arguments.files]
    pages = []
    for path, stored in zip(arguments.files, results, strict=True):
        picture = None
        if arguments.plot:
            folder = arguments.output.parent if arguments.output else path.parent
            picture = folder / f"{path.stem}.png"
            plot(stored, picture)
            _say(f"drew {picture}")
        pages.append(markdown(stored, picture.name if picture else None))
    for path, stored in zip(arguments.files[1:], results[1:], strict=True):
        pages.append(compare(results[0], stored, (arguments.files[0].name, path.name)))
    text = "\n".join(pages)
    if arguments.output:
        _write(arguments.output, text)
    else:
        print(text)
