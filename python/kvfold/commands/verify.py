"""``kvfold verify``: does a kv type keep what the model knows?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..models import resolve
from ..progress import Progress
from .options import MODEL_HELP, add_kv_options, count, counts, kv_settings, positive

#: Exit code of a type that failed; 1 is an error.
FAILED = 2


def add(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the parser."""
    from ..verify.report import MEASURES, Job, Thresholds

    job, limits = Job(), Thresholds()
    parser = commands.add_parser(
        "verify",
        help="compare a kv type with f16 on this model",
        description="Perplexity and divergence on prose, facts found again at several depths, and a long continuation, "
        f"against f16. Exit code 0: passed, {FAILED}: failed, 1: error.",
    )
    parser.add_argument("model", help=MODEL_HELP)
    add_kv_options(parser, "fp4_csa2")
    parser.add_argument("--text", type=Path, metavar="FILE", help="prose to use (default: a public-domain book)")
    parser.add_argument("-c", "--ctx-size", type=count, default=job.n_ctx, metavar="N", help="context of the text")
    parser.add_argument("--chunks", type=positive, default=job.chunks, metavar="N", help="contexts of text")
    parser.add_argument(
        "--needle-lengths", type=counts, default=list(job.lengths), metavar="N,...", help="contexts that hide facts"
    )
    parser.add_argument("--prompt", type=positive, default=job.prompt, metavar="N", help="tokens before a continuation")
    parser.add_argument("--length", type=positive, default=job.length, metavar="N", help="tokens of the continuation")
    parser.add_argument("--only", metavar="NAME,...", help=f"measurements to make: {', '.join(MEASURES)}")
    parser.add_argument(
        "--alignment",
        action="store_true",
        help="also: what look-ups find of the attention, by layer (fp4_csa2 on the CPU; slow)",
    )
    parser.add_argument("--max-kld", type=float, default=limits.kld, metavar="X", help="limit of the divergence")
    parser.add_argument("--max-ratio", type=float, default=limits.ratio, metavar="X", help="limit of the perplexity")
    parser.add_argument("-t", "--threads", type=positive, metavar="N", help="threads")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0, metavar="N", help="layers on the GPU (-1: all)")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(action=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from ..config import LOOKUP_TYPES, KvConfig
    from ..verify.measures import Setup
    from ..verify.report import ALIGNMENT, MEASURES, Job, Thresholds, read_text, verify

    config = KvConfig.from_kwargs(**{"kv_type": "fp4_csa2", **kv_settings(arguments)})
    measures = tuple(arguments.only.split(",")) if arguments.only else MEASURES
    for name in measures:
        if name not in (*MEASURES, ALIGNMENT):
            raise ValueError(f"--only {name!r} is unknown; possible: {', '.join((*MEASURES, ALIGNMENT))}")
    if arguments.alignment and ALIGNMENT not in measures:
        measures = (*measures, ALIGNMENT)
    if ALIGNMENT in measures and (config.kv_type not in LOOKUP_TYPES or config.lookup == (1, 1)):
        raise ValueError("--alignment measures look-ups; it needs --kv-type fp4_csa2 and a --kv-lookup below 1")
    path = resolve(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
    job = Job(
        arguments.ctx_size,
        arguments.chunks,
        tuple(arguments.needle_lengths),
        arguments.prompt,
        arguments.length,
        measures,
    )
    limits = Thresholds(kld=arguments.max_kld, ratio=arguments.max_ratio)
    setup = Setup(path, config, arguments.threads, arguments.gpu_layers)
    result = verify(setup, job, limits, read_text(arguments.text), Progress(quiet=arguments.json))
    print(json.dumps(result.to_dict()) if arguments.json else result)
    return 0 if result.passed else FAILED
