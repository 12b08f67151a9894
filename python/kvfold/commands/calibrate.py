"""``kvfold calibrate``: which layers have to read how much, for a model and the user's texts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..models import resolve
from ..progress import Progress
from .options import MODEL_HELP, add_kv_options, count, kv_settings, positive


def add(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the parser."""
    from ..calibrate.run import Job

    job = Job()
    parser = commands.add_parser(
        "calibrate",
        help="find what each layer of a model has to read (fp4_csa2, on the CPU)",
        description="Measure look-ups layer by layer on texts of one's own, choose a schedule that reads as much as "
        "the default and loses less, check it on tokens that were not measured, and write a file for --kv-calibration.",
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="texts like those the model will read")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("-o", "--output", type=Path, metavar="FILE", help="the file to write")
    target.add_argument(
        "--check", type=Path, metavar="FILE", help="hold such a file against the default on these texts"
    )
    add_kv_options(parser, "fp4_csa2")
    parser.add_argument("-c", "--ctx-size", type=count, default=job.n_ctx, metavar="N", help="context of each text")
    parser.add_argument(
        "--length", type=positive, default=job.length, metavar="N", help="tokens of it to measure, and as many to check"
    )
    parser.add_argument("--share", type=float, metavar="X", help="what all layers may read (default: as by default)")
    parser.add_argument("-t", "--threads", type=positive, metavar="N", help="threads")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(action=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, write, report."""
    from ..calibrate.run import Job, calibrate, compare, comparison
    from ..calibration import write_calibration
    from ..config import KvConfig
    from ..verify.report import read_text

    if arguments.share is not None and not 0 < arguments.share < 1:
        raise ValueError(f"--share {arguments.share}: must be above 0 and below 1")
    given = kv_settings(arguments)
    for name in ("kv_layers", "kv_lookup", "kv_calibration"):
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} is what a calibration finds; leave it out")
    config = KvConfig.from_kwargs(**{"kv_type": "fp4_csa2", **given})
    texts = [read_text(path) for path in arguments.texts]
    path = resolve(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
    job = Job(arguments.ctx_size, arguments.length, arguments.share)
    progress = Progress(quiet=arguments.json)
    if arguments.check:
        found = compare(path, config, job, texts, arguments.check, progress, arguments.threads)
        print(json.dumps({"model": str(path), "check": found}) if arguments.json else comparison(found))
        return
    result = calibrate(path, config, job, texts, progress, arguments.threads)
    write_calibration(arguments.output, result.calibration)
    print(json.dumps({"file": str(arguments.output), **result.to_dict()}) if arguments.json else result)
