"""How many threads are worth using - physical cores this process may run on, within its quota - and how they wait."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{cpu}/topology/{name}"
_CGROUP_ROOT = Path("/sys/fs/cgroup")


#: Rounds that a waiting thread spins, some microseconds: a thread that sleeps at every barrier takes longer to wake up
#: than small operations take, and one that spins for long takes the time of the thread it waits for (docs/tuning.md).
SPIN_COUNT = 500


def set_waiting(environment: MutableMapping[str, str]) -> None:
    """Let threads that wait for each other spin briefly, then sleep, unless the user says how OpenMP is to wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "passive"
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def default_threads() -> int:
    """Physical cores available to this process (affinity and cgroup quota respected), at least 1."""
    cores = _physical_cores(_allowed_cpus())
    quota = cpu_quota()
    if quota is not None:
        cores = min(cores, math.floor(quota))
    return max(cores, 1)


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    cores: set[tuple[str, str]] = set()
    for cpu in cpus:
        try:
            package = Path(_TOPOLOGY.format(cpu=cpu, name="physical_package_id")).read_text().strip()
            core = Path(_TOPOLOGY.format(cpu=cpu, name="core_id")).read_text().strip()
        except OSError:
            # No topology: assume two hardware threads a core on machines where nothing says otherwise.
            return max(len(cpus) // 2, 1) if not Path("/sys/devices/system/cpu").exists() else len(cpus)
        cores.add((package, core))
    return len(cores)


def cpu_quota() -> float | None:
    """CPU time limit of the control group in cores, ``None`` without one. The tightest of all parent groups counts."""
    quotas = [q for q in (_quota_v2(), _quota_v1()) if q is not None]
    return min(quotas, default=None)


def cgroup_directories(controller: str) -> list[Path]:
    """Directories of this process's group and its parents, innermost first; ``controller`` is empty for version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" and controller == "":
            root = _CGROUP_ROOT
        elif controller and controller in controllers.split(","):
            root = _CGROUP_ROOT / controller
        else:
            continue
        group = root / path.lstrip("/")
        return [p for p in (group, *group.parents) if p == root or root in p.parents]
    return []


def _quota_v2() -> float | None:
    quotas = []
    for group in cgroup_directories(""):
        try:
            limit, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if limit != "max":
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def _quota_v1() -> float | None:
    quotas = []
    for group in cgroup_directories("cpu"):
        try:
            limit = int((group / "cpu.cfs_quota_us").read_text())
            period = int((group / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if limit > 0 and period > 0:
            quotas.append(limit / period)
    return min(quotas, default=None)


#: Threads that are worth using when the GPU computes all layers: they only feed it, and more get in each other's way.
GPU_THREADS = 4


def recommended_threads(n_gpu_layers: int, n_layer: int, gpu: bool) -> int:
    """Threads by where the layers are: a few when all are on the GPU, else all physical cores that may be used.

    Args:
        n_gpu_layers: as given to ``Llama``; negative: all.
        n_layer: layers of the model. All are on the GPU when ``n_gpu_layers`` counts the output as well.
        gpu: whether the runtime can use one.
    """
    cores = default_threads()
    on_gpu = gpu and (n_gpu_layers < 0 or n_gpu_layers > n_layer)
    return min(cores, GPU_THREADS) if on_gpu else cores
