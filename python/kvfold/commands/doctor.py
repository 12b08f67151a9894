"""``kvfold doctor``: what is wrong, why, and what helps."""

from __future__ import annotations

import argparse
import json
import sys

from ..models import resolve
from .options import MODEL_HELP, add_kv_options, count, kv_settings

#: Exit code when something does not work; 1 is an error of the command.
FAILED = 2


def add(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the parser."""
    parser = commands.add_parser(
        "doctor",
        help="find out what is wrong",
        description="Check the installation; with MODEL also whether a kv type works with it here; with --server a "
        f"running llama-server. Exit code 0, or {FAILED} when something does not work.",
    )
    parser.add_argument("model", nargs="?", help=MODEL_HELP)
    parser.add_argument("--server", metavar="URL", help="address of a llama-server")
    parser.add_argument("--api-key", metavar="KEY", help="its API key")
    parser.add_argument(
        "-c", "--ctx-size", type=count, metavar="N", help="context (default: the best for this machine)"
    )
    parser.add_argument("--no-load", action="store_true", help="do not load the model")
    add_kv_options(parser, "fp4_csa2")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(action=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and report."""
    from .. import doctor
    from ..config import KvConfig

    config = KvConfig.from_kwargs(**{"kv_type": "fp4_csa2", **kv_settings(arguments)})
    findings = []
    if not arguments.server:
        findings += doctor.check_installation()
    else:
        findings += doctor.check_server(arguments.server, arguments.api_key)
    if arguments.model and doctor.worst(findings) != doctor.FAIL:
        path = resolve(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
        findings += doctor.check_model(path, config, arguments.ctx_size, load=not arguments.no_load)
    if arguments.json:
        print(json.dumps(doctor.to_dict(findings)))
    else:
        print("\n".join(map(str, findings)))
    return FAILED if doctor.worst(findings) == doctor.FAIL else 0
