"""Settings: defaults, files, and one clear error for everything that cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from kvfold import KvConfig, layer_modes
from kvfold.config import GROUPS, LATER_SETTINGS, UPSTREAM_TYPES


@pytest.mark.parametrize(("kv_type", "group"), [("fp4", 32), ("fp4_csa2", 4)])
def test_defaults(kv_type: str, group: int) -> None:
    look_up = {
        "kv_lookup": (0.2, 0.2),
        "kv_threshold": 0.1,
        "kv_min_tokens": 256,
        "kv_max_tokens": 0,
        "kv_layers": "auto",
        "kv_hierarchical": "off",
        "kv_span_pool": 16384,
    }
    assert KvConfig(kv_type).to_dict() == {
        "kv_type": kv_type,
        "kv_group": group,
        "kv_tail": 128,
        "kv_sinks": 4,
        "kv_swa_type": "f16",
        "kv_scale_group": 16,
        **(look_up if kv_type == "fp4_csa2" else {}),
    }


@pytest.mark.parametrize("kv_type", sorted(UPSTREAM_TYPES))
def test_upstream_types_have_no_other_settings(kv_type: str) -> None:
    config = KvConfig(kv_type)
    assert config.to_dict() == {"kv_type": kv_type}
    assert not config.folds
    assert config.ggml_type == UPSTREAM_TYPES[kv_type]


@pytest.mark.parametrize(("kv_type", "group"), [(t, g) for t, groups in GROUPS.items() for g in groups])
def test_every_group_size(kv_type: str, group: int) -> None:
    config = KvConfig.from_kwargs(kv_type=kv_type, kv_group=group)
    assert config.group == group
    assert config.ggml_type == 40


#: Settings that must be refused, with words the message must contain: the setting, the value, what is possible.
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"kv_type": "fp5"}, ["kv_type", "'fp5'", "fp4_csa2", "q8_0", "did you mean 'fp4'"]),
    ({"kv_type": "FP4_CSA2"}, ["kv_type", "'FP4_CSA2'", "did you mean 'fp4_csa2'"]),
    ({"kv_type": 40}, ["kv_type", "40", "name", "fp4"]),
    ({"kv_type": ""}, ["kv_type", "''", "fp4"]),
    ({"kv_type": "fp4_csa2", "kv_keep": 0.5}, ["kv_keep", "0.5", "no effect", "fp4_csa2_ced"]),
    ({"kv_type": "fp4", "kv_score": "recent"}, ["kv_score", "'recent'", "no effect", "fp4_csa2_ced"]),
    ({"kv_type": "fp4_csa2_ced", "kv_keep": 0}, ["kv_keep", "0", "above 0"]),
    ({"kv_type": "fp4_csa2_ced", "kv_keep": 2}, ["kv_keep", "2", "up to 1"]),
    ({"kv_type": "fp4_csa2_ced", "kv_score": "reconstruct"}, ["kv_score", "compact", "keydiff"]),
    ({"kv_type": "fp4_csa2_ced", "kv_score": "keydif"}, ["kv_score", "did you mean 'keydiff'"]),
    ({"kv_type": "fp4_csa2_ced", "kv_score": "attn+attn"}, ["kv_score", "'attn+attn'", "keydiff+attn"]),
    ({"kv_type": "fp4_csa2_ced", "kv_mode": "demote"}, ["kv_mode", "not available in this version"]),
    ({"kv_typ": "fp4"}, ["kv_typ", "did you mean 'kv_type'"]),
    ({"kv_type": "fp4", "kv_tails": 1}, ["kv_tails", "did you mean 'kv_tail'"]),
    ({"kv_type": "fp4", "kv_tail": 0}, ["kv_tail", "0", "1 or more"]),
    ({"kv_type": "fp4", "kv_tail": -1}, ["kv_tail", "-1", "1 or more"]),
    ({"kv_type": "fp4", "kv_tail": 1.5}, ["kv_tail", "1.5", "whole number"]),
    ({"kv_type": "fp4", "kv_tail": "12"}, ["kv_tail", "'12'", "whole number"]),
    ({"kv_type": "fp4", "kv_tail": True}, ["kv_tail", "True", "whole number"]),
    ({"kv_type": "fp4", "kv_tail": 2**40}, ["kv_tail", str(2**40)]),
    ({"kv_type": "fp4", "kv_sinks": -1}, ["kv_sinks", "-1", "0 or more"]),
    ({"kv_type": "fp4", "kv_group": 3}, ["kv_group", "3", "2, 4, 8, 16, 32"]),
    ({"kv_type": "fp4_csa2", "kv_group": 32}, ["kv_group", "32", "2, 4, 8, 16"]),
    ({"kv_type": "fp4_csa2", "kv_group": 0}, ["kv_group", "0", "2, 4, 8, 16"]),
    ({"kv_type": "fp4_csa2", "kv_group": True}, ["kv_group", "True"]),
    ({"kv_type": "fp4", "kv_swa_type": "q4_0"}, ["kv_swa_type", "'q4_0'", "f16, q8_0"]),
    ({"kv_type": "fp4", "kv_scale_group": 8}, ["kv_scale_group", "8", "16, 32, 64"]),
    ({"kv_type": "fp4", "kv_scale_group": 48}, ["kv_scale_group", "48", "16, 32, 64"]),
    ({"kv_type": "fp4", "kv_scale_group": "x"}, ["kv_scale_group", "'x'", "16, 32, 64"]),
    ({"kv_type": "q8_0", "kv_scale_group": 32}, ["kv_scale_group", "32", "no effect"]),
    ({"kv_type": "q8_0", "kv_tail": 64}, ["kv_tail", "64", "q8_0", "fp4"]),
    ({"kv_group": 4}, ["kv_group", "4", "fp4"]),
    ({"kv_type": "fp4", "kv_lookup": 0.1}, ["kv_lookup", "0.1", "no effect", "fp4_csa2"]),
    ({"kv_type": "q8_0", "kv_layers": "full"}, ["kv_layers", "'full'", "no effect"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": 0}, ["kv_lookup", "0", "above 0"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": 1.5}, ["kv_lookup", "1.5", "up to 1"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": (0.3, 0.2)}, ["kv_lookup", "(0.3, 0.2)", "smallest"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": (0.1, 0.2, 0.3)}, ["kv_lookup", "MIN, MAX"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": "much"}, ["kv_lookup", "'much'"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": True}, ["kv_lookup", "True"]),
    ({"kv_type": "fp4_csa2", "kv_threshold": -0.1}, ["kv_threshold", "-0.1", "up to 1"]),
    ({"kv_type": "fp4_csa2", "kv_threshold": float("nan")}, ["kv_threshold", "nan"]),
    ({"kv_type": "fp4_csa2", "kv_min_tokens": -1}, ["kv_min_tokens", "-1", "0 or more"]),
    ({"kv_type": "fp4_csa2", "kv_min_tokens": 70000}, ["kv_min_tokens", "70000", "65535"]),
    ({"kv_type": "fp4_csa2", "kv_max_tokens": -1}, ["kv_max_tokens", "-1", "0 or more"]),
    ({"kv_type": "fp4_csa2", "kv_max_tokens": 70000}, ["kv_max_tokens", "70000", "65535"]),
    ({"kv_type": "fp4_csa2", "kv_max_tokens": 3}, ["kv_max_tokens", "3", "kv_group=4"]),
    (
        {"kv_type": "fp4_csa2", "kv_min_tokens": 64, "kv_max_tokens": 63},
        ["kv_max_tokens", "63", "kv_min_tokens=64", "0 is no bound"],
    ),
    ({"kv_type": "fp4_csa2", "kv_hierarchical": "yes"}, ["kv_hierarchical", "'yes'", "off, auto, on"]),
    ({"kv_type": "fp4_csa2", "kv_lookup": 1, "kv_hierarchical": "on"}, ["kv_hierarchical", "'on'", "kv_lookup"]),
    ({"kv_type": "fp4_csa2", "kv_span_pool": 0}, ["kv_span_pool", "0", "1 or more"]),
    ({"kv_type": "fp4_csa2", "kv_span_pool": 300000}, ["kv_span_pool", "300000", "262144"]),
    ({"kv_type": "fp4", "kv_span_pool": 64}, ["kv_span_pool", "64", "no effect"]),
    ({"kv_type": "fp4_csa2", "kv_min_context": 1.5}, ["kv_min_context", "1.5", "whole number"]),
    ({"kv_type": "fp4_csa2", "kv_layers": "fast"}, ["kv_layers", "'fast'", "dense", "reindex"]),
    ({"kv_type": "fp4_csa2", "kv_layers": "reuse"}, ["kv_layers", "reuse needs a full layer"]),
    ({"kv_type": "fp4_csa2", "kv_layers": 3}, ["kv_layers", "3", "text"]),
    ({"kv_type": "fp4_csa2", "kv_alignment": 1}, ["kv_alignment", "1", "True or False"]),
]


def test_lookup_is_one_share_or_two() -> None:
    for given, kept in (((0.1, 0.25), (0.1, 0.25)), (0.2, (0.2, 0.2)), ("0.05,0.1", (0.05, 0.1)), ([0, 1], (0.0, 1.0))):
        assert KvConfig("fp4_csa2", lookup=given).lookup == kept  # type: ignore[arg-type]


#: Texts of kv_layers and what they list.
LAYERS: list[tuple[str, list[str]]] = [
    ("auto", []),
    ("full", ["full"]),
    ("dense*2,full", ["dense", "dense", "full"]),
    ("dense,(full,reuse*2)*2", ["dense", "full", "reuse", "reuse", "full", "reuse", "reuse"]),
    ("full,reindex,reuse,window", ["full", "reindex", "reuse", "window"]),
    (
        "dense,(full:0.25,reuse)*2,full:.5*2",
        ["dense", "full:0.25", "reuse", "full:0.25", "reuse", "full:0.5", "full:0.5"],
    ),
    ("full:1,reindex:0.125", ["full:1", "reindex:0.125"]),
]


@pytest.mark.parametrize(("text", "modes"), LAYERS)
def test_layer_modes(core, text: str, modes: list[str]) -> None:
    assert layer_modes.expand(text) == modes
    core.check_config({"kv_type": "fp4_csa2", "layers": text})


BAD_LAYERS = ["", "fulll", "full,", ",full", "full**2", "full*0", "full*x", "full*-1", "(full", "full)", "((full))"]
BAD_LAYERS += ["full:", "full:0", "full:1.5", "full:x", "full:0.3:0.3", "full:-1", "full:..", "dense:0.3", "(full):1"]
BAD_LAYERS += ["full reuse", "FULL", "reuse,full", "reindex", "dense,reindex,full", "window,reuse", "full*5000", "()"]


@pytest.mark.parametrize("text", [t for t in BAD_LAYERS if t] + ["full," * 300 + "full"])
def test_bad_layer_modes_are_refused_alike(core, text: str) -> None:
    """Here and in the runtime, which the command line tools ask."""
    for check in (layer_modes.expand, lambda t: core.check_config({"kv_type": "fp4_csa2", "layers": t})):
        with pytest.raises(ValueError, match="kv_layers"):
            check(text)


#: Settings in the words of the runtime that it must refuse by name.
BAD_IN_RUNTIME: list[tuple[dict[str, Any], str]] = [
    ({"kv_type": "fp4", "lookup": "0.2"}, "kv_lookup"),
    ({"kv_type": "fp4", "threshold": "0.2"}, "kv_threshold"),
    ({"kv_type": "fp4", "min_tokens": "2"}, "kv_min_tokens"),
    ({"kv_type": "fp4", "min_context": "2"}, "kv_min_context"),
    ({"kv_type": "fp4", "layers": "full"}, "kv_layers"),
    ({"kv_type": "fp4_csa2", "lookup": "0.2,0.1"}, "kv_lookup"),
    ({"kv_type": "fp4_csa2", "lookup": "0"}, "kv_lookup"),
    ({"kv_type": "fp4_csa2", "lookup": "0.2x"}, "kv_lookup"),
    ({"kv_type": "fp4_csa2", "lookup": "nan"}, "kv_lookup"),
    ({"kv_type": "fp4_csa2", "lookup": ""}, "kv_lookup"),
    ({"kv_type": "fp4_csa2", "threshold": "2"}, "kv_threshold"),
    ({"kv_type": "fp4_csa2", "min_tokens": "65536"}, "kv_min_tokens"),
    ({"kv_type": "fp4_csa2", "min_context": "-1"}, "kv_min_context"),
    ({"kv_type": "fp4_csa2", "max_tokens": "65536"}, "kv_max_tokens"),
    ({"kv_type": "fp4_csa2", "max_tokens": "-1"}, "kv_max_tokens"),
    ({"kv_type": "fp4_csa2", "max_tokens": "3"}, "kv_max_tokens 3 is less than kv_group 4"),
    ({"kv_type": "fp4_csa2", "max_tokens": "63", "min_tokens": "64"}, "kv_max_tokens 63 is less than kv_min_tokens 64"),
    ({"kv_type": "fp4", "max_tokens": "64"}, "kv_max_tokens"),
    ({"kv_type": "fp4_csa2", "hierarchical": "yes"}, "kv_hierarchical"),
    ({"kv_type": "fp4_csa2", "hierarchical": "on", "lookup": "1"}, "kv_hierarchical"),
    ({"kv_type": "fp4", "hierarchical": "on"}, "kv_hierarchical"),
    ({"kv_type": "fp4_csa2", "span_pool": "0"}, "kv_span_pool"),
    ({"kv_type": "fp4_csa2", "span_pool": "262145"}, "kv_span_pool"),
    ({"kv_type": "fp4", "span_pool": "64"}, "kv_span_pool"),
    ({"kv_type": "fp4_csa2", "alignment": "yes"}, "kv_alignment"),
    ({"kv_type": "fp4", "alignment": "true"}, "kv_alignment"),
]


@pytest.mark.parametrize(("settings", "name"), BAD_IN_RUNTIME)
def test_runtime_names_bad_look_up_settings(core, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        core.check_config(settings)
    core.check_config({"kv_type": "fp4_csa2", "lookup": "0.05,0.5", "threshold": 1, "min_tokens": 0, "min_context": 0})
    core.check_config({"kv_type": "fp4_csa2", "max_tokens": 65535, "hierarchical": "on", "span_pool": 1})


def test_text_is_what_flags_take(core) -> None:
    text = KvConfig("fp4_csa2", lookup=(0.05, 0.25), layers="full").to_text()
    assert text["kv_lookup"] == "0.05,0.25" and text["kv_group"] == "4" and text["kv_layers"] == "full"
    core.check_config(text)


def test_bound_on_tokens_lowers_the_default_of_the_other() -> None:
    assert KvConfig("fp4_csa2", max_tokens=100).min_tokens == 100
    assert KvConfig("fp4_csa2", max_tokens=1000).min_tokens == 256


def test_another_type_drops_look_up_defaults_only() -> None:
    assert KvConfig("fp4_csa2").merged(kv_type="fp4").kv_type == "fp4"
    with pytest.raises(ValueError, match="kv_min_tokens=512"):
        KvConfig("fp4_csa2", min_tokens=512).merged(kv_type="fp4")


@pytest.mark.parametrize(("settings", "words"), BAD, ids=[str(list(s.items())[-1]) for s, _ in BAD])
def test_bad_settings_are_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        KvConfig.from_kwargs(**settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", LATER_SETTINGS)
def test_settings_of_later_versions_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not available in this version"):
        KvConfig.from_kwargs(kv_type="fp4_csa2", **{name: 1})


def test_config_is_frozen_and_hashable() -> None:
    config = KvConfig("fp4")
    with pytest.raises(AttributeError):
        config.tail = 3  # type: ignore[misc]
    assert len({config, KvConfig("fp4"), KvConfig("fp4", group=2)}) == 2


def test_numpy_numbers_are_numbers() -> None:
    assert KvConfig("fp4", group=numpy.int64(8), tail=numpy.int32(7)).to_dict()["kv_tail"] == 7


def test_mapping_takes_both_spellings_and_a_table() -> None:
    expected = KvConfig("fp4_csa2", group=8, tail=64)
    assert KvConfig.from_mapping({"kv_type": "fp4_csa2", "kv_group": 8, "kv_tail": 64}) == expected
    assert KvConfig.from_mapping({"type": "fp4_csa2", "group": 8, "tail": 64}) == expected
    assert KvConfig.from_mapping({"kv": {"type": "fp4_csa2", "group": 8, "kv_tail": 64}}) == expected
    assert KvConfig.from_mapping(expected.to_dict()) == expected
    with pytest.raises(ValueError, match="kv_tail is given twice"):
        KvConfig.from_mapping({"type": "fp4", "tail": 1, "kv_tail": 2})
    with pytest.raises(ValueError, match="kv_nonsense"):
        KvConfig.from_mapping({"type": "fp4", "nonsense": 2})


def test_files(tmp_path: Path) -> None:
    expected = KvConfig("fp4", group=16, sinks=0, swa_type="q8_0")
    toml = tmp_path / "kv.toml"
    toml.write_text('[kv]\ntype = "fp4"\ngroup = 16\nsinks = 0\nswa_type = "q8_0"\n')
    as_json = tmp_path / "kv.json"
    as_json.write_text(json.dumps(expected.to_dict()))
    assert KvConfig.from_file(toml) == expected
    assert KvConfig.from_file(str(as_json)) == expected
    assert KvConfig.coerce(toml) == KvConfig.coerce(expected) == KvConfig.coerce(expected.to_dict()) == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("kv.toml", "kv_type = !\n", ["kv.toml", "line 1"]),
        ("kv.json", "{", ["kv.json", "line 1"]),
        ("kv.json", "[1]", ["kv.json", "table", "list"]),
        ("kv.yaml", "kv_type: fp4", ["kv.yaml", ".toml or .json"]),
        ("kv.toml", 'kv_type = "fp4"\nkv_tail = 0', ["kv.toml", "kv_tail=0", "1 or more"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        KvConfig.from_file(path)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        KvConfig.from_file(tmp_path / "missing.toml")


def test_merged_settings_go_before() -> None:
    base = KvConfig("fp4_csa2", tail=64)
    assert base.merged(kv_group=8) == KvConfig("fp4_csa2", group=8, tail=64)
    assert base.merged(kv_type="fp4") == KvConfig("fp4", tail=64)
    with pytest.raises(ValueError, match="kv_group=3"):
        base.merged(kv_group=3)


def test_modes_are_written_as_they_are_read() -> None:
    for text in ("dense*2,full:0.3*10,full", "full", "full:0.25,reuse*3,window"):
        assert layer_modes.compress(layer_modes.expand(text)) == text
    assert layer_modes.without_shares("dense,(full:0.25,reuse)*2,full:.5*2") == "dense,(full,reuse)*2,full*2"
