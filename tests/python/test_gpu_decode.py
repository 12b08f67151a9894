"""bench/gpu_decode.py: bytes a token reads, bandwidth, tables. Nothing is run."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import decode
import gpu_decode
from synth_gguf import SHAPES

LLAMA_8B = SHAPES["llama-8b"]  # 32 layers, 8 KV heads of 128: 1024 values a row
CELLS = 65536


@pytest.mark.parametrize(
    ("kv_type", "expected"),
    [
        ("f16", 32 * 65536 * 2 * 2048),
        ("q8_0", 32 * 65536 * 2 * 1088),
        ("q4_0", 32 * 65536 * 2 * 576),
        # The tail of 128 and 4 sinks are exact: 65404 rows of 576 bytes for keys and for values. Groups of 32: 2044
        # have folded rows, the first one 28 of them (75 345 408 + 1 177 344 + 540 672 bytes a layer).
        ("fp4", 32 * (65404 * 2 * 576 + 2044 * 576 + 132 * 2 * 2048)),
        # Groups of 4: the sinks fill the first one, which has no summary (75 345 408 + 9 418 176 + 540 672).
        ("fp4_csa2/layers=dense", 32 * (65404 * 2 * 576 + 16351 * 576 + 132 * 2 * 2048)),
    ],
)
def test_bytes_of_the_8b_shape(kv_type: str, expected: int) -> None:
    assert gpu_decode.kv_bytes(LLAMA_8B, kv_type, CELLS) == expected


def test_known_totals() -> None:
    assert gpu_decode.kv_bytes(LLAMA_8B, "f16", CELLS) == 8 << 30
    assert gpu_decode.kv_bytes(LLAMA_8B, "fp4", CELLS) == 2_466_029_568
    assert gpu_decode.kv_bytes(LLAMA_8B, "fp4_csa2/layers=dense", CELLS) == 2_729_736_192


def test_look_up_reads_all_summaries_and_a_fifth_of_the_rows() -> None:
    dense = 65404 * 2 * 576 + 16351 * 576 + 132 * 2 * 2048
    chosen = 13080  # a fifth of 65404 rows
    layer = 132 * 2 * 2048 + 16351 * (576 + 16) + chosen * 2 * 576 + chosen // 4 * 576
    assert gpu_decode.kv_bytes(LLAMA_8B, "fp4_csa2/min_context=4096", CELLS) == 2 * dense + 30 * layer
    # Too short to look up, by the default and by the setting.
    for kv_type, cells in (("fp4_csa2", CELLS), ("fp4_csa2/min_context=4096", 2048)):
        assert gpu_decode.kv_bytes(LLAMA_8B, kv_type, cells) == gpu_decode.kv_bytes(
            LLAMA_8B, "fp4_csa2/layers=dense", cells
        )


def test_everything_is_exact_while_it_is_near() -> None:
    for kv_type in ("fp4", "fp4_csa2"):
        assert gpu_decode.kv_bytes(LLAMA_8B, kv_type, 128) == gpu_decode.kv_bytes(LLAMA_8B, "f16", 128)
        assert gpu_decode.kv_bytes(LLAMA_8B, kv_type, 0) == 0


def test_windows_count_what_they_see() -> None:
    shape = SHAPES["gemma3-4b"]  # 34 layers, 5 of them see everything; 4 KV heads of 256
    assert [i for i in range(shape.layers) if shape.sees_all(i)] == [5, 11, 17, 23, 29]
    assert gpu_decode.kv_bytes(shape, "f16", CELLS) == 4096 * (29 * 1024 + 5 * CELLS)
    folded = 65404 * 2 * 576 + 2044 * 576 + 132 * 2 * 2048
    assert gpu_decode.kv_bytes(shape, "fp4", CELLS) == 4096 * 29 * 1024 + 5 * folded
    assert gpu_decode.kv_bytes(shape, "fp4/swa_type=q8_0", CELLS) == 2 * 1088 * 29 * 1024 + 5 * folded


def test_types_whose_bytes_are_not_known_are_named() -> None:
    with pytest.raises(SystemExit, match=r"'fp5'.*possible"):
        gpu_decode.kv_bytes(LLAMA_8B, "fp5", CELLS)
    with pytest.raises(SystemExit, match="layers=reuse"):
        gpu_decode.kv_bytes(LLAMA_8B, "fp4_csa2/layers=reuse", CELLS)
    with pytest.raises(SystemExit, match="'group'"):
        gpu_decode.kv_bytes(LLAMA_8B, "fp4/group", CELLS)


def test_settings_become_flags() -> None:
    assert decode.type_flags("fp4/group=8/swa_type=q8_0") == [
        *("--kv-type", "fp4", "--kv-group", "8", "--kv-swa-type", "q8_0")
    ]


def test_bandwidth_is_of_the_time_that_depth_adds() -> None:
    # 5 ms at depth, 3 ms without: 8 GB in 2 ms.
    assert gpu_decode.bandwidth(8_000_000_000, 200, 1000 / 3) == pytest.approx(4e12)
    assert gpu_decode.bandwidth(8_000_000_000, 200, 200) is None


def test_tables() -> None:
    samples: decode.Samples = {
        ("f16", 0, "tg"): [330.0, 340.0, 335.0],
        ("f16", CELLS, "tg"): [150.0, 160.0, 155.0],
        ("fp4", 0, "tg"): [300.0],
        ("fp4", CELLS, "tg"): [201.5],
        ("f16", 0, "pp"): [10000.0],
        ("fp4", 0, "pp"): [9500.0],
    }
    text = gpu_decode.decode_table(LLAMA_8B, samples, ["f16", "fp4", "q4_0"], [0, CELLS])
    lines = text.split("\n")
    assert lines[:3] == [
        "| depth | type | t/s | / f16 | KV read, MB | GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 0 | f16 | 335.0 | 1.00 | 0.0 | - |",
    ]
    # 8589.9 MB / (1 / 155 - 1 / 335 s), 2466.0 MB / (1 / 201.5 - 1 / 300 s)
    assert lines[5] == "| 65536 | f16 | 155.0 | 1.00 | 8589.9 | 2478 |"
    assert lines[6] == "| 65536 | fp4 | 201.5 | 1.30 | 2466.0 | 1513 |"
    assert lines[7] == "| 65536 | q4_0 | failed | - | 2415.9 | - |"
    assert gpu_decode.prefill_table(samples, ["f16", "fp4"], [0]).split("\n")[-1] == "| 0 | fp4 | 9500.0 | 0.95 |"


def test_gpu_and_cpu_agree_by_what_a_type_costs() -> None:
    cost = (1.0e-3, 5e-5)
    assert gpu_decode.agree(2e-4, cost, (1.1e-3, 5e-5))
    assert not gpu_decode.agree(6e-4, cost, cost)  # too far from each other, whatever they cost
    assert not gpu_decode.agree(2e-4, cost, (1.3e-3, 5e-5))  # costs more there than errors explain
    assert not gpu_decode.agree(2e-4, cost, (0.7e-3, 5e-5))
    assert not gpu_decode.agree(float("nan"), cost, cost)
    assert not gpu_decode.agree(2e-4, cost, (float("nan"), float("nan")))


def test_divergence_is_found_in_the_output() -> None:
    output = "====== KL divergence statistics ======\nMean    KLD:   0.000970 ±   0.000031\nMaximum KLD:   0.1\n"
    assert gpu_decode.mean_kld(output) == (0.00097, 0.000031)
    assert all(math.isnan(x) for x in gpu_decode.mean_kld("Mean    KLD:        nan ±        nan"))
    with pytest.raises(SystemExit, match="no mean KLD"):
        gpu_decode.mean_kld("something else")
