"""``kvfold doctor``: symptoms, their causes, and what to do about them.

Every check answers with one finding. Checks look at the installation, at a model, or at a running llama-server; none of
them changes anything.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import _runtime
from .config import GROUPS, KvConfig
from .devices import free_memory, gpus, nvml
from .kv_layout import UnknownLayout, cache_layers, cache_size
from .model_check import why_unfit
from .plan import HEADROOM, Wishes, make_plan
from .threads import cpu_quota, default_threads
from .units import count_text, size_text

OK, WARN, FAIL = "ok", "warn", "fail"

#: An FP4 cache larger than this share of f16 is worth an explanation: defaults give 0.33 or less in long contexts.
_LARGE_SHARE = 0.35
#: Look-up of more than this share of the far rows saves little; sparse decoding is meant to read 20 %.
_LARGE_LOOKUP = 0.30

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_SERVER_TIMEOUT = 30.0


@dataclass(frozen=True)
class Finding:
    """Outcome of one check: what was looked at, how it is, why, and what helps (empty when all is well)."""

    check: str
    status: str
    cause: str
    action: str = ""

    def __str__(self) -> str:
        mark = {OK: "ok   ", WARN: "warn ", FAIL: "FAIL "}[self.status]
        text = f"{mark} {self.check}: {self.cause}"
        return f"{text}\n       -> {self.action}" if self.action else text


def worst(findings: Iterable[Finding]) -> str:
    """The most serious status."""
    order = (OK, WARN, FAIL)
    return max((f.status for f in findings), key=order.index, default=OK)


# -- the installation --------------------------------------------------------------------------------------------------


def check_installation() -> list[Finding]:
    """Runtime, GPU, driver, threads, memory."""
    try:
        core = _runtime.load()
    except ImportError as error:
        return [Finding("runtime", FAIL, str(error), "install kvfold again in this environment, with pip")]
    build = core.build_info()
    backends = ", ".join(build.get("backends") or ["none"])
    findings = [Finding("runtime", OK, f"kvfold {build.get('version')}, backends: {backends}")]
    if str(build.get("build_type", "Release")) not in ("Release", "RelWithDebInfo"):
        findings.append(
            Finding(
                "build", WARN, f"built as {build['build_type']}, which is slow", "build with -DCMAKE_BUILD_TYPE=Release"
            )
        )
    findings += [check_gpu(backends), check_threads(dict(os.environ)), check_free()]
    return findings


def check_gpu(backends: str) -> Finding:
    """Whether a GPU that is there is used: a CPU build, or a driver that the build cannot use, is not obvious."""
    present = _DRIVER_FILE.exists() or nvml() is not None
    if "cuda" not in backends.lower():
        if present:
            return Finding(
                "GPU",
                WARN,
                "an NVIDIA GPU is there, and this build of kvfold is for the CPU",
                'build for it: CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_CUDA=ON" pip install --force-reinstall .',
            )
        return Finding("GPU", OK, "none, and a build for the CPU")
    found = gpus()
    if found:
        names = "; ".join(f"{d.name}: {d.description}, {size_text(d.free)} of {size_text(d.total)} free" for d in found)
        full = [d for d in found if d.free < HEADROOM * d.total]
        if full:
            return Finding(
                "GPU",
                WARN,
                f"{names}: almost nothing is free, new data may spill into the machine's memory",
                "end other programs on the GPU (nvidia-smi lists them)",
            )
        return Finding("GPU", OK, names)
    if not present:
        return Finding(
            "GPU", WARN, "a build for CUDA, and no NVIDIA driver is visible here", "start the container with the GPU"
        )
    return Finding(
        "GPU",
        FAIL,
        f"the driver ({_driver_version()}) is there, and CUDA finds no device with it: it is older than the CUDA "
        "toolkit that kvfold was built with, or the device is hidden",
        "update the driver, or unset CUDA_VISIBLE_DEVICES",
    )


def _driver_version() -> str:
    module = nvml()
    if module is not None:
        version = module.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    try:
        return _DRIVER_FILE.read_text().splitlines()[0].split("  ")[1]
    except (OSError, IndexError):
        return "unknown version"


def check_threads(environment: dict[str, str]) -> Finding:
    """Threads that spin, or more of them than the container may run, cost more than they give."""
    cores, quota = default_threads(), cpu_quota()
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        return Finding(
            "threads",
            WARN,
            "OMP_WAIT_POLICY=active: waiting threads spin, which slows decoding down many times on a busy machine",
            "unset OMP_WAIT_POLICY",
        )
    limit = environment.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and 0 < int(limit) < cores:
        return Finding(
            "threads",
            WARN,
            f"OMP_NUM_THREADS={limit} holds OpenMP to fewer threads than the {cores} cores",
            "unset OMP_NUM_THREADS and give -t instead",
        )
    held = f", held to {quota:g} by the container" if quota is not None else ""
    return Finding("threads", OK, f"{cores} by default{held}; kvfold bench threads MODEL finds the best number")


def check_free() -> Finding:
    """Free memory of the machine."""
    have = free_memory()
    if have is None:
        return Finding("memory", WARN, "the system does not say how much is free")
    return Finding("memory", OK, f"{size_text(have)} free")


# -- a model -----------------------------------------------------------------------------------------------------------


def check_model(path: Path, config: KvConfig, n_ctx: int | None, *, load: bool = True) -> list[Finding]:
    """Whether a kv type works with a model and does what it is for.

    Args:
        path: a GGUF file.
        config: kv type and settings.
        n_ctx: context, default: what is best for this machine.
        load: also load it and run some tokens.

    Raises:
        ValueError: the file is no model.
    """
    from .gguf_header import read_gguf_header

    header = read_gguf_header(path)
    reason = why_unfit(header) if config.folds else None
    if reason:
        return [
            Finding("model", FAIL, f"{config.kv_type} cannot serve it: {reason}", "use kv_type='f16' or 'q8_0' for it")
        ]
    plan = make_plan(path, Wishes(config=config, n_ctx=n_ctx), compare=False)
    settings = plan.settings
    fine = Finding("model", OK, f"{header.architecture}, {plan.planner.n_layer} layers; {config.kv_type} fits it")
    findings = [fine, check_saving(header, config, settings.n_ctx), _check_worth(plan)]
    if not plan.fits:
        what = next((note for note in plan.notes if note.startswith("What fits")), "a smaller context")
        findings.append(Finding("room", FAIL, plan.notes[0], what))
    elif (plan.headroom or 1) < HEADROOM:
        findings.append(Finding("room", WARN, plan.notes[0], "a smaller context, or fewer layers on the GPU"))
    if settings.n_ctx > plan.planner.trained_context:
        findings.append(
            Finding(
                "context",
                WARN,
                f"{settings.n_ctx} tokens; the model was trained with {plan.planner.trained_context}",
                f"at most {plan.planner.trained_context}, or a RoPE scaling that the model's publisher recommends",
            )
        )
    if load and plan.fits:
        findings += _check_running(path, config, settings.n_gpu_layers)
    return findings


def check_saving(header: Any, config: KvConfig, n_ctx: int) -> Finding:
    """Why a folded cache takes more of f16's memory than the promised third."""
    if not config.folds:
        return Finding("saving", OK, f"{config.kv_type} is llama.cpp's own type")
    try:
        size = cache_size(cache_layers(header), config, n_ctx)
    except UnknownLayout:
        return Finding("saving", OK, "the header does not tell; kvfold plan measures it")
    share = size.bytes / size.f16
    text = f"{size_text(size.bytes)} at {count_text(n_ctx)} tokens, {100 * share:.1f} % of f16"
    if share <= _LARGE_SHARE:
        return Finding("saving", OK, text)
    near, window = size.near / size.bytes, size.window / size.bytes
    if window > 0.3:
        swa = ""
        if config.swa_type == "f16":
            swa = "kv_swa_type='q8_0' halves the windows; "
        return Finding(
            "saving",
            WARN,
            f"{text}: {100 * window:.0f} % of it are sliding-window layers, which stay at 8 bits or more",
            f"{swa}the share falls as the context grows",
        )
    if near > 0.15:
        return Finding(
            "saving",
            WARN,
            f"{text}: {100 * near:.0f} % of it is the exact tail of {config.tail} tokens a sequence",
            "a longer context, fewer slots (-np), or a smaller kv_tail",
        )
    small = f"kv_group={config.group}: every group has a summary of its own"
    return Finding(
        "saving", WARN, f"{text}: {small}", f"a larger kv_group ({', '.join(map(str, GROUPS[config.kv_type]))})"
    )


def _check_worth(plan: Any) -> Finding:
    share = f"an f16 cache would be {100 * plan.f16_share:.0f} % of the weights"
    if plan.worth or not plan.settings.config.folds:
        return Finding("worth it", OK, share)
    return Finding(
        "worth it", WARN, f"{share}: little to save at this context", "f16 or q8_0, or a longer context (kvfold plan)"
    )


def _check_running(path: Path, config: KvConfig, n_gpu_layers: int) -> list[Finding]:
    """Load it with a small context and run some tokens: what does attention run on, does the size agree?"""
    from . import Llama
    from .dry_run import measure
    from .verify.report import bundled_text

    layers = n_gpu_layers if gpus() else 0
    with Llama(path, kv=config, n_ctx=1024, n_gpu_layers=layers, flash_attn=True, verbose=False) as llm:
        tokens = llm.tokenize(bundled_text()[:8000].encode())[:600]
        llm.eval(tokens)
        for token in tokens[-4:]:
            llm.eval([token])
        kv = llm.kv.to_dict()
        held = measure(_runtime.load(), llm._ctx.ctx).total("context")
    return [check_backend(kv["backend"], layers), check_lookup(kv), _check_size(kv, held)]


def check_backend(backend: str, n_gpu_layers: int) -> Finding:
    """Whether attention runs where the layers are."""
    if n_gpu_layers and "CPU" in backend.split(", "):
        return Finding(
            "attention",
            WARN,
            f"layers are on the GPU, attention runs on {backend}: the device has no kernel for this model's heads",
            "f16 or q8_0 for this model, or more layers on the GPU",
        )
    return Finding("attention", OK, f"runs on {backend}")


def check_lookup(kv: dict[str, Any]) -> Finding:
    """Whether sparse decoding is sparse."""
    share = float(kv.get("lookup_share", 1.0))
    if share < 1.0 and share > _LARGE_LOOKUP:
        return Finding(
            "look-up",
            WARN,
            f"decoding reads {100 * share:.0f} % of the far rows, more than {100 * _LARGE_LOOKUP:.0f} %",
            "a smaller kv_lookup, or dense decoding",
        )
    return Finding("look-up", OK, "dense" if share == 1.0 else f"{100 * share:.0f} % of the far rows")


def _check_size(kv: dict[str, Any], held: int) -> Finding:
    if abs(held - kv["bytes"]) <= 0.02 * held:
        return Finding("size", OK, f"{size_text(kv['bytes'])} reported, as much is allocated")
    return Finding(
        "size", OK, f"{size_text(kv['bytes'])} reported; {size_text(held)} allocated with the state of recurrent layers"
    )


# -- a server ----------------------------------------------------------------------------------------------------------


def _fetch(url: str, body: dict[str, Any] | None = None, key: str | None = None) -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=_SERVER_TIMEOUT) as answer:
        return json.loads(answer.read())


def check_server(url: str, key: str | None = None, fetch: Callable[..., Any] = _fetch) -> list[Finding]:
    """Whether a llama-server answers, how its context is shared out, and how fast it is.

    Args:
        url: its address, as http://127.0.0.1:8080.
        key: its API key.
        fetch: for tests.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        base = f"http://{base}"
    try:
        fetch(base + "/health", None, key)
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return [Finding("server", WARN, "it is still loading its model", "ask again in a moment")]
        return [Finding("server", FAIL, f"{base}/health answers {error.code}", "is this a llama-server?")]
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return [Finding("server", FAIL, f"{base} does not answer: {reason}", "is it running, and is this its port?")]
    findings = [Finding("server", OK, f"{base} answers")]
    try:
        props = fetch(base + "/props", None, key)
        answer = fetch(base + "/completion", {"prompt": "One, two, three,", "n_predict": 8, "temperature": 0}, key)
    except urllib.error.HTTPError as error:
        action = "give the key with --api-key" if error.code in (401, 403) else "look at the server's log"
        return [*findings, Finding("answers", FAIL, f"it refuses requests with code {error.code}", action)]
    except (OSError, ValueError) as error:
        return [*findings, Finding("answers", FAIL, f"a short completion failed: {error}", "look at the server's log")]
    findings.append(_check_slots(props))
    speed = float(answer.get("timings", {}).get("predicted_per_second") or 0)
    findings.append(_check_speed(speed))
    return findings


def _check_slots(props: dict[str, Any]) -> Finding:
    slots = int(props.get("total_slots") or 1)
    n_ctx = int((props.get("default_generation_settings") or {}).get("n_ctx") or 0)
    text = f"{slots} slots, up to {n_ctx} tokens each"
    if slots > 1:
        return Finding(
            "slots", OK, f"{text}; every slot has an exact tail of its own, -np 1 saves that for a single user"
        )
    return Finding("slots", OK, text)


def _check_speed(speed: float) -> Finding:
    if speed and speed < 2:
        return Finding(
            "speed",
            WARN,
            f"{speed:.1f} tokens a second: layers on the CPU, a GPU that spills, or more threads than cores",
            "kvfold doctor MODEL on that machine; kvfold bench threads; fewer tokens of context (kvfold plan)",
        )
    return Finding("speed", OK, f"{speed:.1f} tokens a second" if speed else "the server does not tell")


def to_dict(findings: list[Finding]) -> dict[str, Any]:
    """For ``--json``."""
    return {"status": worst(findings), "findings": [asdict(f) for f in findings]}
