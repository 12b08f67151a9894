"""The default number of threads: physical cores, within affinity and quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfold import threads


def test_within_what_the_process_may_use() -> None:
    assert 1 <= threads.default_threads() <= len(os.sched_getaffinity(0))


def test_affinity_counts() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert threads.default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (2.0, 2), (3.9, 3), (None, 8), (64.0, 8)])
def test_quota_counts(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(threads, "_physical_cores", lambda _cpus: 8)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    assert threads.default_threads() == expected


def test_hardware_threads_are_not_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_TOPOLOGY", str(tmp_path) + "/{cpu}-{name}")
    for cpu in range(8):
        (tmp_path / f"{cpu}-physical_package_id").write_text("0\n")
        (tmp_path / f"{cpu}-core_id").write_text(f"{cpu // 2}\n")
    assert threads._physical_cores(set(range(8))) == 4
    assert threads._physical_cores({0, 1}) == 1


def test_tightest_parent_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    monkeypatch.setattr(
        threads, "cgroup_directories", lambda controller: [] if controller else [inner, inner.parent, tmp_path]
    )
    assert threads.cpu_quota() == 1.5
