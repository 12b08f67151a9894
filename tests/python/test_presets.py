"""Presets, the check of free memory before loading, and the default number of threads."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sparse_models

from kvfold import cli, threads
from kvfold.presets import PRESETS, fill, find

GIB = 2**30


def test_the_promised_presets() -> None:
    assert set(PRESETS) == {"8gb-32k", "8gb-64k", "12gb-64k", "cpu-32k"}
    for name, preset in PRESETS.items():
        memory, context = name.split("-")
        assert preset.arguments["n_ctx"] == 1024 * int(context.removesuffix("k"))
        assert preset.vram == (None if memory == "cpu" else int(memory.removesuffix("gb")) * GIB)
        assert preset.arguments["n_gpu_layers"] == (0 if memory == "cpu" else -1)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"preset='8gb-65k' is unknown; did you mean '8gb-64k'; possible: 8gb-32k, "):
        find("8gb-65k")


def test_what_is_given_wins() -> None:
    defaults = {"n_ctx": 1, "n_batch": 2, "other": 3}
    assert fill(None, {}, defaults) == defaults
    assert fill("8gb-64k", {"n_ctx": 4096}, defaults) == {"n_ctx": 4096, "n_batch": 512, "other": 3}
    assert fill("8gb-64k", {"n_ctx": 0}, defaults)["n_ctx"] == 0  # not the same as not given


@pytest.mark.parametrize(
    ("model", "name"), [("llama-8b", "8gb-64k"), ("llama-8b", "8gb-32k"), ("qwen3-4b", "12gb-64k")]
)
def test_presets_fit_what_they_say(core: object, tmp_path: Path, model: str, name: str, capsys: Any) -> None:
    path = sparse_models.write(tmp_path / f"{model}.gguf", model)
    assert cli.main(["plan", str(path), "--preset", name, "--ram", "64GiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["budget"]["gpu"] == PRESETS[name].vram
    assert report["fits"] and report["headroom"] > 0.05
    assert report["settings"]["n_ctx"] == PRESETS[name].arguments["n_ctx"]


def test_a_preset_that_does_not_fit_says_what_would(core: object, tmp_path: Path, capsys: Any) -> None:
    path = sparse_models.write(tmp_path / "8b.gguf", "llama-8b")
    arguments = ["plan", str(path), "--preset", "8gb-64k", "--kv-type", "f16", "--ram", "64GiB", "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    assert any("What fits: n_ctx=65536 (64k), kv_type='fp4_csa2'" in note for note in report["notes"])


def test_llama_takes_a_preset(talking_tiny: Path, make_llm: Callable[..., Any]) -> None:
    llm = make_llm(talking_tiny, preset="cpu-32k", n_ctx=2048)
    assert llm.n_ctx() == 2048
    assert llm.kv.kv_type == "fp4_csa2"
    assert llm.n_batch == 512
    llm = make_llm(talking_tiny, preset="cpu-32k", n_ctx=1024, kv_type="fp4", kv_tail=64, n_batch=96)
    assert llm.kv.to_dict()["kv_type"] == "fp4"
    assert llm.kv.to_dict()["tail"] == 64
    assert llm.n_batch == 96
    with pytest.raises(ValueError, match="preset='cpu' is unknown"):
        make_llm(talking_tiny, preset="cpu")


def test_gpu_presets_without_a_gpu_run_on_the_cpu_and_say_so(
    talking_tiny: Path, make_llm: Callable[..., Any], core: Any
) -> None:
    if core.build_info()["backends"] != ["cpu"] and "cuda" in str(core.build_info()):
        pytest.skip("this build has a GPU")
    with pytest.warns(RuntimeWarning, match="no GPU support"):
        llm = make_llm(talking_tiny, preset="8gb-32k", n_ctx=None)
    assert llm.n_ctx() == 32768
    assert llm.n_threads == threads.default_threads()


# -- free memory -------------------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``free(bytes)``: what the machine says it has."""
    import kvfold.guard
    import kvfold.plan

    def pretend(size: int) -> None:
        for module in (kvfold.guard, kvfold.plan):
            monkeypatch.setattr(module, "free_memory", lambda: size)

    return pretend


def test_too_little_memory_is_refused_with_what_fits(
    smollm2_path: Path, make_llm: Callable[..., Any], free: Callable[[int], None]
) -> None:
    # 8192 tokens take 60 MiB in fp4_csa2 and 180 in f16.
    free(400 * 2**20)
    make_llm(smollm2_path, n_ctx=8192, kv_type="fp4_csa2")
    free(50 * 2**20)
    with pytest.raises(ValueError, match=r"n_ctx=8192, kv_type='fp4_csa2'.* takes 60\.\d MiB, .* 50\.0 MiB free"):
        make_llm(smollm2_path, n_ctx=8192, kv_type="fp4_csa2")
    with pytest.warns(RuntimeWarning, match=r"free"):
        make_llm(smollm2_path, n_ctx=4096, kv_type="fp4_csa2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_llm(smollm2_path, n_ctx=8192, kv_type="fp4_csa2", memory_guard=False)


def test_what_fits_is_said(smollm2_path: Path, make_llm: Callable[..., Any], free: Callable[[int], None]) -> None:
    free(270 * 2**20)
    with pytest.raises(ValueError, match=r"What fits: n_ctx=65536 .*kv_type='fp4_csa2'|What fits: n_ctx=\d+"):
        make_llm(smollm2_path, n_ctx=16384, kv_type="f16")


class _Gpu:
    """A device of the dry run's own machine, so that a CPU build exercises the comparison by device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, available: int) -> None:
        import kvfold.guard
        import kvfold.sizing
        from kvfold.devices import Device
        from kvfold.dry_run import Buffer, Measured
        from kvfold.sizing import Planner

        device = Device("CUDA0", "a card", available, 8 * GIB, "driver")
        for module in (kvfold.guard, kvfold.sizing):
            monkeypatch.setattr(module, "gpus", lambda: [device])
        measured = Planner.measured

        def moved(planner: Planner, settings: Any) -> Measured:
            run = measured(planner, settings)
            on_card = tuple(
                Buffer("CUDA0", "CUDA0", False, b.model, b.context, b.compute) if settings.n_gpu_layers else b
                for b in run.buffers
            )
            return Measured(on_card, run.cache)

        monkeypatch.setattr(Planner, "measured", moved)


@pytest.mark.filterwarnings("ignore:n_gpu_layers")
def test_a_card_with_too_little_free_is_refused(
    smollm2_path: Path, make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """92 MiB of weights, 60 of cache and 99 of compute buffers."""
    settings = {"n_ctx": 8192, "kv_type": "fp4_csa2", "n_gpu_layers": -1}
    _Gpu(monkeypatch, 300 * 2**20)
    make_llm(smollm2_path, **settings)
    _Gpu(monkeypatch, 256 * 2**20)
    with pytest.warns(RuntimeWarning, match="CUDA0's free memory"):
        make_llm(smollm2_path, **settings)
    _Gpu(monkeypatch, 240 * 2**20)
    with pytest.raises(ValueError, match=r"takes 25\d\.\d MiB on CUDA0, 240\.0 MiB are free there\. What fits: n_ctx="):
        make_llm(smollm2_path, **settings)
    make_llm(smollm2_path, **settings, memory_guard=False)


def test_the_command_has_the_override(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, free: Callable[[int], None], capsys: Any
) -> None:
    from kvfold import _launch

    started: list[list[str]] = []
    monkeypatch.setattr(_launch, "server", lambda: started.append(list(sys.argv)))
    free(20 * 2**20)
    assert cli.main(["serve", str(smollm2_path), "--preset", "cpu-32k"]) == 1
    assert "n_ctx=32768" in capsys.readouterr().err
    assert cli.main(["serve", str(smollm2_path), "--preset", "cpu-32k", "--no-memory-guard"]) == 0
    (command,) = started
    pairs = dict(zip(command[1::2], command[2::2], strict=False))
    assert pairs["-c"] == "32768"
    assert pairs["--kv-type"] == "fp4_csa2"
    assert pairs["-b"] == "512"


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "gpu_layers", "gpu", "expected"),
    [
        (16, 0, True, 16),
        (16, 20, True, 16),
        (16, -1, True, 4),
        (16, 33, True, 4),
        (16, 32, True, 16),  # the output stays on the CPU
        (16, -1, False, 16),
        (2, -1, True, 2),
    ],
)
def test_few_threads_when_the_gpu_does_it_all(
    monkeypatch: pytest.MonkeyPatch, cores: int, gpu_layers: int, gpu: bool, expected: int
) -> None:
    monkeypatch.setattr(threads, "default_threads", lambda: cores)
    assert threads.recommended_threads(gpu_layers, 32, gpu) == expected
