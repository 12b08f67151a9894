"""What a look-up of few groups costs in quality, on a real model, in NumPy.

A Llama-architecture model reads a prefix with exact keys and values; the prefix is then coded as a kvfold cache codes
it (FP4 differences to FP4 group means, exact first and last tokens), and the next tokens are evaluated with attention
over the groups that a rule selects. Printed for every rule: the Kullback-Leibler divergence of the next-token
distribution to that of exact, dense attention, the ratio of perplexities, and the share of the true far attention mass
that was read.

    sparse_quality.py study MODEL_F32.gguf TEXT --windows 2 --prefix 3840 --rules budget
    sparse_quality.py runtime MODEL_F32.gguf TEXT --bin DIR [--sets budget group ...] [--calibration FILE]
    sparse_quality.py after MODEL_F32.gguf TEXT --prefix 3840 --tokens 256 [--sets spans ...]
    sparse_quality.py needle MODEL.gguf TEXT --lengths 4096 16384 [--json FILE]

study    rules beside the one that the cache implements, on the tokens after a prefix
runtime  the cache itself: llama-perplexity in micro-batches of 8, which decode as far as the cache is concerned
after    the cache itself: tokens after a prefix, in micro-batches of 8; the prefix is read once and densely
needle   the cache itself: facts at several depths of a long text, as `kvfold verify` hides them, asked for at its end

MODEL_F32.gguf must hold float32 weights (bench/dequantize_gguf.py makes it). Needs gguf and kvfold (for the codec and
the tokenizer). Keys and values of the prefix are kept in --cache between runs.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from decode import execute, failure

# --- the model --------------------------------------------------------------------------------------------------------


class Model:
    """A Llama-architecture decoder with float32 weights."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        reader = GGUFReader(path)
        self.weights = {t.name: np.asarray(t.data, np.float32).reshape(t.data.shape) for t in reader.tensors}

        def setting(name: str) -> float:
            return reader.fields[f"llama.{name}"].contents()

        self.n_layer = int(setting("block_count"))
        self.n_head = int(setting("attention.head_count"))
        self.n_head_kv = int(setting("attention.head_count_kv"))
        self.dim = int(setting("embedding_length"))
        self.head_dim = self.dim // self.n_head
        self.eps = float(setting("attention.layer_norm_rms_epsilon"))
        self.base = float(setting("rope.freq_base"))

    @property
    def ratio(self) -> int:
        return self.n_head // self.n_head_kv

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        return x * scale * self.weights[name]

    def rope(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotates neighbouring pairs of channels of ``[n, heads, head_dim]``."""
        rate = self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angle = positions[:, None] * rate
        cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def run(self, tokens: np.ndarray, first: int, attend) -> np.ndarray:
        """Hidden states of ``tokens`` at positions ``first ...``; ``attend(layer, q, k, v)`` is the attention.

        q is ``[n, n_head, head_dim]``, k and v ``[n, n_head_kv, head_dim]``; it returns what q is like.
        """
        positions = first + np.arange(len(tokens))
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.n_layer):
            w = {n: self.weights[f"blk.{layer}.{n}.weight"] for n in WEIGHTS}
            h = self.norm(x, f"blk.{layer}.attn_norm.weight")
            q = self.rope((h @ w["attn_q"].T).reshape(len(tokens), self.n_head, -1), positions)
            k = self.rope((h @ w["attn_k"].T).reshape(len(tokens), self.n_head_kv, -1), positions)
            v = (h @ w["attn_v"].T).reshape(len(tokens), self.n_head_kv, -1)
            x = x + attend(layer, q, k, v).reshape(len(tokens), -1) @ w["attn_output"].T
            h = self.norm(x, f"blk.{layer}.ffn_norm.weight")
            gate = h @ w["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        return self.norm(x, "output_norm.weight")

    def log_probabilities(self, hidden: np.ndarray) -> np.ndarray:
        logits = hidden @ self.weights.get("output.weight", self.weights["token_embd.weight"]).T
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


WEIGHTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def prefix_rows(model: Model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a prefix under dense causal attention: ``[n_layer, n_head_kv, n, head_dim]`` each."""
    shape = (model.n_layer, model.n_head_kv, len(tokens), model.head_dim)
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    step = 512
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        end = start + len(part)
        future = np.arange(end)[None, :] > (start + np.arange(len(part)))[:, None]

        def attend(layer: int, q, k, v, start=start, end=end, future=future) -> np.ndarray:
            keys[layer, :, start:end], values[layer, :, start:end] = k.swapaxes(0, 1), v.swapaxes(0, 1)
            out = np.zeros_like(q)
            for head in range(model.n_head):
                kv = head // model.ratio
                score = q[:, head] @ keys[layer, kv, :end].T * np.float32(model.head_dim**-0.5)
                score[future] = -np.inf
                score = np.exp(score - score.max(axis=1, keepdims=True))
                out[:, head] = score @ values[layer, kv, :end] / score.sum(axis=1, keepdims=True)
            return out

        model.run(part, start, attend)
    return keys, values


# --- the cache --------------------------------------------------------------------------------------------------------


def hadamard(n: int) -> np.ndarray:
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h * np.float32(n**-0.5)


@dataclass
class Coded:
    """A prefix as the cache holds it; keys rotated. Groups are counted from position 0.

    keys, values    ``[n_layer, n_head_kv, n, head_dim]``, decoded
    summary         ``[n_layer, n_head_kv, n / m, head_dim]``, spread ``[n_layer, n_head_kv, n / m]``
    channel_spread  variance per channel, which the product does not store; here to see what it would buy
    """

    m: int
    keys: np.ndarray
    values: np.ndarray
    summary: np.ndarray
    spread: np.ndarray
    channel_spread: np.ndarray


def code(core, keys: np.ndarray, values: np.ndarray, m: int) -> Coded:
    def fp4(x: np.ndarray) -> np.ndarray:
        return core.fp4_decode(core.fp4_encode(np.ascontiguousarray(x)))

    turn = hadamard(64)
    shape = keys.shape

    def rotate(x: np.ndarray) -> np.ndarray:
        return (x.reshape(*shape[:-1], -1, 64) @ turn).reshape(shape)

    k, v = rotate(keys), rotate(values)
    groups = k.reshape(*shape[:2], shape[2] // m, m, shape[3])
    mean = groups.mean(axis=3)
    summary = fp4(mean)
    variance = ((groups - mean[:, :, :, None]) ** 2).mean(axis=3)
    spread = variance.mean(axis=-1).astype(np.float16).astype(np.float32)
    decoded = (summary[:, :, :, None] + fp4(groups - summary[:, :, :, None])).reshape(shape)
    return Coded(m, decoded, fp4(v), summary, spread, variance)


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How groups are selected; ``look`` None: all of them."""

    name: str
    m: int = 4
    look: tuple[float, float] | None = (0.2, 0.2)
    threshold: float = 0.0
    min_tokens: int = 0
    weight: float = 0.75  # of the spread term; 0.5 if keys spread alike in all channels
    combine: str = "probabilities"  # "log-sum-exp", "max"
    dense_layers: int = 0
    score: str = "spread"  # "channel" (variance per channel), "true" (exact masses), "two-stage"
    first_stage: float = 0.0  # two-stage: groups whose keys are read, as a multiple of `look`
    stand_in: float = 0.5  # share of the estimated unread mass that gets the mean value; 0: none
    most_stand_in: float = 1 / 16  # and at most this share of what is read
    mean: str = "read"  # of the values that are read (sinks too), of "all" far ones, or of "exact" ones
    shared_by: int = 1  # layers that use one selection
    pool: float = 1.0  # share of the spans of 128 tokens that are looked into at all
    span_score: str = "variance"  # what says which spans; see SparseAttention.spans
    sinks: int = 4
    tail: int = 128


def take(
    p: np.ndarray, seen: np.ndarray, rule: Rule, look: tuple[float, float], visible: np.ndarray | None = None
) -> np.ndarray:
    """Selected groups, bool ``[n_q, n_groups]``, from the logs of their estimated masses.

    Shares are of the groups ``seen`` per query, or of ``visible [n_q]`` where those are only a part.
    """
    n_q, n_groups = p.shape
    p = np.where(seen, p, -np.inf)
    with np.errstate(invalid="ignore"):
        bins = np.minimum(2047, np.floor(64 * (p.max(axis=1, keepdims=True) - p)))
    bins = np.where(seen, bins, 4096).astype(np.int64)
    order = np.argsort(bins * n_groups + (n_groups - 1 - np.arange(n_groups)), axis=1)
    candidates = seen.sum(axis=1)
    visible = candidates if visible is None else visible
    floor = -(-rule.min_tokens // rule.m)
    most, least = (
        np.minimum(candidates, np.maximum(np.ceil(np.float32(s) * visible.astype(np.float32)), floor)).astype(int)
        for s in (look[1], look[0])
    )
    mass = np.where(bins < 4096, np.exp(-bins / 64), 0)
    count = np.zeros(n_q, int)
    for i in range(n_q):
        per_bin = np.bincount(bins[i][seen[i]], minlength=2048) * np.exp(-np.arange(2048) / 64)
        rest = mass[i].sum() - np.cumsum(per_bin)
        last = int(np.argmax(rest <= rule.threshold * mass[i].sum() + 1e-12))
        count[i] = min(max(int((bins[i] <= last).sum()), least[i]), most[i])
    taken = np.zeros((n_q, n_groups), bool)
    np.put_along_axis(taken, order, np.arange(n_groups)[None, :] < count[:, None], axis=1)
    return taken


def combined(e: np.ndarray, seen: np.ndarray, how: str) -> np.ndarray:
    """``[ratio, n_q, n_groups]`` scores of the query heads of one KV head -> ``[n_q, n_groups]``."""
    e = np.where(seen, e, -np.inf)
    if how != "log-sum-exp":
        top = e.max(axis=2, keepdims=True)
        e = e - top - np.log(np.exp(e - top).sum(axis=2, keepdims=True))
    if how == "max":
        return e.max(axis=0)
    top = np.where(seen, e.max(axis=0), 0)
    with np.errstate(divide="ignore"):
        return top + np.log(np.exp(e - top).sum(axis=0))


def mean_value(of: str, far: np.ndarray, read: np.ndarray, causal: np.ndarray, values: tuple) -> np.ndarray:
    """Plain mean of values per query, ``[n_q, head_dim]``; ``values``: far and exact ones of the prefix, own ones."""
    cells = {"read": (far & read, ~far, causal), "all": (far, far & False, causal & False)}
    weights = cells.get(of, (far & False, ~far, causal))
    total = sum(w.astype(np.float32) @ v for w, v in zip(weights, values, strict=True))
    return total / sum(w.sum(axis=1) for w in weights)[:, None]


@dataclass
class Measures:
    recalled: list[np.ndarray]
    read: float = 0
    visible: float = 0


class SparseAttention:
    """Attention of evaluated tokens over a coded prefix and themselves, by a rule."""

    def __init__(self, model: Model, coded: Coded, keys: np.ndarray, values: np.ndarray, rule: Rule) -> None:
        self.model, self.coded, self.rule = model, coded, rule
        self.keys, self.values = keys, values  # exact, not rotated
        self.turn = hadamard(64)
        self.measures = Measures([])
        self.taken: dict[int, np.ndarray] = {}

    def rotate(self, x: np.ndarray) -> np.ndarray:
        return (x.reshape(*x.shape[:-1], -1, 64) @ self.turn).reshape(x.shape)

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        model, coded, rule = self.model, self.coded, self.rule
        n_q, n, m = len(q), self.keys.shape[2], coded.m
        scale = np.float32(model.head_dim**-0.5)
        position = n + np.arange(n_q)
        end = (np.arange(n // m) + 1) * m
        seen = (end[None, :] <= (position + 1 - rule.tail)[:, None]) & (end > rule.sinks)[None, :]  # [n_q, groups]
        far = np.repeat(seen, m, axis=1)  # cells of the prefix
        q, k, v = (self.rotate(x) for x in (q, k, v))
        causal = np.arange(n_q)[None, :] <= np.arange(n_q)[:, None]
        out = np.zeros_like(q)
        recalled = np.zeros((model.n_head, n_q), np.float32)
        for kv in range(model.n_head_kv):
            heads = slice(kv * model.ratio, (kv + 1) * model.ratio)
            qs = q[:, heads].swapaxes(0, 1)  # [ratio, n_q, head_dim]
            far_score = scale * (qs @ coded.keys[layer, kv].T)
            near_score = scale * (qs @ self.rotate(self.keys[layer, kv]).T)
            own_score = np.where(causal, scale * (qs @ k[:, kv].T), -np.inf)
            score = np.where(far, far_score, near_score)  # [ratio, n_q, n]
            sparse = rule.look is not None and layer >= rule.dense_layers
            if sparse:
                taken, estimate = self.select(layer, kv, qs, scale, seen, far_score)
                read = ~far | np.repeat(taken, m, axis=1)
                self.measures.read += taken.sum()
                self.measures.visible += seen.sum()
            else:
                read = np.ones_like(far)
            top = np.maximum(score.max(axis=2), own_score.max(axis=2))[..., None]
            weight, own = np.exp(score - top), np.exp(own_score - top)
            if sparse:
                far_mass = np.where(far, weight, 0).sum(axis=2)
                recalled[heads] = np.where(far & read, weight, 0).sum(axis=2) / far_mass
            weight = np.where(read, weight, 0)
            total = weight.sum(axis=2) + own.sum(axis=2)
            values = coded.values[layer, kv], self.rotate(self.values[layer, kv]), v[:, kv]
            mixed = np.where(far, weight, 0) @ values[0] + np.where(far, 0, weight) @ values[1] + own @ values[2]
            if sparse and rule.stand_in:
                with np.errstate(divide="ignore"):
                    rest = np.log(m * np.where(seen & ~taken, np.exp(estimate), 0).sum(axis=2))
                extra = np.minimum(rule.stand_in * np.exp(rest - top[..., 0]), rule.most_stand_in * total)
                mixed += extra[..., None] * mean_value(rule.mean, far, read, causal, values)
                total += extra
            out[:, heads] = (mixed / total[..., None]).swapaxes(0, 1)
        if sparse:
            self.measures.recalled.append(recalled)
        return self.rotate(out)

    def select(self, layer: int, kv: int, qs: np.ndarray, scale: np.float32, seen: np.ndarray, cells: np.ndarray):
        """Groups that are read, bool ``[n_q, groups]``, and log of what each should get, ``[ratio, n_q, groups]``."""
        rule, coded = self.rule, self.coded
        if (layer - rule.dense_layers) % rule.shared_by:
            # What the layer would make of its own groups is not known: nothing stands in.
            return self.taken[kv], np.full((len(qs), *seen.shape), -np.inf, np.float32)
        e = scale * (qs @ coded.summary[layer, kv].T)
        squares = (qs**2).sum(axis=2, keepdims=True) * scale**2
        if rule.score == "channel":
            e += rule.weight * scale**2 * (qs**2 @ coded.channel_spread[layer, kv].T)
        else:
            e += rule.weight * squares * coded.spread[layer, kv]
        by_group = cells.reshape(*cells.shape[:2], -1, coded.m)
        top = by_group.max(axis=3)
        true = top + np.log(np.exp(by_group - top[..., None]).mean(axis=3))
        if rule.score == "true":
            e = true
        if rule.score == "two-stage":
            wide = replace(rule, threshold=0.0)
            first = take(combined(e, seen, rule.combine), seen, wide, (rule.first_stage, rule.first_stage))
            # The exact scores of the first stage's groups, in competition among themselves.
            e = np.where(first, true, -1e4)
        within = seen if rule.pool == 1 else self.spans(layer, kv, qs * scale, seen, e, cells)
        taken = take(combined(e, within, rule.combine), within, rule, rule.look, seen.sum(axis=1))
        self.taken[kv] = taken
        return taken, e

    def spans(self, layer: int, kv: int, q: np.ndarray, seen: np.ndarray, e: np.ndarray, cells: np.ndarray):
        """The groups of ``seen`` that are in the best spans of 128 tokens, or in spans that are not seen as a whole.

        A span is worth what its tokens really get ("exact"), what a "sample" of every eighth group gets, or what the
        mean of its summaries says with half the "variance" of each channel, both in FP4 (two rows a span to be kept).
        """
        m = self.coded.m
        size, n = 128 // m, seen.shape[1] * m // 128
        whole = seen[:, : n * size].reshape(len(seen), n, size).all(axis=2)
        if self.rule.span_score == "variance":
            from kvfold import _runtime

            core = _runtime.load()
            keys = self.coded.summary[layer, kv][: n * size].reshape(n, size, -1)
            inner = self.coded.spread[layer, kv][: n * size].reshape(n, size).mean(axis=1)
            rows = keys.mean(axis=1), np.sqrt(keys.var(axis=1) + inner[:, None])
            mean, deviation = (core.fp4_decode(core.fp4_encode(np.ascontiguousarray(r))) for r in rows)
            score = q @ mean.T + 0.5 * (q**2 @ (deviation**2).T)
        else:
            exact = self.rule.span_score == "exact"
            members, size_of = (cells, 128) if exact else (e[:, :, 4::8], size // 8)
            per_span = members[:, :, : n * size_of].reshape(*e.shape[:2], n, size_of)
            top = per_span.max(axis=3)
            score = top + np.log(np.exp(per_span - top[..., None]).sum(axis=3))
        p = np.where(whole, combined(score, whole, self.rule.combine), -np.inf)
        order = np.argsort(-p, axis=1)
        chosen = np.zeros_like(whole)
        wanted = np.ceil(self.rule.pool * whole.sum(axis=1))
        np.put_along_axis(chosen, order, np.arange(n)[None, :] < wanted[:, None], axis=1)
        within = seen.copy()
        within[:, : n * size] &= np.repeat(chosen | ~whole, size, axis=1)
        return within


# --- runs -------------------------------------------------------------------------------------------------------------


def rule_sets() -> dict[str, list[Rule]]:
    dense = Rule("dense", look=None)
    sets: dict[str, list[Rule]] = {}
    sets["combine"] = [dense] + [
        Rule(f"m={m} {int(100 * b)} % {how}", m=m, look=(b, b), combine=how)
        for m in (4, 2)
        for b in (0.1, 0.2)
        for how in ("probabilities", "log-sum-exp", "max")
    ]
    sets["weight"] = [
        Rule(f"m={m} 15 % weight {w}", m=m, look=(0.15, 0.15), weight=w)
        for m in (4, 2)
        for w in (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
    ]
    sets["budget"] = [
        Rule(f"m={m} {int(100 * b)} %{' first two dense' if d else ''}", m=m, look=(b, b), dense_layers=d)
        for m in (2, 4, 8)
        for b in (0.05, 0.1, 0.15, 0.2)
        for d in (0, 2)
    ]
    sets["threshold"] = [
        Rule(f"m=4 {int(100 * a)}-{int(100 * b)} % threshold {t}", look=(a, b), threshold=t, dense_layers=2)
        for a, b in ((0.1, 0.2), (0.1, 0.3))
        for t in (0.05, 0.1, 0.15, 0.2, 0.3)
    ] + [Rule(f"m=4 20 % min_tokens {t}", min_tokens=t, dense_layers=2) for t in (256, 512, 1024)]
    sets["score"] = [
        Rule(f"m={m} {int(100 * b)} % {s}", m=m, look=(b, b), score=s)
        for m in (2, 4, 8)
        for b in (0.1, 0.2)
        for s in ("spread", "channel", "true")
    ]
    sets["two-stage"] = [
        Rule(
            f"m={m} keys {int(100 * w)} %, values {int(100 * b)} %", m=m, look=(b, b), score="two-stage", first_stage=w
        )
        for m in (4, 2)
        for w, b in ((0.2, 0.1), (0.3, 0.1), (0.2, 0.05), (0.25, 0.15), (0.3, 0.2), (0.4, 0.1))
    ]
    shares = (0.25, 0.375, 0.5)
    sets["stand-in"] = [
        Rule(
            f"m={m} {int(100 * b)} % {name}", m=m, look=(b, b), dense_layers=2, stand_in=share, most_stand_in=1, mean=of
        )
        for m in (2, 4)
        for b in (0.1, 0.2)
        for name, share, of in (
            ("nothing", 0.0, "read"),
            *((f"mean of what is read, {share}", share, "read") for share in shares),
            *((f"mean of all, {share}", share, "all") for share in shares),
            ("mean of exact rows, 0.5", 0.5, "exact"),
        )
    ]
    sets["spans"] = [Rule("m=4 10 %", look=(0.1, 0.1), dense_layers=2)] + [
        Rule(f"m=4 10 % within {int(100 * p)} % of spans, {s}", look=(0.1, 0.1), dense_layers=2, pool=p, span_score=s)
        for p in (0.25, 0.5)
        for s in ("exact", "sample", "variance")
    ]
    sets["reuse"] = [Rule(f"m=4 20 % one selection for {n} layers", shared_by=n, dense_layers=2) for n in (1, 2, 4, 7)]
    return sets


def study(options: argparse.Namespace) -> None:
    from kvfold import _runtime

    core = _runtime.load()
    model = Model(options.model)
    options.cache.mkdir(parents=True, exist_ok=True)
    n_windows = options.skip + options.windows
    ids = tokens_of(options, (options.prefix + options.tokens + 1) * n_windows)
    windows = ids.reshape(n_windows, -1)[options.skip :]
    rules = [rule for name in options.rules for rule in rule_sets()[name]]
    if options.stand_in is not None:
        rules = [replace(rule, stand_in=options.stand_in) for rule in rules]
    results: dict[str, list] = {rule.name: [] for rule in rules}
    for number, window in enumerate(windows):
        prefix, tokens = window[: options.prefix], window[options.prefix : -1]
        targets = window[options.prefix + 1 :]
        keys, values = cached_prefix(model, prefix, options.cache)
        exact = None
        codes: dict[int, Coded] = {}
        for rule in rules:
            if rule.m not in codes:
                codes = {rule.m: code(core, keys, values, rule.m)}
            if exact is None:
                nothing = replace(rule, look=None, tail=1 << 30)
                exact = model.log_probabilities(
                    model.run(tokens, options.prefix, SparseAttention(model, codes[rule.m], keys, values, nothing))
                )
                print(f"window {number}: perplexity {np.exp(-exact[np.arange(len(targets)), targets].mean()):.2f}")
            began = time.monotonic()
            attention = SparseAttention(model, codes[rule.m], keys, values, rule)
            got = model.log_probabilities(model.run(tokens, options.prefix, attention))
            divergence = (np.exp(exact) * (exact - got)).sum(axis=1)
            worse = (exact - got)[np.arange(len(targets)), targets]
            measures = attention.measures
            recalled = np.mean(measures.recalled) if measures.recalled else 1.0
            share = measures.read / measures.visible if measures.visible else 1.0
            results[rule.name].append((divergence, worse, recalled, share, (exact.argmax(1) == got.argmax(1))))
            print(
                f"  {rule.name}: KLD {1e3 * divergence.mean():.2f}e-3 recalled {100 * recalled:.1f} % "
                f"share {100 * share:.1f} % ({time.monotonic() - began:.1f} s)",
                flush=True,
            )
    print("\n| rule | groups read | mass recalled | KLD | PPL ratio | top-1 |\n|---|---|---|---|---|---|")
    for name, runs in results.items():
        divergence, worse, same = (np.concatenate([r[i] for r in runs]) for i in (0, 1, 4))
        error = 1e3 * divergence.std() / np.sqrt(len(divergence))
        print(
            f"| {name} | {100 * np.mean([r[3] for r in runs]):.1f} % | {100 * np.mean([r[2] for r in runs]):.1f} % | "
            f"{1e3 * divergence.mean():.2f}e-3 ± {error:.2f} | {np.exp(worse.mean()):.4f} | {100 * same.mean():.1f} % |"
        )


def tokens_of(options: argparse.Namespace, n: int) -> np.ndarray:
    from llama_cpp import Llama

    llm = Llama(str(options.model), vocab_only=True, verbose=False)
    ids = np.array(llm.tokenize(options.text.read_bytes(), add_bos=False))
    if len(ids) < n:
        raise SystemExit(f"{options.text}: {len(ids)} tokens, but {n} are needed; use fewer or shorter windows")
    return ids[:n]


def cached_prefix(model: Model, prefix: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    name = hashlib.sha256(prefix.tobytes() + str(model.dim).encode()).hexdigest()[:16]
    path = folder / f"{name}.npz"
    if not path.exists():
        keys, values = prefix_rows(model, prefix)
        np.savez(path, keys=keys, values=values)
    with np.load(path) as file:
        return file["keys"], file["values"]


# --- the runtime ------------------------------------------------------------------------------------------------------

#: Settings to compare. All look up from 512 tokens on, so that little of the text is read densely.
RUNTIME_SETS: dict[str, list[dict[str, str]]] = {
    "dense": [{}, {"type": "q4_0"}],
    "budget": [{"lookup": share} for share in ("0.2", "0.15", "0.1")],
    "threshold": [{"lookup": "0.1,0.2", "threshold": t} for t in ("0.05", "0.1", "0.2", "0.3")],
    "group": [{"lookup": share, "group": m} for m in ("2", "8") for share in ("0.2", "0.1,0.2", "0.1")],
    "layers": [
        {"lookup": "0.2", "layers": layers}
        for layers in ("full", "dense*2,(full,reuse)*14", "dense*2,full,reindex", "dense*2,full,reuse")
    ],
    "reuse": [
        {"lookup": "0.2", "group": m, "layers": f"dense*2,{layers}"}
        for m in ("4", "2")
        for layers in ("(full,reuse)*14", "(full,reuse*2)*9,full")
    ],
    "reuse-late": [
        {"lookup": "0.2", "layers": f"dense*2,{layers}"}
        for layers in ("full*12,(full,reuse)*8", "full*18,(full,reuse)*5", "full*12,(full:0.4,reuse)*8")
    ],
    # The 3840 tokens that `after` reads before are 960 groups of 4.
    "spans": [
        {"lookup": "0.2"},
        *({"lookup": "0.2", "hierarchical": "on", "span-pool": n} for n in ("480", "240", "720")),
    ],
    "least": [{"lookup": "0.2", "min-tokens": n} for n in ("512", "1024")],
    # The same share in all layers, as against `auto`.
    "even": [
        {"lookup": share, "group": m, "layers": "dense*2,full"}
        for m, share in (("4", "0.2"), ("4", "0.2,0.4"), ("4", "0.1,0.2"), ("2", "0.2"), ("2", "0.1,0.2"))
    ],
    # A fifth of the whole text, its beginning included: `auto`, SmolLM2's own list, groups of 2, no dense layers.
    "fifth": [
        {"lookup": "0.2", "min-tokens": "128", "threshold": "0.2"},
        {
            "lookup": "0.2",
            "min-tokens": "128",
            "threshold": "0.25",
            "layers": "dense*2,full:0.4*9,full:0.16*8,full:0.25*5,full:0.2",
        },
        {"lookup": "0.18", "group": "2"},
        {"lookup": "0.2", "min-tokens": "128", "threshold": "0", "layers": "full"},
        {"lookup": "0.2", "min-tokens": "128", "threshold": "0", "layers": "full:0.3*10,full:0.18"},
    ],
}
NUMBERS = {
    "KLD": r"Mean +KLD: +(\S+ ± +\S+)",
    "PPL ratio": r"Mean PPL\(Q\)/PPL\(base\) +: +(\S+ ± +\S+)",
    "same top token": r"Same top p: +(\S+) ",
    "groups read": r"kv look-up: (\S+ %)",
}


def perplexity(options: argparse.Namespace, base: Path, *flags: str) -> str:
    command = [str(options.bin / "llama-perplexity"), "-m", str(options.model), "-f", str(options.text), "-fa", "on"]
    command += ["-c", str(options.context), "--chunks", "1", "-t", str(options.threads)]
    command += ["--kl-divergence-base", str(base), *flags]
    done = execute(command)
    if done.returncode != 0:
        raise SystemExit(failure(done))
    return done.stdout + done.stderr


def runtime(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "f16"
        perplexity(options, base, "-b", "256", "-ub", "256")
        print("| settings | " + " | ".join(NUMBERS) + " | seconds |\n|---|" + "---|" * (len(NUMBERS) + 1), flush=True)
        calibrated = [{"calibration": str(options.calibration)}] if options.calibration else []
        for settings in [s for name in options.sets for s in RUNTIME_SETS[name]] + calibrated:
            flags = ["--kv-type", settings.get("type", "fp4_csa2")]
            if "lookup" in settings or "calibration" in settings:
                flags += ["--kv-min-context", "512"]
            for name, value in settings.items():
                if name != "type":
                    flags += [f"--kv-{name}", value]
            began = time.monotonic()
            text = perplexity(options, base, "--kl-divergence", "-b", "8", "-ub", "8", *flags)
            found = (re.search(pattern, text) for pattern in NUMBERS.values())
            cells = [f.group(1) if f else "all" for f in found]
            print(f"| {' '.join(flags[1:])} | {' | '.join(cells)} | {time.monotonic() - began:.0f} |", flush=True)


def after(options: argparse.Namespace) -> None:
    from kvfold.config import KvConfig
    from kvfold.verify.scoring import REFERENCE, divergence, extend, open_model, tokenize

    n_ctx = options.prefix + options.tokens
    first = options.prefix

    def rows_after(llm) -> np.ndarray:
        pieces = (extend(llm, tokens[i : i + 8], i, first) for i in range(first, n_ctx, 8))
        return np.concatenate([rows for piece in pieces for _, rows in piece])

    def read(llm) -> None:
        for _ in extend(llm, tokens[:first], 0, first):
            pass

    llm = open_model(options.model, REFERENCE, n_ctx, options.threads, 0)
    tokens = tokenize(llm, options.text.read_text(encoding="utf-8"))[: n_ctx + 1]
    read(llm)
    exact = rows_after(llm)
    llm.close()
    targets = np.arange(options.tokens), tokens[first + 1 :]
    states: dict[int, bytes] = {}
    print("| settings | groups read | KLD | PPL ratio |\n|---|---|---|---|", flush=True)
    for settings in (s for name in options.sets for s in RUNTIME_SETS[name] if "type" not in s):
        named = {f"kv_{name.replace('-', '_')}": value for name, value in settings.items()}
        numbers = ("kv_group", "kv_span_pool", "kv_min_tokens")
        named = {name: int(value) if name in numbers else value for name, value in named.items()}
        config = KvConfig.from_kwargs(kv_type="fp4_csa2", kv_min_context=512, **named)
        group = int(config.group or 0)
        if group not in states:
            llm = open_model(options.model, KvConfig("fp4_csa2", group=group, lookup=1), n_ctx, options.threads, 0)
            read(llm)
            states[group] = state_of(llm)
            llm.close()
        llm = open_model(options.model, config, n_ctx, options.threads, 0)
        set_state(llm, states[group])
        got = rows_after(llm)
        share = llm.kv.lookup_share
        llm.close()
        away = divergence(exact, got)
        error = away.std() / np.sqrt(len(away))
        ratio = np.exp((exact[targets] - got[targets]).mean())
        text = " ".join(f"{name} {value}" for name, value in settings.items()) or "defaults"
        print(f"| {text} | {100 * share:.1f} % | {away.mean():.5f} ± {error:.5f} | {ratio:.4f} |", flush=True)


# --- facts in a long text ---------------------------------------------------------------------------------------------


def needle(options: argparse.Namespace) -> None:
    from kvfold.config import KvConfig
    from kvfold.verify.measures import hide_needles
    from kvfold.verify.scoring import REFERENCE, open_model

    least = min(4096, min(options.lengths) // 2)
    # What is read before the questions is read densely: the second cache of a group size takes it from the first.
    caches = [] if options.without_f16 else [("f16", REFERENCE, False)]
    for m in options.groups:
        caches.append((f"m = {m}, dense", KvConfig("fp4_csa2", group=m, lookup=1), False))
        for layers in options.layers:
            name = "look-up" if layers == "auto" else layers
            caches.append((f"m = {m}, {name}", KvConfig("fp4_csa2", group=m, min_context=least, layers=layers), True))
    text = options.text.read_text(encoding="utf-8")
    results = []
    for n_ctx in options.lengths:
        state = b""
        for name, config, restored in caches:
            began = time.monotonic()
            llm = open_model(options.model, config, n_ctx, options.threads, 0)
            try:
                haystack = hide_needles(llm, text, n_ctx)
                if restored:
                    set_state(llm, state)
                else:
                    haystack.read(llm)
                    state = state_of(llm)
                facts = haystack.ask(llm)
                share = llm.kv.lookup_share
            finally:
                llm.close()
            entry = {"model": options.model.name, "n_ctx": n_ctx, "cache": name, "read": share}
            entry["facts"] = [{"depth": d, "found": f, "loss": loss} for d, f, loss in facts]
            results.append(entry)
            print(f"{n_ctx} {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    depths = [f"{100 * fact['depth']:.0f} %" for fact in results[0]["facts"]]
    print(f"| tokens | cache | groups read | {' | '.join(depths)} |\n|---|---|---|{'---|' * len(depths)}")
    for entry in results:
        # The probability of the answer says more than yes or no, and all where f16 does not know it either.
        cells = [f"{'found' if f['found'] else 'lost'} {-f['loss']:.3f}" for f in entry["facts"]]
        print(f"| {entry['n_ctx']} | {entry['cache']} | {100 * entry['read']:.0f} % | {' | '.join(cells)} |")


def state_of(llm) -> bytes:
    import llama_cpp

    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    data = (ctypes.c_uint8 * size)()
    return bytes(data[: llama_cpp.llama_state_seq_get_data(llm.ctx, data, size, 0)])


def set_state(llm, state: bytes) -> None:
    import llama_cpp

    data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    if llama_cpp.llama_state_seq_set_data(llm.ctx, data, len(state), 0) != len(state):
        raise SystemExit("the state of the dense cache was not taken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("study")
    one.add_argument("--prefix", type=int, default=3840)
    one.add_argument("--tokens", type=int, default=128, help="evaluated after each prefix; at most the near tier")
    one.add_argument("--windows", type=int, default=2)
    one.add_argument("--skip", type=int, default=0, help="windows at the beginning of the text that are left out")
    one.add_argument("--rules", nargs="+", default=["budget"], choices=list(rule_sets()))
    one.add_argument("--stand-in", type=float, help="Rule.stand_in of all rules")
    one.add_argument("--cache", type=Path, default=Path("sparse_quality_cache"))
    one.set_defaults(run=study)
    other = commands.add_parser("runtime")
    other.add_argument("--bin", type=Path, required=True, help="folder of llama-perplexity")
    other.add_argument("--context", type=int, default=4096)
    other.add_argument("--threads", type=int, default=2)
    other.add_argument("--calibration", type=Path, help="a file of `kvfold calibrate`, as a last setting")
    other.add_argument("--sets", nargs="+", default=list(RUNTIME_SETS), choices=list(RUNTIME_SETS))
    other.set_defaults(run=runtime)
    behind = commands.add_parser("after")
    behind.add_argument("--prefix", type=int, default=3840)
    behind.add_argument("--tokens", type=int, default=256)
    behind.add_argument("--sets", nargs="+", default=["spans"], choices=list(RUNTIME_SETS))
    behind.add_argument("--threads", type=int, default=2)
    behind.set_defaults(run=after)
    facts = commands.add_parser("needle")
    facts.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="contexts")
    facts.add_argument("--groups", type=int, nargs="+", default=[4, 2])
    facts.add_argument("--layers", nargs="+", default=["auto"], help="schedules for look-up")
    facts.add_argument("--without-f16", action="store_true", help="dense and look-up only")
    facts.add_argument("--threads", type=int, default=2)
    facts.add_argument("--json", type=Path, help="keep the numbers here")
    facts.set_defaults(run=needle)
    for each in (one, other, behind, facts):
        each.add_argument("model", type=Path)
        each.add_argument("text", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
