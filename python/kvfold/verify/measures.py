"""The three measurements, each on a pair of contexts: f16, and the type that is verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import KvConfig
from ..progress import Progress
from .scoring import REFERENCE, distributions, divergence, extend, open_model, tokenize

if TYPE_CHECKING:
    from ..llama import Llama


@dataclass(frozen=True)
class Setup:
    """What is compared: a model, a type, and how to run them."""

    path: Path
    config: KvConfig
    n_threads: int | None = None
    n_gpu_layers: int = 0


class Pair:
    """Two contexts of one length on the same model. Use as a context manager."""

    def __init__(self, setup: Setup, n_ctx: int) -> None:
        self.reference = open_model(setup.path, REFERENCE, n_ctx, setup.n_threads, setup.n_gpu_layers)
        try:
            self.tested = open_model(setup.path, setup.config, n_ctx, setup.n_threads, setup.n_gpu_layers)
        except BaseException:
            self.reference.close()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.reference.close()
        self.tested.close()


# -- text --------------------------------------------------------------------------------------------------------------


def measure_text(setup: Setup, text: str, n_ctx: int, chunks: int, progress: Progress) -> dict[str, Any]:
    """Perplexity of both, and the divergence of the tested type, over the second half of each chunk of the text.

    Returns:
        ``tokens`` scored, ``perplexity`` and ``perplexity_f16``, their ``ratio``; ``kld`` (mean, nats), ``kld_median``,
        ``kld_p99``; ``same_top``: share of positions whose most probable token is the same.
    """
    loss, loss_f16, klds, same = [], [], [], []
    with Pair(setup, n_ctx) as pair:
        tokens = tokenize(pair.reference, text)
        start, body = tokens[:1], tokens[1:]
        step = n_ctx - len(start)
        chunks = max(1, min(chunks, len(body) // step))
        if len(body) < step // 2:
            raise ValueError(f"the text has {len(tokens)} tokens; contexts of {n_ctx} need {step // 2} at least")
        with progress.task(f"text: {chunks} x {n_ctx} tokens", chunks * n_ctx) as advance:
            for chunk in range(chunks):
                piece = start + body[chunk * step : (chunk + 1) * step]
                scored = len(piece) // 2
                targets = np.array([*piece[1:], -1])
                both = zip(
                    distributions(pair.reference, piece, scored),
                    distributions(pair.tested, piece, scored),
                    strict=True,
                )
                advance(scored)
                for (at, p), (_, q) in both:
                    rows = np.arange(len(p))
                    wanted = targets[at : at + len(p)]
                    rows, wanted = rows[wanted >= 0], wanted[wanted >= 0]
                    loss_f16.append(-p[rows, wanted])
                    loss.append(-q[rows, wanted])
                    klds.append(divergence(p, q))
                    same.append(p.argmax(axis=-1) == q.argmax(axis=-1))
                    advance(len(p))
    kld = np.concatenate(klds)
    perplexity, perplexity_f16 = (float(np.exp(np.concatenate(x).mean())) for x in (loss, loss_f16))
    return {
        "tokens": len(kld),
        "n_ctx": n_ctx,
        "perplexity": perplexity,
        "perplexity_f16": perplexity_f16,
        "ratio": perplexity / perplexity_f16,
        "kld": float(kld.mean()),
        "kld_median": float(np.median(kld)),
        "kld_p99": float(np.quantile(kld, 0.99)),
        "same_top": float(np.concatenate(same).mean()),
    }


# -- needles -----------------------------------------------------------------------------------------------------------

#: Who has which locker. Numbers cannot be guessed, names do not occur in the text.
_NEEDLES = (
    ("Marta Velling", "4817"),
    ("Ossian Brandt", "2093"),
    ("Tilda Quarrick", "7360"),
    ("Edmund Sorrel", "5142"),
    ("Hanne Ploughright", "9628"),
)
_FACT = "The locker of {name} has the number {number}."


def measure_needles(setup: Setup, text: str, lengths: list[int], progress: Progress) -> list[dict[str, Any]]:
    """Facts hidden in a long text at five depths, and asked for at its end, for every length.

    All questions follow the text, each with its true answer behind it, token by token as in a conversation. A fact
    counts as found when every token of its answer is the most probable one.

    Returns:
        by length and depth: ``n_ctx``, ``depth`` (0 to 1), ``found`` and ``found_f16``, and the mean loss of the
        answer's tokens, ``loss`` and ``loss_f16`` (nats).
    """
    results = []
    for n_ctx in lengths:
        with Pair(setup, n_ctx) as pair, progress.task(f"needles in {n_ctx} tokens", 2) as advance:
            found = []
            for llm in (pair.reference, pair.tested):
                haystack = hide_needles(llm, text, n_ctx)
                haystack.read(llm)
                found.append(haystack.ask(llm))
                advance(1)
        for (depth, hit_f16, loss_f16), (_, hit, loss) in zip(*found, strict=True):
            results.append(
                {
                    "n_ctx": n_ctx,
                    "depth": depth,
                    "found": hit,
                    "found_f16": hit_f16,
                    "loss": loss,
                    "loss_f16": loss_f16,
                }
            )
    return results


@dataclass(frozen=True)
class Haystack:
    """A text with facts in it and questions behind it.

    Attributes:
        tokens: all of it.
        answers: first and last (exclusive) place of each fact's answer; the fact is at the same fraction of the text.
    """

    tokens: list[int]
    answers: list[tuple[int, int]]

    @property
    def first(self) -> int:
        """The token that is asked from: with what comes after it the first answer begins."""
        return self.answers[0][0] - 1

    def read(self, llm: Llama) -> None:
        """Evaluates everything before the questions, in a cleared context."""
        for _ in distributions(llm, self.tokens[: self.first], self.first):
            pass

    def ask(self, llm: Llama) -> list[tuple[float, bool, float]]:
        """Evaluates the questions, token by token as in a conversation, in a context that holds what ``read`` leaves.

        Returns:
            for every fact: depth (0 to 1), whether it is found, and the mean loss of its answer's tokens (nats).
        """
        first = self.first
        rows = np.concatenate([r for _, r in extend(llm, self.tokens[first:], first, first, step=1)])
        return [
            ((i + 0.5) / len(self.answers), *_answered(rows, self.tokens, span, first))
            for i, span in enumerate(self.answers)
        ]


def hide_needles(llm: Llama, text: str, n_ctx: int) -> Haystack:
    """The text with its needles and the questions behind it, filling ``n_ctx``."""
    tail: list[int] = []
    spans = []
    for name, number in _NEEDLES:
        question, answer = _FACT.format(name=name, number=number).split(number)
        # The blank before a number belongs to the question in some tokenizers and to the answer in others.
        whole = tokenize(llm, "\n" + question + number, start=False)
        asked = tokenize(llm, "\n" + question.rstrip(), start=False)
        spans.append((len(tail) + len(asked), len(tail) + len(whole)))
        tail += whole + tokenize(llm, answer, start=False)
    facts = [tokenize(llm, " " + _FACT.format(name=n, number=k), start=False) for n, k in _NEEDLES]
    hay = tokenize(llm, text)
    room = n_ctx - len(tail) - sum(map(len, facts))
    if room < 64:
        raise ValueError(f"needles need contexts of more than {n_ctx} tokens")
    while len(hay) < room:
        hay += hay[1:]
    hay = hay[:room]
    tokens: list[int] = []
    done = 0
    for i, fact in enumerate(facts):
        place = int(room * (i + 0.5) / len(facts))
        tokens += hay[done:place] + fact
        done = place
    tokens += hay[done:]
    offset = len(tokens)
    return Haystack(tokens + tail, [(offset + a, offset + b) for a, b in spans])


def _answered(rows: Any, tokens: list[int], span: tuple[int, int], first: int) -> tuple[bool, float]:
    """Whether every token of an answer is the most probable one, and the mean loss of them."""
    places = np.arange(*span)
    predictions = rows[places - 1 - first]
    wanted = np.array(tokens)[places]
    hit = bool((predictions.argmax(axis=-1) == wanted).all())
    return hit, float(-predictions[np.arange(len(wanted)), wanted].mean())


# -- alignment ---------------------------------------------------------------------------------------------------------


def measure_alignment(setup: Setup, text: str, n_ctx: int, length: int, progress: Progress) -> list[dict[str, Any]]:
    """How much of the attention look-ups find while the last ``length`` of ``n_ctx`` tokens are read one by one.

    Contexts of any length look up, unless the settings say from where on they do.

    Returns:
        by layer: ``layer``; ``recalled``: mean share of the exact attention that is read, ``worst``: of the worst head;
        ``divergence``: mean of the attention (nats), ``largest``: of a token and head.
    """
    least = setup.config.min_context
    config = setup.config.merged(kv_alignment=True, kv_min_context=1 if least is None else least)
    llm = open_model(setup.path, config, n_ctx, setup.n_threads, setup.n_gpu_layers)
    try:
        tokens = tokenize(llm, text)[:n_ctx]
        first = max(len(tokens) - length, 0)
        with progress.task(f"alignment over {len(tokens) - first} tokens", len(tokens) - first) as advance:
            for _ in distributions(llm, tokens, first, step=1):
                advance(1)
        rows = [row for row in llm.kv.alignment() if row.tokens]
    finally:
        llm.close()
    layers = sorted({row.layer for row in rows})
    found = []
    for layer in layers:
        heads = [row for row in rows if row.layer == layer]
        found.append(
            {
                "layer": layer,
                "recalled": float(np.mean([h.recalled for h in heads])),
                "worst": min(h.recalled for h in heads),
                "divergence": float(np.mean([h.divergence for h in heads])),
                "largest": max(h.largest for h in heads),
            }
        )
    return found


# -- coherence ---------------------------------------------------------------------------------------------------------


def measure_coherence(setup: Setup, text: str, prompt: int, length: int, progress: Progress) -> dict[str, Any]:
    """A long continuation, token by token, as a reply is made.

    f16 continues a piece of the text greedily; the tested type gets the same tokens, and its distributions are compared
    at every position: errors that feed on themselves would grow. It also writes a continuation of its own.

    Returns:
        ``kld``: mean divergence; ``kld_first``, ``kld_last``: of the first and last quarter; ``repetition`` and
        ``repetition_f16``: share of runs of four tokens that occurred before; ``same_until``: tokens after which the
        two continuations differ.
    """
    with Pair(setup, prompt + length) as pair:
        tokens = tokenize(pair.reference, text)[:prompt]
        with progress.task(f"continuation of {length} tokens", 3 * length) as advance:
            start = [_last_row(llm, tokens) for llm in (pair.reference, pair.tested)]
            written, rows = [], list(start)
            klds = []
            for _ in range(length):
                klds.append(float(divergence(rows[0], rows[1])[0]))
                written.append(int(rows[0][0].argmax()))
                at = len(tokens) + len(written) - 1
                if at + 1 >= prompt + length:
                    break
                rows = [next(extend(llm, written[-1:], at, 0))[1] for llm in (pair.reference, pair.tested)]
                advance(2)
            own = _continue(pair.tested, tokens, len(written), advance)
    quarter = max(len(klds) // 4, 1)
    same = next((i for i, (a, b) in enumerate(zip(written, own, strict=True)) if a != b), len(own))
    return {
        "prompt": len(tokens),
        "tokens": len(written),
        "kld": float(np.mean(klds)),
        "kld_first": float(np.mean(klds[:quarter])),
        "kld_last": float(np.mean(klds[-quarter:])),
        "repetition": repetition(own),
        "repetition_f16": repetition(written),
        "same_until": same,
    }


def _last_row(llm: Llama, tokens: list[int]) -> Any:
    ((_, rows),) = distributions(llm, tokens, len(tokens) - 1)
    return rows


def _continue(llm: Llama, tokens: list[int], length: int, advance: Any) -> list[int]:
    row = _last_row(llm, tokens)
    written: list[int] = []
    while True:
        written.append(int(row[0].argmax()))
        if len(written) == length:
            return written
        ((_, row),) = extend(llm, written[-1:], len(tokens) + len(written) - 1, 0)
        advance(1)


def repetition(tokens: list[int], n: int = 4) -> float:
    """Share of runs of ``n`` tokens that occurred before."""
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
