"""Runs the measurements, holds them against thresholds, and says what came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ..gguf_header import read_gguf_header
from ..progress import Progress
from ..units import count_text, table
from .measures import Setup, measure_alignment, measure_coherence, measure_needles, measure_text

#: The prose that is used without a text of one's own: in the public domain, see ``data/README.txt``.
BUNDLED_TEXT = "alice.txt"

MEASURES = ("text", "needle", "coherence")
#: Measured when asked for: slow, and it says why rather than whether a type is good enough.
ALIGNMENT = "alignment"


@dataclass(frozen=True)
class Thresholds:
    """What a type may cost before it fails.

    Attributes:
        kld: mean divergence from f16 in nats, over text. Products with quantised weights round activations, which alone
            makes up to about 0.005 of it; a plain 4-bit cache is at 0.05.
        ratio: perplexity, as a ratio to f16's.
        lost: share of the facts f16 finds that the type may lose; one is always allowed, since anything tips a model
            that is undecided.
        needle_loss: mean loss of the answers beyond f16's, in nats.
        coherence_kld: mean divergence over the last quarter of a continuation.
        repetition: share of repeated runs in a continuation beyond f16's. Where greedy texts part, how often each
            repeats itself is much luck; this is for caches that make a model stammer.
    """

    kld: float = 0.01
    ratio: float = 1.02
    lost: float = 0.1
    needle_loss: float = 0.1
    coherence_kld: float = 0.02
    repetition: float = 0.3


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        n_ctx: context of the text measurement; chunks: how many of them.
        lengths: contexts of the needles.
        prompt, length: tokens before the continuation, and of it.
        measures: which of ``MEASURES``, and ``ALIGNMENT``.
    """

    n_ctx: int = 2048
    chunks: int = 2
    lengths: tuple[int, ...] = (4096, 16384)
    prompt: int = 1024
    length: int = 256
    measures: tuple[str, ...] = MEASURES


@dataclass
class Result:
    """Numbers and verdict. ``checks``: name, value, limit and whether it passed."""

    setup: Setup
    numbers: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(check["passed"] for check in self.checks)

    def check(self, name: str, value: float, limit: float) -> None:
        """Add a check that ``value`` is at most ``limit``."""
        self.checks.append({"name": name, "value": value, "limit": limit, "passed": bool(value <= limit)})

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "model": str(self.setup.path),
            "kv": self.setup.config.to_dict(),
            "passed": self.passed,
            "checks": self.checks,
            "notes": self.notes,
            **self.numbers,
        }

    def __str__(self) -> str:
        rows = [
            [c["name"], f"{c['value']:.4f}", f"{c['limit']:.4f}", "ok" if c["passed"] else "FAILED"]
            for c in self.checks
        ]
        settings = ", ".join(f"{k}={v}" for k, v in self.setup.config.to_dict().items())
        lines = [f"{self.setup.path.name}, {settings}, against f16"]
        if rows:
            lines += ["", table(["", "is", "at most", ""], rows)]
        if needles := self.numbers.get("needles"):
            lines += ["", _needle_table(needles)]
        if alignment := self.numbers.get(ALIGNMENT):
            lines += ["", _alignment_table(alignment)]
        lines += ["", *[f"- {note}" for note in self.notes], "passed" if self.passed else "FAILED"]
        return "\n".join(lines)


def _needle_table(needles: list[dict[str, Any]]) -> str:
    def mark(found: bool) -> str:
        return "found" if found else "lost"

    rows = [
        [
            count_text(n["n_ctx"]),
            f"{100 * n['depth']:.0f} %",
            mark(n["found"]),
            mark(n["found_f16"]),
            f"{n['loss']:.3f}",
            f"{n['loss_f16']:.3f}",
        ]
        for n in needles
    ]
    return table(["facts in", "depth", "here", "f16", "loss", "f16 loss"], rows)


def _alignment_table(layers: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(layer["layer"]),
            f"{100 * layer['recalled']:.1f} %",
            f"{100 * layer['worst']:.1f} %",
            f"{layer['divergence']:.4f}",
            f"{layer['largest']:.3f}",
        ]
        for layer in layers
    ]
    return table(["layer", "attention found", "worst head", "divergence", "largest"], rows)


def bundled_text() -> str:
    """The bundled prose."""
    return (resources.files("kvfold") / "data" / BUNDLED_TEXT).read_text(encoding="utf-8")


def read_text(path: Path | None) -> str:
    """A user's text, or the bundled one.

    Raises:
        ValueError: it cannot be read.
    """
    if path is None:
        return bundled_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text {str(path)!r} cannot be read: {error}") from None


def verify(setup: Setup, job: Job, thresholds: Thresholds, text: str, progress: Progress) -> Result:
    """Measure and judge. Lengths beyond what the model was trained with are left out, with a note.

    Raises:
        ValueError: a text that is too short, or a type that the model cannot use.
    """
    trained = int(read_gguf_header(setup.path).arch("context_length") or 2**31)
    result = Result(setup)
    if "text" in job.measures:
        numbers = measure_text(setup, text, min(job.n_ctx, trained), job.chunks, progress)
        result.numbers["text"] = numbers
        result.check("text: divergence from f16 (nats)", numbers["kld"], thresholds.kld)
        result.check("text: perplexity / f16's", numbers["ratio"], thresholds.ratio)
    if "needle" in job.measures:
        lengths = sorted({min(n, trained) for n in job.lengths})
        if lengths != sorted(job.lengths):
            result.notes.append(f"the model was trained with {trained} tokens: no facts beyond")
        needles = measure_needles(setup, text, lengths, progress)
        result.numbers["needles"] = needles
        judge_needles(result, needles, thresholds)
    if "coherence" in job.measures:
        prompt = min(job.prompt, max(trained - job.length, 64))
        numbers = measure_coherence(setup, text, prompt, job.length, progress)
        result.numbers["coherence"] = numbers
        result.check("continuation: divergence at its end (nats)", numbers["kld_last"], thresholds.coherence_kld)
        more = numbers["repetition"] - numbers["repetition_f16"]
        result.check("continuation: repetition beyond f16's", more, thresholds.repetition)
    if ALIGNMENT in job.measures:
        result.numbers[ALIGNMENT] = measure_alignment(setup, text, min(job.n_ctx, trained), job.length, progress)
    return result


def judge_needles(result: Result, needles: list[dict[str, Any]], thresholds: Thresholds) -> None:
    """Hold facts that were lost, and the loss of the answers, against f16's."""
    known = [n for n in needles if n["found_f16"]]
    lost = sum(not n["found"] for n in known)
    result.check(f"needle: lost of the {len(known)} facts f16 finds", lost, max(1, int(thresholds.lost * len(known))))
    more = sum(n["loss"] - n["loss_f16"] for n in needles) / len(needles)
    result.check("needle: loss of the answers beyond f16's (nats)", more, thresholds.needle_loss)
    if not known:
        result.notes.append("f16 finds none of the facts: the needle test says nothing about this model")
