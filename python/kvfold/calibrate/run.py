"""Measures, chooses, checks, and says what came out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..calibration import Calibration, read_calibration, require_writer
from ..config import DEFAULT_LOOKUP, LOOKUP_TYPES, KvConfig
from ..gguf_header import read_gguf_header
from ..layer_modes import AUTO, compress
from ..progress import Progress
from ..stats import Alignment
from ..units import table
from .schedule import Curve, allocate
from .study import STEP, Measured, Study

#: Largest shares that are tried in all layers at once.
BUDGETS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7)
#: What a layer reads at least, of its own largest share too.
LEAST = 0.05
#: What one layer reads, alone among dense ones, to see how much the model depends on it.
PROBE = 0.03
#: A layer takes over the choice of the one before if that loses at most so much more of the attention.
_REUSE = 1.05
#: Reading nearly everything: what differs then is rounding.
_NOISE = "full:0.99"


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        n_ctx: context of each passage; length: tokens of it that are measured, and as many that are checked.
        share: what all layers together may read; ``None``: what they do by default.
    """

    n_ctx: int = 4096
    length: int = 64
    share: float | None = None


@dataclass
class Result:
    """The calibration and its numbers. ``notes``: what to know about them."""

    path: Path
    calibration: Calibration
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        found = self.calibration
        return {
            "model": str(self.path),
            "kv": found.settings(),
            "fingerprint": f"{found.fingerprint:016x}",
            "text_hash": found.text_hash,
            "n_ctx": found.n_ctx,
            "tokens": found.tokens,
            "notes": self.notes,
            **found.measured,
        }

    def __str__(self) -> str:
        found = self.calibration
        rows = [
            [
                str(layer["layer"]),
                layer["mode"],
                f"{100 * layer['read']:.1f} %",
                f"{100 * layer['recalled']:.1f} %",
                f"{100 * layer['worst']:.1f} %",
                f"{layer['alone']:.5f}",
            ]
            for layer in found.measured["layers"]
        ]
        lines = [
            f"{self.path.name}: {', '.join(f'{k}={v}' for k, v in found.settings().items())}",
            "",
            table(["layer", "mode", "read", "attention found", "worst head", "alone"], rows),
            "",
            comparison(found.measured["check"]),
            "",
            *[f"- {note}" for note in self.notes],
        ]
        return "\n".join(lines).rstrip()


def calibrate(
    path: Path,
    config: KvConfig,
    job: Job,
    texts: Sequence[str],
    progress: Progress,
    n_threads: int | None = None,
) -> Result:
    """Find a schedule of the layers for these texts.

    1. All layers with each of ``BUDGETS``: what a layer reads, and how much of the attention it finds.
    2. Each layer alone with very little: how far the next token's distribution then moves, which says what finding too
       little costs in this layer.
    3. The shares that cost least (``schedule.allocate``) and together read what the default does, or ``job.share``.
       What a layer loses is taken to grow as the square of the attention that it does not find.
    4. The schedule against the default, or the same share in every layer, on tokens that were not measured. One that
       is no better is not used.

    Raises:
        ValueError: texts that are too short, or a model or type without look-ups.
    """
    require_writer()
    with _study(path, config, job, texts, progress, n_threads) as study:
        measured = _Measurements(study, config, progress)
        base: dict[str, Any] = {"kv_layers": AUTO, "kv_lookup": config.lookup}
        share = job.share
        if share is not None:
            base = {"kv_layers": "full", "kv_lookup": (share, share)}
        else:
            share = read_share(study.measure(kv_alignment=True, **base))
        found, notes = _checked(config, study, measured, measured.modes(share), base, texts, progress)
        return Result(path, found, notes)


def compare(
    path: Path,
    config: KvConfig,
    job: Job,
    texts: Sequence[str],
    file: Path,
    progress: Progress,
    n_threads: int | None = None,
) -> dict[str, dict[str, float]]:
    """A calibration that was made before against the default schedule, on other texts.

    Returns:
        of ``default`` and ``calibrated``: ``read``, the share of the groups that all layers read, and ``kld``.

    Raises:
        ValueError: as ``calibrate``; a file that is no calibration, or one of another model.
    """
    config = config.merged(kv_group=read_calibration(file).group)
    found = {}
    with _study(path, config, job, texts, progress, n_threads) as study, progress.task("comparing", 2) as advance:
        for name, settings in (("default", {"kv_layers": AUTO}), ("calibrated", {"kv_calibration": str(file)})):
            run = study.measure(check=True, kv_alignment=True, **settings)
            found[name] = {"read": read_share(run), "kld": run.kld}
            advance(1)
    return found


def comparison(found: dict[str, dict[str, float]]) -> str:
    """What ``compare`` returns, as a table."""
    rows = [[name, f"{100 * check['read']:.1f} %", f"{check['kld']:.5f}"] for name, check in found.items()]
    return table(["checked", "read", "divergence"], rows)


def _study(
    path: Path, config: KvConfig, job: Job, texts: Sequence[str], progress: Progress, n_threads: int | None
) -> Study:
    """Passages of the texts, all of one length: that of the shortest text."""
    if config.kv_type not in LOOKUP_TYPES:
        raise ValueError(f"kv_type={config.kv_type!r} looks nothing up; possible: {', '.join(LOOKUP_TYPES)}")
    trained = int(read_gguf_header(path).arch("context_length") or 2**31)
    n_ctx = min(job.n_ctx, trained)
    study = Study(path, config, n_ctx, job.length, n_threads)
    try:
        _read(study, texts, n_ctx, progress)
    except BaseException:
        study.__exit__()
        raise
    return study


def _read(study: Study, texts: Sequence[str], n_ctx: int, progress: Progress) -> None:
    tokens = [study.tokenize(text) for text in texts]
    size = min(n_ctx, *map(len, tokens))
    least = 2 * study.length + 4 * int(study.config.tail or 1)
    if size < least:
        raise ValueError(f"a text has {size} tokens in a context of {n_ctx}; at least {least} are needed")
    with progress.task(f"reading {len(texts)} x {size} tokens", len(texts)) as advance:
        for piece in tokens:
            study.add(piece[:size])
            advance(1)


class _Measurements:
    """Everything that is measured before a schedule is chosen."""

    def __init__(self, study: Study, config: KvConfig, progress: Progress) -> None:
        grid = []
        with progress.task(f"all layers, {len(BUDGETS)} shares", len(BUDGETS) + 3) as advance:
            for budget in BUDGETS:
                lookup = (min(LEAST, budget), budget)
                grid.append(study.measure(kv_alignment=True, kv_layers="full", kv_lookup=lookup))
                advance(1)
            self.noise = study.measure(kv_layers=_NOISE, kv_threshold=0.0).kld
            advance(1)
            self.layers = sorted({row.layer for row in grid[0].heads})
            lookup = (LEAST, DEFAULT_LOOKUP[1])
            self.reused = []
            for pattern in ("(full,reuse)*", "full,(full,reuse)*"):
                runs = max((len(self.layers) - pattern.startswith("full")) // 2, 1)
                layers = f"{pattern}{runs}" if len(self.layers) > 2 else "full"
                self.reused.append(study.measure(kv_alignment=True, kv_layers=layers, kv_lookup=lookup))
                advance(1)
        self.grid = grid
        self.alone = []
        lost = []
        with progress.task(f"{len(self.layers)} layers, one at a time", len(self.layers)) as advance:
            for i, layer in enumerate(self.layers):
                modes = ["dense"] * len(self.layers)
                modes[i] = f"full:{PROBE}"
                probe = study.measure(kv_alignment=True, kv_layers=compress(modes), kv_threshold=0.0, kv_min_tokens=0)
                self.alone.append(max(probe.kld - self.noise, 0.0))
                lost.append(_lost(_of(probe, layer)))
                advance(1)
        # Below the noise a layer's own share of the divergence cannot be seen.
        least = max(0.1 * float(np.median(self.alone)), 1e-9)
        weights = [max(kld, least) / max(x, 1e-9) for kld, x in zip(self.alone, lost, strict=True)]
        self.curves = [
            Curve(
                BUDGETS,
                [_of(run, layer)[0].read for run in grid],
                [weight * _lost(_of(run, layer)) for run in grid],
            )
            for layer, weight in zip(self.layers, weights, strict=True)
        ]

    def modes(self, share: float) -> list[str]:
        """The schedule that reads ``share``."""
        budgets = allocate(self.curves, share)
        modes: list[str] = []
        for i, budget in enumerate(budgets):
            taken = i > 0 and modes[-1].startswith("full") and budgets[i - 1] >= budget and self._is_free(i)
            modes.append("dense" if budget >= 1 else "reuse" if taken else f"full:{budget:g}")
        return modes

    def _is_free(self, i: int) -> bool:
        """Whether the choice of the layer before does as well as the layer's own."""
        layer = self.layers[i]
        own = _of(self.grid[BUDGETS.index(DEFAULT_LOOKUP[1])], layer)
        # In one of the two runs the layer has taken over a choice: it has made none of its own.
        taken = [rows for run in self.reused if (rows := _of(run, layer))[0].read == 0]
        return bool(taken) and _missed(taken[0]) <= _REUSE * _missed(own)


def read_share(run: Measured) -> float:
    """Share of the groups that the layers read, dense ones and those that take over a choice included."""
    shares: list[float] = []
    for first in {row.layer: row for row in reversed(run.heads)}.values():
        shares.append(1.0 if first.tokens == 0 else first.read)
    shares.reverse()
    for i, share in enumerate(shares):
        shares[i] = share or shares[i - 1]
    return float(np.mean(shares))


def _of(run: Measured, layer: int) -> list[Alignment]:
    return [row for row in run.heads if row.layer == layer]


def _missed(heads: Sequence[Alignment]) -> float:
    """Share of the attention that is not found, mean of the heads."""
    return float(np.mean([1 - h.recalled for h in heads]))


def _lost(heads: Sequence[Alignment]) -> float:
    """Mean over heads of the square of what is not found."""
    return float(np.mean([(1 - h.recalled) ** 2 for h in heads]))


def _checked(
    config: KvConfig,
    study: Study,
    measured: _Measurements,
    modes: list[str],
    base: dict[str, Any],
    texts: Sequence[str],
    progress: Progress,
) -> tuple[Calibration, list[str]]:
    """Holds the schedule against the settings ``base`` on tokens that were not measured; the better one, and notes."""
    text = compress(modes)
    lookup: tuple[float, float] = (LEAST, DEFAULT_LOOKUP[1])
    with progress.task("checking the schedule", 2) as advance:
        plain = study.measure(check=True, kv_alignment=True, **base)
        advance(1)
        chosen = study.measure(check=True, kv_alignment=True, kv_layers=text, kv_lookup=lookup)
        advance(1)
    notes = []
    if measured.noise > 0.25 * plain.kld:
        notes.append(
            f"rounding alone makes a divergence of {measured.noise:.5f} here (quantised weights): smaller differences "
            "say nothing"
        )
    used = chosen
    if chosen.kld > plain.kld:
        text, lookup, used = base["kv_layers"], base["kv_lookup"], plain
        notes.append("the schedule that was found is no better than what it was held against: the file holds that")
    layers = []
    for i, layer in enumerate(measured.layers):
        heads = _of(used, layer)
        looks_up = heads[0].tokens > 0
        layers.append(
            {
                "layer": layer,
                "mode": modes[i] if used is chosen else "full" if looks_up else "dense",
                "read": heads[0].read if looks_up else 1.0,
                "recalled": 1 - _missed(heads) if looks_up else 1.0,
                "worst": min(h.recalled for h in heads) if looks_up else 1.0,
                "divergence": float(np.mean([h.divergence for h in heads])),
                "alone": measured.alone[i],
                "curve": {"read": list(measured.curves[i].read), "lost": list(measured.curves[i].lost)},
            }
        )
    numbers = {
        "layers": layers,
        "check": {
            "default" if base["kv_layers"] == AUTO else "same share in all layers": {
                "read": read_share(plain),
                "kld": plain.kld,
            },
            "calibrated": {"read": read_share(chosen), "kld": chosen.kld},
        },
        "noise": measured.noise,
        "budgets": list(BUDGETS),
        "step": STEP,
    }
    digest = hashlib.sha256()
    for piece in texts:
        digest.update(piece.encode())
    found = Calibration(
        fingerprint=study.fingerprint,
        model=study.model_name,
        kv_type=config.kv_type,
        group=int(config.group or 0),
        lookup=lookup,
        threshold=float(config.threshold or 0.0),
        min_tokens=int(config.min_tokens or 0),
        layers=text,
        text_hash=digest.hexdigest(),
        n_ctx=study.n_ctx,
        tokens=study.length,
        measured=numbers,
    )
    return found, notes
