"""Settings: defaults, files, and one clear error for everything that cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold import KvConfig
from kvfold.config import GROUPS, LATER_SETTINGS, UPSTREAM_TYPES


@pytest.mark.parametrize(("kv_type", "group"), [("fp4", 32), ("fp4_csa2", 4)])
def test_defaults(kv_type: str, group: int) -> None:
    assert KvConfig(kv_type).to_dict() == {
        "kv_type": kv_type,
        "kv_group": group,
        "kv_tail": 128,
        "kv_sinks": 4,
        "kv_swa_type": "f16",
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
    ({"kv_type": "fp4_csa2_ced"}, ["kv_type", "fp4_csa2_ced", "not available in this version", "fp4_csa2"]),
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
    ({"kv_type": "q8_0", "kv_tail": 64}, ["kv_tail", "64", "q8_0", "fp4"]),
    ({"kv_group": 4}, ["kv_group", "4", "fp4"]),
]


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
    numpy = pytest.importorskip("numpy")
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
