"""Stored results as Markdown and plots, and two or more of them side by side."""

# matplotlib is not typed.
# mypy: disallow-untyped-calls=False
from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..units import count_text, markdown_table, size_text
from .sweep import FORMAT

Stored = dict[str, Any]
Key = tuple[Any, ...]

_COLUMNS = ("kv type", "context", "threads", "micro-batch")


def load(path: Path) -> Stored:
    """Read a stored result.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"results {str(path)!r} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("runs"), list):
        raise ValueError(f"{str(path)!r} holds no results of kvfold bench (format {FORMAT})")
    return data


def type_name(kv: dict[str, Any]) -> str:
    """The type, with the settings that are not its defaults."""
    from ..config import KvConfig

    # As they come back from a file, where tuples are lists.
    defaults = json.loads(json.dumps(KvConfig(kv["kv_type"]).to_dict()))
    kv = json.loads(json.dumps(kv))
    changed = [f"{k.removeprefix('kv_')}={v}" for k, v in kv.items() if v != defaults.get(k)]
    return " ".join([kv["kv_type"], *changed])


def _key(run: dict[str, Any]) -> Key:
    return (type_name(run["kv"]), run["n_ctx"], run["n_threads"], run["n_ubatch"])


def _settings(run: dict[str, Any]) -> list[str]:
    return [type_name(run["kv"]), count_text(run["n_ctx"]), str(run["n_threads"]), str(run["n_ubatch"])]


def _memory(run: dict[str, Any]) -> tuple[int, int]:
    """Peak and settled bytes: of the GPU where there is one."""
    if "gpu_peak_bytes" in run:
        return run["gpu_peak_bytes"], run["gpu_settled_bytes"]
    return run["peak_bytes"], run["settled_bytes"]


def markdown(stored: Stored, picture: str | None = None) -> str:
    """One result as a page."""
    place, model = stored["machine"], stored["model"]
    gpus = ", ".join(g["description"] for g in place["gpus"])
    where = gpus or f"{place['cpu']}, {place['cores']} cores"
    lines = [
        f"# {model['name']}, {stored['date'][:10]}",
        "",
        f"{where}; kvfold {place['kvfold']}, commit {place['commit'] or 'unknown'}; "
        f"weights {size_text(model['bytes'])}.",
        "",
        f"    {stored['command']}",
        "",
    ]
    rows = []
    for run in stored["runs"]:
        if "error" in run:
            rows.append([*_settings(run), f"failed: {run['error']}", *[""] * 8])
            continue
        peak, settled = _memory(run)
        rows.append(
            [
                *_settings(run),
                size_text(run["kv_bytes"]),
                f"{100 * run['kv_bytes'] / run['f16_bytes']:.1f} %",
                size_text(peak),
                size_text(settled) + (" (spill)" if run.get("spill") else ""),
                f"{run['load_seconds']:.1f}",
                f"{run['prefill']:.1f}",
                f"{run['decode']:.1f}",
                f"{run['bandwidth'] / 1e9:.1f}",
                f"{run['kld']:.4f}" if "kld" in run else "",
            ]
        )
    head = [
        *_COLUMNS,
        "cache",
        "of f16",
        "peak",
        "settled",
        "load s",
        "prefill t/s",
        "decode t/s",
        "GB/s",
        "KLD to f16",
    ]
    lines += [markdown_table(head, rows), ""]
    if picture:
        lines += [f"![memory, speed and accuracy]({picture})", ""]
    return "\n".join(lines)


# -- comparing ---------------------------------------------------------------------------------------------------------


def differences(base: Stored, other: Stored) -> list[str]:
    """What was not the same: model, machine, source, and sets of settings."""
    found = []
    for what in ("cpu", "cores", "gpus", "commit", "compiler", "backends", "kvfold"):
        a, b = base["machine"].get(what), other["machine"].get(what)
        if a != b:
            found.append(f"{what}: {a} and {b}")
    if (a := base["model"]["name"]) != (b := other["model"]["name"]):
        found.append(f"model: {a} and {b}")
    for name, column in (("n_threads", "threads"), ("n_ubatch", "micro-batch"), ("n_gpu_layers", "layers on the GPU")):
        values = [sorted({run[name] for run in stored["runs"]}) for stored in (base, other)]
        if values[0] != values[1]:
            found.append(f"{column}: {values[0]} and {values[1]}")
    return found


def compare(base: Stored, other: Stored, names: tuple[str, str]) -> str:
    """Runs with equal settings side by side. More than one difference beside the settings gets a warning."""
    changed = differences(base, other)
    lines = [f"## {names[1]} against {names[0]}", ""]
    lines += [f"- {line}" for line in changed] or ["- the same machine, source and model"]
    if len(changed) > 1:
        lines.append("- more than one thing changed: the numbers do not say which of them made a difference")
    known = {_key(run): run for run in base["runs"] if "error" not in run}
    rows = []
    for run in other["runs"]:
        before = known.get(_key(run))
        if before is None or "error" in run:
            continue
        rows.append(
            [
                *_settings(run),
                *(_ratio(before[name], run[name]) for name in ("kv_bytes", "prefill", "decode")),
                _ratio(_memory(before)[1], _memory(run)[1]),
                f"{before.get('kld', 0):.4f} to {run.get('kld', 0):.4f}",
            ]
        )
    if not rows:
        return "\n".join([*lines, "", "No settings in common.", ""])
    head = [*_COLUMNS, "cache", "prefill", "decode", "settled memory", "KLD to f16"]
    return "\n".join([*lines, "", markdown_table(head, rows), ""])


def _ratio(before: float, after: float) -> str:
    return f"x {after / before:.3f}" if before else "?"


# -- plots -------------------------------------------------------------------------------------------------------------


def plot(stored: Stored, path: Path) -> None:
    """Memory, decode speed and divergence over the context, one line a type, as a picture.

    Only runs with the largest number of threads and the largest micro-batch are shown.

    Raises:
        ValueError: matplotlib is missing, or there is nothing to show.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    runs = [run for run in stored["runs"] if "error" not in run]
    if not runs:
        raise ValueError("no run has numbers to plot")
    threads, ubatch = max(r["n_threads"] for r in runs), max(r["n_ubatch"] for r in runs)
    runs = [r for r in runs if (r["n_threads"], r["n_ubatch"]) == (threads, ubatch)]
    panels: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("cache (MiB)", lambda r: r["kv_bytes"] / 2**20),
        ("decode (tokens/s)", lambda r: r["decode"]),
        ("divergence from f16 (nats)", lambda r: r.get("kld")),
    )
    panels = tuple(p for p in panels if any(p[1](r) is not None for r in runs))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.3 * len(panels), 4), layout="constrained")
    names = list(dict.fromkeys(type_name(r["kv"]) for r in runs))
    contexts = sorted({r["n_ctx"] for r in runs})
    for axis, (title, value) in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            points = sorted((r["n_ctx"], value(r)) for r in runs if type_name(r["kv"]) == name and value(r) is not None)
            if title.startswith("divergence") and name == "f16":
                continue
            axis.plot(*zip(*points, strict=True), marker="osD^v"[number % 5], color=f"C{number}", label=name)
        axis.set_title(title)
        axis.set_xlabel("context (tokens)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [count_text(n) for n in contexts])
        axis.minorticks_off()
        if title.startswith("divergence"):
            axis.set_yscale("log")  # the types are orders of magnitude apart
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    where = ", ".join(g["description"] for g in stored["machine"]["gpus"]) if runs[0]["n_gpu_layers"] else ""
    figure.suptitle(f"{stored['model']['name']}, {where or f'{threads} threads'}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
