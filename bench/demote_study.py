"""Whether a stand-in for dropped groups is worth the rows it takes, on a real model, in NumPy.

    demote_study.py MODEL_F32.gguf TEXT [--prefix 1024] [--windows 2] [--needles 2] [--keep 0.5 0.3] [--cache DIR]

A Llama-architecture model reads a prefix with exact keys and values, which is then thinned out to a share of its rows:
groups of 4 tokens in the order of a score, never the first 4 and the last 128 tokens. Some of the groups that go leave
a stand-in, one row of their mean key and mean value that counts as often as it has tokens (and, with `spread`, a little
more, as look-ups estimate a group: see docs/decisions.md); as many more groups go as these rows take. Every line of a
table has the same number of rows, so the same bytes. Nothing is coded: rows are exact, stand-ins too.

Printed: the Kullback-Leibler divergence of the next-token distribution over 128 tokens after the prefix to that with
all rows, the ratio of perplexities, and the log-probability per digit of pass keys that the prefix tells (as
prune_quality.py needle does).

Scores: keydiff+attn (the default of fp4_csa2_ced), and reconstruct (the largest attention that a second reading of the
prefix pays to a token, added up over layers).

MODEL_F32.gguf must hold float32 weights (bench/dequantize_gguf.py makes it).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prune_quality import PassKeys
from sparse_quality import Model, cached_prefix, tokens_of

GROUP = 4  # tokens
FIRST, LAST = 4, 128  # tokens that stay
SCORED = 128
PART = 512  # tokens that are read again at a time
WEIGHT = 0.75  # of a spread, as in look-ups


@dataclass(frozen=True)
class Rule:
    """Of the groups that go, the best ``share`` leave a row for every ``groups`` of them (0: none does)."""

    name: str
    groups: int = 0
    share: float = 1.0
    spread: bool = False

    def rows_a_group(self) -> float:
        return self.share / self.groups if self.groups else 0.0


RULES = [
    Rule("none"),
    Rule("a row for each group", 1, spread=True),
    Rule("a row for each of the best tenth", 1, 0.1, spread=True),
    Rule("a row for 4 groups", 4),
    Rule("a row for 4 groups, spread", 4, spread=True),
    Rule("a row for 16 groups, spread", 16, spread=True),
    Rule("a row for 64 groups", 64),
]


@dataclass
class Rows:
    """What a thinned-out prefix leaves: arrays ``[n_layer, n_head_kv, n, ...]``; ``count [n]``."""

    keys: np.ndarray
    values: np.ndarray
    spread: np.ndarray
    count: np.ndarray


class Attention:
    """Of tokens after a prefix, over its rows and themselves. ``see(layer, head, weights)`` is shown what rows get."""

    def __init__(self, model: Model, rows: Rows, see: Callable[[int, int, np.ndarray], None] | None = None) -> None:
        self.model, self.rows, self.see = model, rows, see

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        rows, scale = self.rows, np.float32(self.model.head_dim**-0.5)
        future = np.triu(np.ones((len(q), len(q)), bool), 1)
        out = np.zeros_like(q)
        for head in range(self.model.n_head):
            kv = head // self.model.ratio
            mine = q[:, head]
            score = scale * mine @ rows.keys[layer, kv].T + np.log(rows.count)
            half = 0.5 * WEIGHT * scale**2 * (mine**2).sum(axis=1, keepdims=True)
            score += half * rows.spread[layer, kv]
            own = np.where(future, -np.inf, scale * mine @ k[:, kv].T)
            top = np.maximum(score.max(axis=1), own.max(axis=1))[:, None]
            score, own = np.exp(score - top), np.exp(own - top)
            total = (score.sum(axis=1) + own.sum(axis=1))[:, None]
            out[:, head] = (score @ rows.values[layer, kv] + own @ v[:, kv]) / total
            if self.see:
                self.see(layer, head, score / total)
        return out


def thin_out(keys: np.ndarray, values: np.ndarray, order: np.ndarray, n_rows: int, rule: Rule) -> Rows | None:
    """``order``: groups, the first to go first; those not in it stay. ``n_rows`` remain of the whole prefix.

    None: the stand-ins alone are more.
    """
    n = keys.shape[2]
    for_order = n_rows - (n - GROUP * len(order))
    stay = int((for_order - rule.rows_a_group() * len(order)) / (GROUP - rule.rows_a_group()))
    if stay < 0:
        return None
    gone = order[: len(order) - stay]
    kept = np.ones(n, bool)
    kept.reshape(-1, GROUP)[gone] = False
    parts = [Rows(keys[:, :, kept], values[:, :, kept], np.zeros_like(keys[:, :, kept, 0]), np.ones(kept.sum()))]
    heirs = np.sort(gone[len(gone) - int(rule.share * len(gone)) :]) if rule.groups else gone[:0]
    for start in range(0, len(heirs), max(1, rule.groups)):
        members = (heirs[start : start + rule.groups, None] * GROUP + np.arange(GROUP)).ravel()
        k, v = keys[:, :, members], values[:, :, members]
        spread = k.var(axis=2).mean(axis=-1) * rule.spread
        parts.append(
            Rows(k.mean(axis=2)[:, :, None], v.mean(axis=2)[:, :, None], spread[:, :, None], np.array([len(members)]))
        )
    both = Rows(
        *(np.concatenate([getattr(p, name) for p in parts], axis=2) for name in ("keys", "values", "spread")),
        np.concatenate([p.count for p in parts]).astype(np.float32),
    )
    assert n_rows - 2 * GROUP < len(both.count) <= n_rows + 1, (rule.name, n_rows, len(both.count))
    return both


def ranks(x: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(x, kind="stable"), kind="stable")


def orders(model: Model, prefix: np.ndarray, keys: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    """Groups that may go, by score, the first to go first."""
    n = len(prefix)
    whole = Rows(keys, values, np.zeros_like(keys[..., 0]), np.ones(n, np.float32))
    received = np.zeros((model.n_layer, n), np.float32)
    queries = np.zeros((model.n_layer, n, model.n_head, model.head_dim), np.float32)

    def see(layer: int, _head: int, weights: np.ndarray) -> None:
        received[layer] = np.maximum(received[layer], weights.max(axis=0))

    for start in range(0, n, PART):  # the prefix is read again, behind itself
        model.run(prefix[start : start + PART], n, Attention(model, whole, see))

    def keep_queries(start: int) -> Callable[..., np.ndarray]:
        before = Rows(keys[:, :, :start], values[:, :, :start], whole.spread[:, :, :start], whole.count[:start])
        attention = Attention(model, before)

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            queries[layer, start : start + len(q)] = q
            return attention(layer, q, k, v)

        return attend

    first = max(GROUP, n - 2 * PART)
    for start in range(first, n, PART):
        model.run(prefix[start : start + PART], start, keep_queries(start))
    anchor = keys.mean(axis=2, keepdims=True)
    cosine = (keys * anchor).sum(axis=-1) / np.linalg.norm(keys, axis=-1) / np.linalg.norm(anchor, axis=-1)
    novelty = (1 - cosine).mean(axis=(0, 1))
    decay = (1 - 1 / 512) ** np.arange(n - first)[::-1].astype(np.float32)
    decay /= decay.sum()
    mean = np.einsum("n,lnhd->lhd", decay, queries[:, first:])
    variance = np.einsum("n,lnhd->lhd", decay, queries[:, first:] ** 2) - mean**2
    scale = np.float32(model.head_dim**-0.5)
    expected = np.zeros(n, np.float32)
    for layer in range(model.n_layer):
        for head in range(model.n_head):
            k = keys[layer, head // model.ratio]
            e = scale * k @ mean[layer, head] + 0.5 * scale**2 * k**2 @ variance[layer, head]
            p = np.exp(e - e.max())
            expected += p / p.sum()
    group = np.arange(n // GROUP)
    may_go = group[(group * GROUP >= FIRST) & ((group + 1) * GROUP <= n - LAST)]

    def best(x: np.ndarray) -> np.ndarray:
        return x[: len(group) * GROUP].reshape(-1, GROUP).max(axis=1)[may_go]

    found = {
        "keydiff+attn": ranks(best(novelty)) + ranks(best(expected)),
        "reconstruct": best(received.sum(axis=0)),
    }
    return {name: may_go[np.argsort(x, kind="stable")] for name, x in found.items()}


#: Of every line - share kept, score, rule -: divergences, losses, log-probabilities of digits.
Results = dict[tuple[float, str, str], tuple[list, list, list]]


def print_table(results: Results) -> None:
    print("| kept | score | stand-ins | KLD | PPL ratio | pass keys |\n|---|---|---|---|---|---|")
    for (keep, score, rule), (divergence, worse, digits) in results.items():
        cells = [f"{100 * keep:.0f} %", score, rule, "", "", ""]
        if divergence:
            every = np.concatenate(divergence)
            cells[3] = f"{every.mean():.5f} ± {every.std() / np.sqrt(len(every)):.5f}"
            cells[4] = f"{np.exp(np.concatenate(worse).mean()):.4f}"
        if digits:
            cells[5] = f"{np.mean(digits):.3f}"
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens, a multiple of 4")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--needles", type=int, default=2, help="prefixes that tell four pass keys each")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.3])
    parser.add_argument("--cache", type=Path, default=Path("sparse_quality_cache"))
    options = parser.parse_args()
    from kvfold import _runtime

    _runtime.load()
    from llama_cpp import Llama

    options.cache.mkdir(parents=True, exist_ok=True)
    model, n = Model(options.model), options.prefix
    length = n + SCORED + 1
    ids = tokens_of(options, length * max(options.windows, options.needles))
    llm = Llama(str(options.model), vocab_only=True, verbose=False)
    results: Results = {}

    def measure(prefix: np.ndarray, use: Callable[[Rows, tuple[list, list, list]], None]) -> None:
        keys, values = cached_prefix(model, prefix, options.cache)
        whole = Rows(keys, values, np.zeros_like(keys[..., 0]), np.ones(n, np.float32))
        use(whole, results.setdefault((1.0, "", "everything"), ([], [], [])))
        for score, order in orders(model, prefix, keys, values).items():
            for keep in options.keep:
                for rule in RULES:
                    rows = thin_out(keys, values, order, int(keep * n), rule)
                    if rows is not None:
                        use(rows, results.setdefault((keep, score, rule.name), ([], [], [])))

    def run(rows: Rows, tokens: np.ndarray) -> np.ndarray:
        return model.log_probabilities(model.run(tokens, n, Attention(model, rows)))

    for window in ids.reshape(-1, length)[: options.windows]:
        tokens, targets = window[n:-1], window[n + 1 :]
        exact: list[np.ndarray] = []

        def compare(rows: Rows, line: tuple[list, list, list], tokens=tokens, targets=targets, exact=exact) -> None:
            got = run(rows, tokens)
            exact.append(got)  # the first has all rows
            line[0].append((np.exp(exact[0]) * (exact[0] - got)).sum(axis=1))
            line[1].append((exact[0] - got)[np.arange(len(targets)), targets])

        measure(window[:n], compare)
    for number in range(options.needles):
        pass_keys = PassKeys(llm, number)

        def ask(rows: Rows, line: tuple[list, list, list], questions=pass_keys.questions) -> None:
            for question, answer in questions:
                got = run(rows, np.array([*question, *answer]))[len(question) - 1 : -1]
                line[2].append(got[np.arange(len(answer)), answer].mean())

        measure(np.array(pass_keys.hidden_in(ids[number * length :], n)), ask)

    print_table(results)


if __name__ == "__main__":
    main()
