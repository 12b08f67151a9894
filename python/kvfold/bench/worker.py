"""One run, in a process of its own so that memory is its own: ``python -m kvfold.bench.worker SETTINGS.json``.

The prompt and the tokens "decoded" after it are text, the same for every type; distributions at the decoded positions
are left in a file, to be compared with f16's.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

_STATUS = Path("/proc/self/status")
#: How long memory may settle before it is read.
_SETTLE_SECONDS = 0.3
_SAMPLE_SECONDS = 0.02


def resident(field: str = "VmRSS") -> int:
    """Resident size of this process in bytes (``VmHWM``: its peak); 0 where the system does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class GpuMemory:
    """Memory in use on all GPUs, sampled in the background. ``start`` is what was in use before."""

    def __init__(self) -> None:
        from ..devices import gpus

        self._read = lambda: sum(d.total - d.free for d in gpus())
        self.present = bool(gpus())
        self.start = self._read() if self.present else 0
        self.peak = self.start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self.present:
            self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, self._read())

    def report(self) -> dict[str, int]:
        """Peak and settled bytes beyond the start, and what is left free."""
        from ..devices import gpus

        self._stop.set()
        if not self.present:
            return {}
        used = self._read()
        return {
            "gpu_peak_bytes": max(self.peak, used) - self.start,
            "gpu_settled_bytes": used - self.start,
            "gpu_free_bytes": sum(d.free for d in gpus()),
            "gpu_total_bytes": sum(d.total for d in gpus()),
        }


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure one setting.

    Args:
        settings: ``model``, ``text`` (paths), ``kv`` (settings by name), ``n_ctx``, ``n_decode``, ``n_threads``,
            ``n_ubatch``, ``n_gpu_layers``, ``logits`` (path to write to, or ``None``).

    Returns:
        seconds of ``load``; ``prefill`` and ``decode`` in tokens a second; bytes of cache, peak and settled memory;
        ``bandwidth``: bytes of weights and cache read per second of decoding; ``backend``.
    """
    import llama_cpp

    from .. import Llama
    from ..config import KvConfig

    gpu = GpuMemory()
    config = KvConfig.from_kwargs(**settings["kv"])
    n_ctx, n_decode, n_ubatch = settings["n_ctx"], settings["n_decode"], settings["n_ubatch"]
    started = time.perf_counter()
    llm = Llama(
        settings["model"],
        kv=config,
        n_ctx=n_ctx,
        n_batch=max(n_ubatch, 512),
        n_ubatch=n_ubatch,
        n_threads=settings["n_threads"],
        n_threads_batch=settings["n_threads"],
        n_gpu_layers=settings["n_gpu_layers"],
        swa_full=False,
        flash_attn=True,
        verbose=False,
    )
    load = time.perf_counter() - started
    tokens = _tokens(llm, settings["text"], n_ctx)
    prompt, rest = tokens[: n_ctx - n_decode], tokens[n_ctx - n_decode :]

    # The first evaluation touches all pages of mapped weights; that is loading, not prefill.
    started = time.perf_counter()
    llm.eval(prompt[:1])
    load += time.perf_counter() - started
    llm.reset()

    def finish() -> None:  # a GPU may still be at work when eval() returns
        llama_cpp.llama_synchronize(llm._ctx.ctx)

    finish()
    started = time.perf_counter()
    llm.eval(prompt)
    finish()
    prefill_seconds = time.perf_counter() - started
    rows = []
    decode_seconds = 0.0
    for token in rest:
        if settings["logits"]:
            logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
            rows.append(logits.astype(np.float16))
        started = time.perf_counter()
        llm.eval([token])
        finish()
        decode_seconds += time.perf_counter() - started
    if settings["logits"]:
        np.save(settings["logits"], np.stack(rows))
    time.sleep(_SETTLE_SECONDS)
    settled = resident()
    kv = llm.kv.to_dict()
    weights = int(llm._model.size())
    per_second = n_decode / decode_seconds
    result = {
        "load_seconds": round(load, 3),
        "prefill": round(len(prompt) / prefill_seconds, 2),
        "decode": round(per_second, 2),
        "kv_bytes": kv["bytes"],
        "f16_bytes": kv["f16_bytes"],
        "backend": kv["backend"],
        "weights_bytes": weights,
        # Nearly all of the cache is in use when decoding starts.
        "bandwidth": round((weights + kv["bytes"]) * per_second),
        "peak_bytes": max(resident("VmHWM"), settled),
        "settled_bytes": settled,
        **gpu.report(),
    }
    llm.close()
    return result


def _tokens(llm: Any, text: str, count: int) -> list[int]:
    """``count`` tokens of the text, from its beginning again where it ends; any tokens if it has no tokenizer."""
    if not llm.has_tokenizer:
        return [int(t) for t in np.random.default_rng(0).integers(0, llm.n_vocab(), count)]
    tokens = list(llm.tokenize(Path(text).read_bytes()))
    while len(tokens) < count:
        tokens += tokens[1:]
    return tokens[:count]


def main() -> int:
    """Read the settings, print the result as one line of JSON; errors are one line on stderr."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    try:
        print(json.dumps(run(settings)))
    except (ValueError, RuntimeError, MemoryError) as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
