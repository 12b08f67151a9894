"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..config import DEFAULT_SCORE, GROUPS, SCALE_GROUPS, SCORES, SWA_TYPES, KvConfig, kv_type_names, setting_names
from ..models import MODELS
from ..units import parse_count, parse_size

MODEL_HELP = f"a GGUF file, or one of {', '.join(MODELS)}"


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


def _told(parse: Callable[[str], int]) -> Callable[[str], int]:
    """A parser whose own message reaches the user."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


size = _told(parse_size)
count = _told(parse_count)


def _counts(text: str) -> list[int]:
    return [parse_count(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    """Numbers of tokens separated by commas, as ``4k,16k``."""
    try:
        return _counts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positives(text: str) -> list[int]:
    """Whole numbers from 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def add_kv_options(parser: argparse.ArgumentParser, default: str | None) -> None:
    """``--kv-type`` and the settings that go with it, ``None`` unless given; ``default`` is what the help says."""
    group = parser.add_argument_group("key/value cache")
    names = ", ".join(kv_type_names())
    told = f" (default: {default})" if default else ""
    group.add_argument("--kv-type", metavar="TYPE", help=f"{names}{told}")
    group.add_argument("--kv-group", type=int, metavar="N", help=f"tokens per group: {_groups_text()}")
    group.add_argument("--kv-tail", type=int, metavar="N", help="most recent tokens kept exact (default: 128)")
    group.add_argument("--kv-sinks", type=int, metavar="N", help="first tokens kept exact (default: 4)")
    group.add_argument("--kv-swa-type", metavar="TYPE", help=f"sliding-window layers: {', '.join(SWA_TYPES)}")
    group.add_argument(
        "--kv-scale-group",
        type=int,
        metavar="N",
        help=f"channels of a folded row that share a scale: {', '.join(map(str, SCALE_GROUPS))} "
        f"(default: {SCALE_GROUPS[0]})",
    )
    group.add_argument(
        "--kv-lookup",
        metavar="SHARE",
        help="fp4_csa2...: share of the folded groups that decoding reads, or MIN,MAX (default: 0.2)",
    )
    group.add_argument(
        "--kv-threshold",
        type=float,
        metavar="X",
        help="fp4_csa2: share of the attention that may stay unread between MIN and MAX (default: 0.1)",
    )
    group.add_argument(
        "--kv-min-tokens", type=int, metavar="N", help="fp4_csa2: folded tokens read at least (default: 256)"
    )
    group.add_argument(
        "--kv-max-tokens",
        type=int,
        metavar="N",
        help="fp4_csa2: folded tokens that a query reads at most, for each KV head (default: 0, no bound)",
    )
    group.add_argument(
        "--kv-min-context",
        type=int,
        metavar="N",
        help="fp4_csa2: shorter sequences are read whole (default: 4096, on a GPU all)",
    )
    group.add_argument(
        "--kv-layers",
        metavar="MODES",
        help="fp4_csa2: auto, or what each layer does, as dense*2,full:0.3,full (default: auto)",
    )
    group.add_argument(
        "--kv-calibration",
        metavar="FILE",
        help="fp4_csa2...: what 'kvfold calibrate' found for this model, as defaults of the options above",
    )
    group.add_argument(
        "--kv-hierarchical",
        metavar="WHEN",
        help="fp4_csa2: look at summaries of 128 tokens before those of groups: off, auto (beyond 65536 tokens), on "
        "(default: off)",
    )
    group.add_argument(
        "--kv-span-pool",
        type=int,
        metavar="N",
        help="fp4_csa2: groups that are left to choose from then (default: 16384)",
    )
    group.add_argument(
        "--kv-keep",
        type=float,
        metavar="SHARE",
        help="fp4_csa2_ced: share of the context that the cache has room for (default: 0.78)",
    )
    group.add_argument(
        "--kv-score",
        metavar="NAME",
        help=f"fp4_csa2_ced: which tokens go first: {', '.join(SCORES)}, or several as {DEFAULT_SCORE}, the default",
    )


def _groups_text() -> str:
    return "; ".join(f"{name} {', '.join(map(str, sorted(sizes)))}" for name, sizes in GROUPS.items())


def kv_settings(arguments: argparse.Namespace) -> dict[str, object]:
    """The cache settings that were given, by name."""
    values = {name: getattr(arguments, name, None) for name in setting_names()}
    return {name: value for name, value in values.items() if value is not None}


def kv_config(arguments: argparse.Namespace) -> KvConfig | None:
    """The cache settings that were given, ``None`` for none.

    Raises:
        ValueError: settings without a type, or impossible ones.
    """
    given = kv_settings(arguments)
    if given and "kv_type" not in given:
        raise ValueError(f"{', '.join(given)} needs --kv-type: {', '.join(GROUPS)}")
    return KvConfig.from_kwargs(**given) if given else None
