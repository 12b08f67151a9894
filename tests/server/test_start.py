"""Starting the server: settings from flags and variables, and one error with exit code 1 for bad ones."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from running import Server, program


def test_the_start_up_line_says_what_is_allocated(server: Server) -> None:
    """Contract 7."""
    lines = [line for line in server.log.splitlines() if "kv fp4_csa2:" in line]
    assert len(lines) == 1, server.log
    for word in ("MiB", "f16 would be", "near", "attention on CPU"):
        assert word in lines[0]


def test_settings_from_the_environment(core: object, smollm2_path: Path, tmp_path: Path) -> None:
    environment = {
        "LLAMA_ARG_KV_TYPE": "fp4",
        "LLAMA_ARG_KV_GROUP": "16",
        "LLAMA_ARG_KV_TAIL": "64",
        "LLAMA_ARG_KV_SINKS": "2",
    }
    server = Server(tmp_path, "-m", str(smollm2_path), "-c", "1024", environment=environment)
    try:
        server.wait_ready()
        assert server.complete("One, two, three,", 4)["tokens_predicted"] == 4
        assert "kv fp4:" in server.log
    finally:
        assert server.stop() >= 0


@pytest.mark.parametrize(
    ("layers", "told", "least", "most"),
    [(["--kv-layers", "dense*2,full"], "25 to 25", 0.25, 0.27), ([], "22 to 50", 0.224, 0.33)],
)
def test_metrics_show_look_ups(
    core: object, smollm2_path: Path, tmp_path: Path, layers: list[str], told: str, least: float, most: float
) -> None:
    """And the start-up line says from where on and how much."""
    arguments = ["-m", str(smollm2_path), "-c", "1024", "-np", "1", "--metrics", "--kv-type", "fp4_csa2"]
    arguments += ["--kv-min-context", "64", "--kv-min-tokens", "0", "--kv-lookup", "0.25", *layers]
    server = Server(tmp_path, *arguments)
    try:
        server.wait_ready()
        server.complete("One, two, three, " * 80, 8, cache_prompt=False)
        status, text = server.request("GET", "/metrics")
        assert status == 200
        values = {
            k: float(v) for k, _, v in (x.partition(" ") for x in text.decode().splitlines() if x.startswith("kvfold:"))
        }
        assert f"beyond 64 tokens layers read {told} % of it in decoding" in server.log
    finally:
        assert server.stop() >= 0
    assert values["kvfold:lookup_steps_total"] == 7, "the first of 8 tokens comes from the prompt"
    assert values["kvfold:dense_fallbacks_total"] == 0
    share = values["kvfold:lookup_groups_read_total"] / values["kvfold:lookup_groups_visible_total"]
    assert least <= share < most
    assert f"kv look-up: {100 * share:.1f} % of the folded groups read in 7 steps" in server.log


def test_contexts_larger_than_the_cache(core: object, smollm2_path: Path, tmp_path: Path) -> None:
    """A prompt longer than the cache is answered; what is left of it does not stand in for a shorter one."""
    arguments = ["-m", str(smollm2_path), "-c", "1536", "-np", "1", "--metrics", "--slots", "-b", "128", "-ub", "128"]
    arguments += ["--kv-type", "fp4_csa2_ced", "--kv-keep", "0.4", "--cache-ram", "0"]
    server = Server(tmp_path, *arguments)
    words = [f"{word} {number}" for number in range(160) for word in ("apples", "pears")]
    try:
        server.wait_ready()
        long = server.complete(" ".join(words[:300]), 4)
        slot = server.request("GET", "/slots")[1][0]
        assert slot["n_evicted"] > 100 and slot["n_kept"] + slot["n_evicted"] == slot["n_prompt_tokens"]
        more = server.complete(" ".join(words[:310]), 4)
        short = server.complete(" ".join(words[:120]) + " and plums", 4)
        assert server.request("GET", "/slots")[1][0]["n_evicted"] == 0
        text = server.request("GET", "/metrics")[1].decode()
    finally:
        assert server.stop() >= 0
    assert long["tokens_evaluated"] > 1000
    assert more["timings"]["cache_n"] > 1000, "the text goes on where it was"
    assert short["timings"]["cache_n"] == 0
    evicted = re.search(r"^kvfold:evicted_tokens_total (\d+)$", text, re.MULTILINE)
    assert evicted and int(evicted[1]) > 100


def fails(*arguments: str) -> str:
    """Output of a start that must fail with exit code 1 (a signal would be negative)."""
    result = subprocess.run([str(program()), *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, (result.returncode, result.stdout, result.stderr)
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-type", "fp5"], ["fp5", "fp4_csa2"]),
        (["--kv-type", "fp4_csa2", "--kv-tail", "0"], ["tail", "0"]),
        (["--kv-type", "fp4_csa2", "--kv-tail", "-3"], ["tail", "-3"]),
        (["--kv-type", "fp4_csa2", "--kv-group", "3"], ["group", "3"]),
        (["--kv-type", "fp4_csa2", "--kv-lookup", "0.3,0.2"], ["kv_lookup", "0.3,0.2"]),
        (["--kv-type", "fp4_csa2", "--kv-layers", "reuse"], ["kv_layers", "reuse"]),
        (["--kv-type", "fp4", "--kv-threshold", "0.2"], ["kv_threshold", "fp4_csa2"]),
        (["--kv-type", "fp4_csa2", "--kv-sinks", "-1"], ["sinks", "-1"]),
        (["--kv-type", "fp4_csa2", "--kv-calibration", "missing.gguf"], ["kv_calibration", "missing.gguf"]),
        (["--kv-type", "fp4_csa2_ced", "--kv-keep", "1.2"], ["kv_keep", "1.2"]),
        (["--kv-type", "fp4_csa2_ced", "--kv-score", "reconstruct"], ["kv_score", "reconstruct", "keydiff"]),
        (["--kv-type", "fp4_csa2", "--kv-keep", "0.5"], ["kv_keep", "fp4_csa2_ced"]),
        (["--kv-type", "fp4", "--kv-swa-type", "q4_0"], ["swa", "q4_0"]),
        (["--kv-type", "fp4", "--kv-scale-group", "24"], ["kv_scale_group", "24", "16, 32 or 64"]),
        (["--kv-type", "fp4", "-fa", "off"], ["flash"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_bad_settings_end_with_exit_code_1(
    core: object, smollm2_path: Path, flags: list[str], words: list[str]
) -> None:
    output = fails("-m", str(smollm2_path), "-c", "512", *flags)
    for word in words:
        assert word in output


@pytest.mark.parametrize("name", sorted(tiny_models.REFUSED))
def test_unfit_models_end_with_exit_code_1(core: object, tiny_path: Callable[[str], Path], name: str) -> None:
    output = fails("-m", str(tiny_path(name)), "-c", "512", "--kv-type", "fp4_csa2")
    assert tiny_models.REFUSED[name][1] in output


def test_damaged_models_end_with_exit_code_1(core: object, tiny_folder: Path) -> None:
    for path in tiny_models.write_damaged(tiny_folder).values():
        fails("-m", str(path), "-c", "512", "--kv-type", "fp4_csa2")
