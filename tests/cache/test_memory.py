"""Contracts 5 and 7: what is reported is what is allocated, nothing grows, and the sizes are the promised ones."""

from __future__ import annotations

import re

import pytest
from contract import CONFIGS, FOLDED, text
from harness import take_log
from probe import probe, resident_bytes


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", ["llama-64-mha", "llama-64-gqa3", "llama-128-gqa4", "llama-256-gqa2"])
@pytest.mark.parametrize(("scale_group", "block"), [(16, 36), (32, 34), (64, 33)])
def test_parts_add_up(open_context, config: str, name: str, scale_group: int, block: int) -> None:
    """The sum of the parts, each of which can be computed from the documentation."""
    context = open_context(config, name, n_seq=2, settings={"scale_group": scale_group})
    s = context.stats()
    head_dim, kv_heads = {"llama-64-mha": (64, 4), "llama-64-gqa3": (64, 3), "llama-128-gqa4": (128, 2)}.get(
        name, (256, 2)
    )
    layers, width, groups = 2, head_dim * kv_heads, s["n_cells"] // s["group"]
    assert s["n_cells"] % s["group"] == 0
    assert 768 <= s["n_cells"] <= 768 + 6 * s["group"]
    assert s["scale_group"] == scale_group
    assert s["far_bytes"] == layers * 2 * s["n_cells"] * width // 64 * block
    side = groups * width // 64 * 36 + groups * kv_heads * 2
    exact = layers * (-(-side // 8) * 8 + 2 * 8 + 4)  # two counters and a number behind them
    assert exact <= s["side_bytes"] < exact + layers * 128  # exact rows begin at a multiple of 128 bytes
    near_rows = 2 * (s["tail"] + s["group"] - 1 + s["sinks"])
    assert layers * 4 * width * near_rows <= s["near_bytes"] <= layers * 4 * width * (near_rows + 2)
    assert s["swa_bytes"] == 0
    assert s["f16_bytes"] == layers * 4 * width * 768
    parts = sum(s[key] for key in ("far_bytes", "side_bytes", "near_bytes", "swa_bytes"))
    assert parts <= s["bytes"] < parts + layers * 4 * 64


@pytest.mark.parametrize(
    ("config", "n_ctx", "share"),
    [
        ("fp4", 8192, 0.31),
        ("fp4", 65536, 0.29),
        ("fp4_csa2", 8192, 0.345),
        ("fp4_csa2", 65536, 0.325),
    ],
)
def test_default_sizes(open_context, config: str, n_ctx: int, share: float) -> None:
    """All bytes of one sequence with default settings, as a share of f16 (heads of 64 channels, the costliest size)."""
    s = open_context(f"default-{config}", "llama-64-gqa3", n_ctx=n_ctx).stats()
    assert s["bytes"] <= share * s["f16_bytes"]


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", ["llama-64-gqa3", "gemma3-256-iswa", "gpt-oss-64-sinks", "lfm2-64-hybrid"])
def test_reported_is_allocated(tiny_path, config: str, name: str) -> None:
    """A process with one context of 128K tokens has grown by the reported bytes (buffers are zeroed when allocated)."""
    kv_type = CONFIGS[config][0]
    result = probe(tiny_path(name), kv_type, n_ctx=131072, n_ubatch=16)
    assert result["ok"], result
    reported, grown = result["stats"]["bytes"], result["resident_growth"]
    assert reported > 30e6
    # What is left: the host's cell tables (llama.cpp's 52 bytes a cell, kvfold's 8; an f16 context grows by the former
    # too), the compute buffer's used pages and small objects.
    tables = 131072 * (52 + 8)
    assert reported - 1e6 <= grown <= reported + tables + 3e6


@pytest.mark.parametrize("config", FOLDED)
def test_nothing_grows(open_context, config: str) -> None:
    """Everything is allocated with the context: filling it changes neither the report nor the size of the process, but
    for pages of scratch that a deeper context is the first to touch."""
    context = open_context(config, "llama-128-gqa4", n_ctx=4096, n_ubatch=128)
    context.feed(text(0, 128), chunk=128)
    report = context.stats()

    def growth() -> int:
        """Bytes that the process grows by while the context is filled."""
        before = resident_bytes()
        for index in range(30):  # in parts, so that their logits are not kept
            context.feed(text(index, 128), chunk=128)
        after = context.stats()
        for key in ("bytes", "far_bytes", "side_bytes", "near_bytes", "n_cells"):
            assert after[key] == report[key]
        return resident_bytes() - before

    # At most 8 ranges of cells, each with partial results of 128 queries, 8 heads and 128 + 2 floats, and the mask.
    assert growth() < 8 * 128 * 8 * 130 * 4 + 2 * 2**20
    for _ in range(3):  # all is touched now; an f16 cache of this context has 16 MiB
        context.seq_rm(0)
        assert growth() < 2**20, "more pages"


@pytest.mark.parametrize("config", CONFIGS)
def test_contexts_do_not_leak(open_context, config: str) -> None:
    """Twenty contexts one after the other: flat."""
    sizes = []
    for _ in range(20):
        context = open_context(config, n_ctx=8192)
        context.feed(text(0, 40), chunk=20)
        context.close()
        sizes.append(resident_bytes())
    # Later ones against the first few, which warm allocator and libraries up; a leaked cache would be 5 MiB a round.
    assert sizes[-1] - sizes[4] < 8 * 2**20


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("n_ctx", [2048, 32768])
def test_compute_buffer(open_context, config: str, n_ctx: int) -> None:
    """No scratch that grows with the cache: the compute buffer is f16's, give or take the plan (256 KiB)."""
    sizes = {}
    for each in ("f16", f"default-{config}"):
        open_context(each, n_ctx=n_ctx, n_ubatch=256)
        sizes[each] = float(re.findall(r"CPU compute buffer size = +([\d.]+) MiB", take_log())[-1])
    assert sizes[f"default-{config}"] <= sizes["f16"] + 0.25


@pytest.mark.parametrize("config", FOLDED)
def test_start_up_line(open_context, config: str) -> None:
    """One line says what was allocated and where attention runs."""
    open_context(config)
    lines = [line for line in take_log().splitlines() if re.match(r"kv fp4", line)]
    assert len(lines) == 1
    assert re.match(rf"kv {config}: [\d.]+ MiB, f16 would be [\d.]+ .*near [\d.]+ MiB; attention on CPU", lines[0])


@pytest.mark.parametrize("config", FOLDED)
def test_counters(open_context, config: str) -> None:
    context = open_context(config)
    assert context.stats()["tokens"] == context.stats()["folds"] == 0
    context.feed(text(0, 200), chunk=16)
    s = context.stats()
    assert s["kv_type"] == config and s["backend"] == "CPU"
    assert s["tokens"] == 200
    assert s["folded_tokens"] == 200 - s["near_tokens"]
    assert s["near_tokens"] <= s["tail"] + s["group"] - 1 + s["sinks"]
    context.clear()
    assert context.stats()["tokens"] == context.stats()["near_tokens"] == 0


def test_no_statistics_of_an_ordinary_cache(open_context) -> None:
    assert open_context("f16").raw_stats() is None
