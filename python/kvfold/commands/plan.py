"""``kvfold plan``: what fits, and the best settings."""

from __future__ import annotations

import argparse
import json
import sys

from ..models import resolve
from ..presets import PRESETS, find
from .options import MODEL_HELP, add_kv_options, count, kv_config, positive, size


def add(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the parser."""
    parser = commands.add_parser(
        "plan",
        help="what a model and its cache take, and what fits",
        description="Sizes of weights, cache and compute buffers before anything is loaded, and the best settings for "
        "a memory. Without --vram: the GPU's free memory, or the machine's where there is no GPU.",
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--vram", type=size, metavar="SIZE", help="GPU memory to plan for, as 8GiB")
    parser.add_argument("--ram", type=size, metavar="SIZE", help="memory of the machine to plan for")
    parser.add_argument("-c", "--ctx", "--ctx-size", dest="n_ctx", type=count, metavar="N", help="context, as 64k")
    parser.add_argument("--preset", metavar="NAME", help=f"plan for a preset: {', '.join(PRESETS)}")
    add_kv_options(parser, None)
    parser.add_argument(
        "-ngl", "--gpu-layers", dest="n_gpu_layers", type=int, metavar="N", help="layers on the GPU (-1: all, 0: none)"
    )
    parser.add_argument("-b", "--batch-size", dest="n_batch", type=positive, metavar="N", help="batch")
    parser.add_argument("-ub", "--ubatch-size", dest="n_ubatch", type=positive, metavar="N", help="micro-batch")
    parser.add_argument("-np", "--parallel", type=positive, default=1, metavar="N", help="sequences at a time")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(action=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the plan."""
    from ..plan import Wishes, make_plan

    if arguments.preset is not None:
        preset = find(arguments.preset)
        for name, value in {**preset.arguments, "vram": preset.vram}.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, value)
    config = kv_config(arguments)
    path = resolve(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
    wishes = Wishes(
        config=config,
        n_ctx=arguments.n_ctx,
        n_gpu_layers=arguments.n_gpu_layers,
        n_batch=arguments.n_batch,
        n_ubatch=arguments.n_ubatch,
        n_seq=arguments.parallel,
    )
    plan = make_plan(path, wishes, vram=arguments.vram, ram=arguments.ram)
    print(json.dumps(plan.to_dict()) if arguments.json else plan)
