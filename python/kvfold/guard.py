"""Checks free memory before a model is loaded: too little is an error with what would fit, little is a warning.

On a GPU the driver's free memory is compared with a dry run of the runtime, device by device. On the CPU the cache,
which has to be resident, is compared with the machine's free memory; weights are mapped from their file and only warned
about.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from .devices import Device, free_memory, gpus
from .gguf_header import GgufHeader
from .kv_layout import UnknownLayout, cache_layers, cache_size
from .memory import least_cache_bytes
from .plan import HEADROOM, what_fits
from .sizing import Planner, Settings
from .units import size_text

#: How to load regardless, for messages.
_OVERRIDE = "memory_guard=False loads regardless"


def check_free_memory(header: GgufHeader, settings: Settings, *, mapped: bool = True) -> None:
    """Compare what ``settings`` take with what is free.

    Args:
        header: of the model.
        settings: what is about to be loaded.
        mapped: weights are mapped from the file, so that on the CPU they need not all be resident.

    Raises:
        ValueError: they do not fit; the message says what is missing and which settings would fit.
    Warns:
        RuntimeWarning: they fit with less than 5 % of the memory to spare.
    """
    devices = gpus() if settings.n_gpu_layers != 0 else []
    if devices:
        _check_gpus(header, settings, devices)
    else:
        _check_machine(header, settings, mapped)


def _describe(settings: Settings) -> str:
    return f"n_ctx={settings.n_ctx}, kv_type={settings.config.kv_type!r}"


def _check_gpus(header: GgufHeader, settings: Settings, devices: list[Device]) -> None:
    with Planner(header.path, devices) as planner:
        run = planner.measured(settings)
    have = free_memory()
    on_host = run.total("context", host=True) + run.total("compute", host=True)
    if have is not None and on_host > have:
        raise ValueError(
            f"{_describe(settings)}, n_gpu_layers={settings.n_gpu_layers}: the layers on the CPU take "
            f"{size_text(on_host)} for cache and compute buffers, this machine has {size_text(have)} free. "
            f"{what_fits(header.path, settings)} ({_OVERRIDE})"
        )
    for device in devices:
        need = sum(buffer.total for buffer in run.buffers if buffer.device == device.name and not buffer.host)
        spare = 1 - need / device.free if device.free else -1.0
        if spare < 0:
            raise ValueError(
                f"{_describe(settings)}, n_gpu_layers={settings.n_gpu_layers}: {Path(header.path).name} takes "
                f"{size_text(need)} on {device.name}, {size_text(device.free)} are free there. "
                f"{what_fits(header.path, settings)} ({_OVERRIDE})"
            )
        if spare < HEADROOM:
            warnings.warn(
                f"{_describe(settings)}: only {100 * spare:.1f} % of {device.name}'s free memory is left after "
                "loading; it may spill into the machine's memory, which makes everything slow",
                RuntimeWarning,
                stacklevel=4,
            )


def _check_machine(header: GgufHeader, settings: Settings, mapped: bool) -> None:
    have = free_memory()
    if have is None:
        return
    weights = Path(header.path).stat().st_size - header.data_offset
    cache = _cache_bytes(header, settings)
    need = cache if mapped else cache + weights
    if need > have:
        what = "its cache takes" if mapped else "cache and weights take"
        raise ValueError(
            f"{_describe(settings)}: for {Path(header.path).name} {what} {size_text(need)}, this machine has "
            f"{size_text(have)} free. {what_fits(header.path, settings)} ({_OVERRIDE})"
        )
    spare = 1 - (cache + weights) / have
    if spare < HEADROOM:
        warnings.warn(
            f"{_describe(settings)}: cache and weights of {Path(header.path).name} take {size_text(cache + weights)}, "
            f"{size_text(have)} are free; the machine may have to read weights from the disk again and again",
            RuntimeWarning,
            stacklevel=4,
        )


def _cache_bytes(header: GgufHeader, settings: Settings) -> int:
    try:
        layers = cache_layers(header)
    except UnknownLayout:
        return least_cache_bytes(header, settings.n_ctx, settings.config.kv_type)
    size = cache_size(
        layers,
        settings.config,
        settings.n_ctx,
        n_ubatch=settings.n_ubatch,
        n_seq=settings.n_seq,
        swa_full=settings.swa_full,
    )
    return size.bytes
