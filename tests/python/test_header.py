"""GGUF headers: what is read, what is refused, and which models a folding cache fits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from kvfold.gguf_header import GgufHeader, read_gguf_header
from kvfold.model_check import head_sizes, require_fit, why_unfit


def test_reads_what_the_gguf_package_reads(tiny_path: Callable[[str], Path]) -> None:
    import gguf

    path = tiny_path("llama-64-gqa3")
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    assert ours.architecture == "llama"
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.shape == tuple(int(d) for d in other.shape)
        assert ours.data_offset + mine.offset == other.data_offset


def test_real_vocabularies_are_skipped(smollm2_path: Path) -> None:
    header = read_gguf_header(smollm2_path)
    assert header.arch("context_length") == 8192
    assert header.metadata["tokenizer.ggml.tokens"] is None
    assert head_sizes(header) == (64, 64)
    assert why_unfit(header) is None


@pytest.mark.parametrize("name", sorted(tiny_models.GOOD))
def test_good_models_fit(tiny_path: Callable[[str], Path], name: str) -> None:
    require_fit(read_gguf_header(tiny_path(name)), "fp4")


@pytest.mark.parametrize("name", sorted(tiny_models.REFUSED))
def test_models_that_do_not_fit_are_named(tiny_path: Callable[[str], Path], name: str) -> None:
    path = tiny_path(name)
    with pytest.raises(ValueError) as caught:
        require_fit(read_gguf_header(path), "fp4_csa2")
    message = str(caught.value)
    for word in ("fp4_csa2", path.name, tiny_models.REFUSED[name][1], "f16"):
        assert word in message


def _header(arch: str, **values: Any) -> GgufHeader:
    base: dict[str, Any] = {"general.architecture": arch, f"{arch}.embedding_length": 256, f"{arch}.block_count": 2}
    base.update({f"{arch}.{key}": value for key, value in {"attention.head_count": 4, **values}.items()})
    return GgufHeader(Path(f"{arch}.gguf"), base, [], 0)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (_header("mamba"), "recurrent"),
        (_header("rwkv7"), "recurrent"),
        (_header("bert"), "no key/value cache"),
        (_header("deepseek4"), "cache of its own"),
        (_header("bloom"), "ALiBi"),
        (_header("baichuan", block_count=40), "ALiBi"),
        (_header("llama", **{"attention.key_length": 128, "attention.value_length": 64}), "both must be equal"),
        (_header("llama", **{"attention.head_count": 2, "attention.key_length": 112}), "112"),
        (_header("anything", **{"attention.kv_lora_rank": 512}), "MLA"),
    ],
    ids=lambda v: v.architecture if isinstance(v, GgufHeader) else "",
)
def test_reasons(header: GgufHeader, word: str) -> None:
    assert word in (why_unfit(header) or "")


def test_heads_by_layer() -> None:
    """Hybrid models list heads per layer, with 0 where a layer has no attention."""
    header = _header("lfm2", **{"attention.head_count": [0, 4, 0, 4], "attention.head_count_kv": [0, 2, 0, 2]})
    assert why_unfit(header) is None


def test_damaged_files_are_one_error(tiny_folder: Path) -> None:
    for name, path in tiny_models.write_damaged(tiny_folder).items():
        with pytest.raises(ValueError, match=path.name):
            read_gguf_header(path)
            pytest.fail(f"{name} was accepted")


def test_cut_anywhere_never_crashes(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    whole = tiny_path("llama-64-mha").read_bytes()
    end = read_gguf_header(tiny_path("llama-64-mha")).data_offset
    path = tmp_path / "cut.gguf"
    for size in {*range(0, end, 97), end, end + 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read_gguf_header(path)


def test_absurd_lengths_are_refused_at_once(tmp_path: Path) -> None:
    """A count of 2^60 must not be believed before the file is seen to be that long."""
    path = tmp_path / "absurd.gguf"
    key = b"general.name"
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", len(key))
        + key
        + struct.pack("<IIQ", 9, 8, 2**60)
        + bytes(64)
    )
    with pytest.raises(ValueError, match="ends inside its header"):
        read_gguf_header(path)


def test_missing_file() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_gguf_header("/nonexistent/model.gguf")
