"""Many runs: every context with every kv type, number of threads and micro-batch."""

from __future__ import annotations

import datetime
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import KvConfig
from ..gguf_header import read_gguf_header
from ..progress import Progress
from ..threads import default_threads
from ..verify.scoring import divergence, log_softmax
from . import machine

#: Of the stored results; raised when their meaning changes.
FORMAT = 1

#: Less than this share of a GPU's memory free after loading means that the driver may have moved some of it away.
SPILL_SHARE = 0.02


@dataclass(frozen=True)
class Sweep:
    """What to run.

    Attributes:
        model: a GGUF file.
        contexts: tokens, filled up to the last.
        configs: kv types; f16 is added where it is missing, because accuracy is measured against it.
        threads, micro_batches: values to try.
        n_decode: tokens decoded one by one at the end of the context.
        n_gpu_layers: layers on the GPU.
        text: a file of prose.
    """

    model: Path
    contexts: tuple[int, ...]
    configs: tuple[KvConfig, ...]
    threads: tuple[int, ...]
    micro_batches: tuple[int, ...] = (512,)
    n_decode: int = 32
    n_gpu_layers: int = 0
    text: Path | None = None

    def settings(self) -> Iterable[dict[str, Any]]:
        """All combinations; f16 first, because the others are compared with it."""
        configs = sorted(self.configs, key=lambda c: c.kv_type != "f16")
        if not configs or configs[0].kv_type != "f16":
            configs.insert(0, KvConfig("f16"))
        for n_ctx, threads, n_ubatch, config in itertools.product(
            self.contexts, self.threads, self.micro_batches, configs
        ):
            yield {"n_ctx": n_ctx, "kv": config.to_dict(), "n_threads": threads, "n_ubatch": n_ubatch}


class RunFailed(RuntimeError):
    """A run ended without a result; the message is its reason."""


def run_one(settings: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own.

    Raises:
        RunFailed: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "kvfold.bench.worker", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        raise RunFailed(lines[-1] if lines else f"it ended with code {result.returncode}")
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def run_sweep(sweep: Sweep, progress: Progress, command: list[str]) -> dict[str, Any]:
    """Run everything and return the results as they are stored.

    A run that fails is kept with its reason instead of numbers.

    Raises:
        ValueError: the model cannot be read, or a context is too short for the tokens to decode.
    """
    for n_ctx in sweep.contexts:
        if n_ctx <= 2 * sweep.n_decode:
            raise ValueError(f"a context of {n_ctx} tokens is too short to decode {sweep.n_decode} at its end")
    header = read_gguf_header(sweep.model)
    # A synthetic model has no tokenizer, and how far its answers are apart says nothing.
    compares = header.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")
    runs = []
    todo = list(sweep.settings())
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as folder, progress.task("runs", len(todo)) as advance:
        text = sweep.text or _bundled(Path(folder))
        reference = Path(folder) / "f16.npy"
        for settings in todo:
            is_reference = settings["kv"]["kv_type"] == "f16"
            logits = reference if is_reference else Path(folder) / "other.npy"
            if is_reference:
                reference.unlink(missing_ok=True)
            everything = {
                **settings,
                "model": str(sweep.model),
                "text": str(text),
                "n_decode": sweep.n_decode,
                "n_gpu_layers": sweep.n_gpu_layers,
                "logits": str(logits) if compares else None,
            }
            try:
                result = run_one(everything)
                if reference.exists():
                    result.update(agreement(np.load(reference), np.load(logits)))
                result["spill"] = _spills(result)
            except RunFailed as error:
                result = {"error": str(error)}
            runs.append({**settings, "n_decode": sweep.n_decode, "n_gpu_layers": sweep.n_gpu_layers, **result})
            advance(1)
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(command),
        "machine": machine.describe(),
        "model": {
            "name": sweep.model.name,
            "architecture": header.architecture,
            "bytes": sweep.model.stat().st_size,
            "n_ctx_train": header.arch("context_length"),
        },
        "runs": runs,
    }


def _bundled(folder: Path) -> Path:
    from ..verify.report import bundled_text

    path = folder / "text.txt"
    path.write_text(bundled_text(), encoding="utf-8")
    return path


def agreement(reference: Any, other: Any) -> dict[str, float]:
    """How close the decoded positions' distributions are to f16's: mean divergence, and share of equal top tokens."""
    p, q = log_softmax(reference.astype(np.float32)), log_softmax(other.astype(np.float32))
    # Logits were stored as f16, whose steps make a divergence of about 1e-6 of their own.
    return {
        "kld": float(divergence(p, q).mean()),
        "same_top": float((p.argmax(axis=-1) == q.argmax(axis=-1)).mean()),
    }


def _spills(result: dict[str, Any]) -> bool:
    total = result.get("gpu_total_bytes") or 0
    return bool(total and result["gpu_free_bytes"] < SPILL_SHARE * total)


# -- threads -----------------------------------------------------------------------------------------------------------

#: The fewest threads whose decode speed is within this share of the best are recommended: more only take from others.
GOOD_ENOUGH = 0.05


def thread_counts(cores: int | None = None) -> list[int]:
    """Numbers worth trying: powers of two, and all cores that may be used."""
    cores = cores or default_threads()
    return sorted({*(2**i for i in range(cores.bit_length()) if 2**i <= cores), cores})


def recommend_threads(runs: list[dict[str, Any]]) -> int | None:
    """The number of threads to use, by decode speed; ``None`` when nothing was measured."""
    speeds = {run["n_threads"]: run["decode"] for run in runs if "decode" in run}
    if not speeds:
        return None
    best = max(speeds.values())
    return int(min(threads for threads, speed in speeds.items() if speed >= (1 - GOOD_ENOUGH) * best))
