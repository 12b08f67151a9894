"""Contract 6: what cannot be honoured is refused with one clear message; nothing aborts."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from contract import FOLDED
from harness import FLASH_ATTN_AUTO, FLASH_ATTN_OFF, FLASH_ATTN_ON
from probe import probe


def refused(result: dict[str, Any], *words: str) -> None:
    assert result["returncode"] == 1, f"return code {result['returncode']}: {result['stderr'][-2000:]}"
    assert not result["ok"]
    for word in words:
        assert word.lower() in result["error"].lower(), f"{word!r} is not in {result['error']!r}"


@pytest.mark.parametrize("config", FOLDED)
@pytest.mark.parametrize("name", tiny_models.REFUSED)
@pytest.mark.parametrize("flash_attn", [FLASH_ATTN_ON, FLASH_ATTN_AUTO])
def test_models_that_do_not_fit(tiny_path, config: str, name: str, flash_attn: int) -> None:
    """Head sizes 80, 96 and 100, ALiBi, MLA: the message names the reason."""
    refused(probe(tiny_path(name), config, flash_attn=flash_attn), tiny_models.REFUSED[name][1])


@pytest.mark.parametrize("name", tiny_models.REFUSED)
def test_they_run_with_f16(tiny_path, name: str) -> None:
    result = probe(tiny_path(name), "f16", flash_attn=FLASH_ATTN_AUTO)
    assert result["returncode"] == 0, result["error"]


@pytest.mark.parametrize("config", FOLDED)
def test_flash_attention_off(tiny_path, config: str) -> None:
    refused(probe(tiny_path("llama-64-mha"), config, flash_attn=FLASH_ATTN_OFF), "flash")


@pytest.mark.parametrize(("kv_type", "settings", "words"), [
    ("fp5", {}, ["fp5", "fp4", "fp4_csa2"]),
    ("", {}, ["fp4_csa2"]),
    ("fp4_csa2", {"tail": 0}, ["tail", "0"]),
    ("fp4_csa2", {"tail": -5}, ["tail", "-5"]),
    ("fp4_csa2", {"sinks": -1}, ["sinks", "-1"]),
    ("fp4_csa2", {"group": 3}, ["group", "3", "4"]),
    ("fp4_csa2", {"group": 32}, ["group", "32", "16"]),
    ("fp4", {"group": 64}, ["group", "64", "32"]),
    ("fp4", {"group": -4}, ["group", "-4"]),
    ("fp4", {"swa_type": "q4_0"}, ["swa", "q4_0", "q8_0"]),
    ("fp4", {"scale_group": 24}, ["kv_scale_group", "24", "16, 32 or 64"]),
    ("fp4", {"tial": 64}, ["tial"]),
])  # fmt: skip
def test_settings_that_make_no_sense(tiny_path, kv_type: str, settings: dict[str, Any], words: list[str]) -> None:
    refused(probe(tiny_path("llama-64-mha"), kv_type, settings=settings), *words)


@pytest.mark.parametrize("kind", ["half", "header-only", "empty", "magic", "version"])
def test_damaged_models(tiny_folder, kind: str) -> None:
    refused(probe(tiny_models.write_damaged(tiny_folder)[kind], "fp4_csa2"), "load")


@pytest.mark.parametrize("config", FOLDED)
def test_mixed_cache_types(tiny_path, config: str) -> None:
    """A configuration is active but the types do not ask for it: an error or an ordinary cache, never a crash."""
    for types in ({"type_k": 1}, {"type_v": 1}, {"type_k": 8, "type_v": 8}):
        result = probe(tiny_path("llama-64-mha"), config, **types)
        assert result["returncode"] in (0, 1), result["stderr"][-2000:]


@pytest.mark.parametrize("config", FOLDED)
def test_a_tail_longer_than_the_context(tiny_path, config: str) -> None:
    """Harmless, or refused; never more memory than the context needs."""
    result = probe(tiny_path("llama-64-mha"), config, n_ctx=256, settings={"tail": 5000})
    assert result["returncode"] in (0, 1), result["stderr"][-2000:]
    if result["ok"]:
        assert result["stats"]["near_bytes"] <= 2 * 4 * 256 * (256 + 64)


@pytest.mark.parametrize("config", FOLDED)
def test_tiny_contexts(tiny_path, config: str) -> None:
    for n_ctx in (1, 8, 33):
        result = probe(tiny_path("llama-64-mha"), config, n_ctx=n_ctx, n_ubatch=8)
        assert result["returncode"] in (0, 1), result["stderr"][-2000:]
