"""Settings files in the layered form, with ``kv_cache`` and ``csa2`` tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold import KvConfig, layer_modes

#: A model of 40 layers, described as such files do.
FULL_THEN_REUSE = ["full", "reuse", "reuse", "reuse", "reuse", "reuse"]
REINDEX = ["reindex", "reuse", "reuse", "reuse"]
EXAMPLE: dict[str, Any] = {
    "model": "a model",
    "context_window": 1000000,
    "kv_cache": {
        "global_kv_dtype": "fp4_e2m1",
        "global_kv_scale": "e4m3_per_16_channel",
        "swa_kv_dtype": "q8_0",
        "swa_window_size": 128,
    },
    "csa2": {
        "encoder": {
            "layers": 20,
            "first_two_layers": "swa_only",
            "compression_ratio": 2,
            "groups": [{"size": 6, "modes": FULL_THEN_REUSE}] * 3,
        },
        "decoder": {
            "layers": 20,
            "compression_ratio": 2,
            "groups": [{"size": 4, "modes": ["full", "reuse", "reuse", "reuse"]}, *[{"size": 4, "modes": REINDEX}] * 4],
        },
        "indexer": {
            "top_k": 512,
            "hierarchical": {
                "enabled": True,
                "max_blocks": 2048,
                "positions_per_block": 8,
                "candidate_pool_size": 16384,
            },
        },
    },
}

TOML = """
[kv_cache]
global_kv_dtype = "fp4_e2m1"
swa_window_size = 64
[csa2]
lookup = [0.1, 0.2]
[csa2.encoder]
compression_ratio = 4
[csa2.indexer]
top_k = 128
[csa2.indexer.hierarchical]
enabled = true
candidate_pool_size = 16384
"""


def test_layers_in_groups() -> None:
    config = KvConfig.from_mapping(EXAMPLE)
    assert (config.kv_type, config.group, config.tail, config.swa_type) == ("fp4_csa2", 2, 128, "q8_0")
    assert config.min_tokens == 1024, "512 groups of two tokens"
    assert config.hierarchical == "auto"
    modes = layer_modes.expand(str(config.layers))
    decoder = ["full", "reuse", "reuse", "reuse", *(REINDEX * 4)]
    assert modes == ["window"] * 2 + FULL_THEN_REUSE * 3 + decoder and len(modes) == 40


@pytest.mark.parametrize("channels", [16, 32, 64])
def test_channels_a_scale(channels: int) -> None:
    table = {**EXAMPLE["kv_cache"], "global_kv_scale": f"e4m3_per_{channels}_channel"}
    assert KvConfig.from_mapping({**EXAMPLE, "kv_cache": table}).scale_group == channels


def test_files(tmp_path: Path) -> None:
    toml, other = tmp_path / "kv.toml", tmp_path / "kv.json"
    toml.write_text(TOML)
    other.write_text(json.dumps(EXAMPLE))
    expected = KvConfig("fp4_csa2", group=4, tail=64, min_tokens=512, lookup=(0.1, 0.2), hierarchical="auto")
    assert KvConfig.from_file(toml) == expected
    assert KvConfig.from_file(other) == KvConfig.from_mapping(EXAMPLE)
    assert KvConfig.from_mapping({"kv_cache": {"swa_window_size": 32}}) == KvConfig("fp4", tail=32)


#: What to change in EXAMPLE (a path and a value), and words of the message.
BAD: list[tuple[str, Any, list[str]]] = [
    ("kv_cache.global_kv_dtype", "fp8", ["kv_cache.global_kv_dtype='fp8'", "fp4_e2m1"]),
    ("kv_cache.global_kv_scale", "e8m0", ["kv_cache.global_kv_scale", "e4m3_per_16_channel"]),
    ("kv_cache.swa_kv_dtype", "fp8", ["kv_cache.swa_kv_dtype='fp8'", "f16, q8_0"]),
    ("kv_cache.swa_window_size", 0, ["kv_tail=0"]),
    ("kv_cache.persistent_cache", {"global_kv_ttl_hours": 72}, ["kv_cache.persistent_cache", "not available"]),
    ("kv_cache", 3, ["kv_cache=3", "table"]),
    ("csa2.encoder.compression_ratio", 1, ["csa2.decoder.compression_ratio=2", "one ratio"]),
    ("csa2.encoder.compression_ratio", 3, ["compression_ratio"]),
    ("csa2.encoder.layers", 21, ["csa2.encoder.layers=21", "20 layers"]),
    ("csa2.encoder.first_two_layers", "full", ["csa2.encoder.first_two_layers='full'", "swa_only"]),
    ("csa2.encoder.groups", [{"size": 2, "modes": ["full"]}], ["csa2.encoder.groups[0].size=2", "1 modes"]),
    ("csa2.encoder.groups", [{"modes": ["fast"]}], ["csa2.encoder.groups[0].modes='fast'", "reindex"]),
    ("csa2.encoder.groups", [{"modes": []}], ["csa2.encoder.groups[0].modes"]),
    ("csa2.encoder.width", 3, ["csa2.encoder.width=3", "compression_ratio"]),
    ("csa2.middle", {}, ["csa2.middle", "encoder, decoder, indexer"]),
    ("csa2.indexer.query_heads", 32, ["csa2.indexer.query_heads=32", "top_k"]),
    ("csa2.indexer.top_k", 0, ["csa2.indexer.top_k=0"]),
    ("csa2.indexer.hierarchical.enabled", "no", ["csa2.indexer.hierarchical.enabled='no'", "true, false"]),
    ("csa2.indexer.hierarchical.candidate_pool_size", 1024, ["candidate_pool_size=1024", "16384"]),
    ("csa2.indexer.hierarchical.max_blocks", 1024, ["max_blocks=1024", "2048 of 8"]),
    ("swa_bounded_replay", {"encoder_replay_tokens": 128}, ["swa_bounded_replay", "kv_cache, csa2"]),
]


def test_one_level_only() -> None:
    mapping = json.loads(json.dumps(EXAMPLE))
    mapping["csa2"]["indexer"]["hierarchical"]["enabled"] = False
    assert KvConfig.from_mapping(mapping).hierarchical == "off"


@pytest.mark.parametrize(("path", "value", "words"), BAD, ids=[path for path, _, _ in BAD])
def test_what_is_impossible_is_named(path: str, value: Any, words: list[str]) -> None:
    mapping = json.loads(json.dumps(EXAMPLE))
    *tables, last = path.split(".")
    table = mapping
    for name in tables:
        table = table[name]
    table[last] = value
    with pytest.raises(ValueError) as caught:
        KvConfig.from_mapping(mapping)
    for word in words:
        assert word in str(caught.value)
