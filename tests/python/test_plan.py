"""``kvfold plan``: sizes equal the runtime's allocations, choices fit their budgets, broken files get one error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sparse_models
import tiny_models
from cli_probe import check_refusal

from kvfold import cli
from kvfold.config import KvConfig
from kvfold.gguf_header import GgufHeader, read_gguf_header
from kvfold.kv_layout import CPU_BUFFERS, CUDA_BUFFERS, UnknownLayout, bytes_per_token, cache_layers, cache_size
from kvfold.units import parse_count, parse_size, size_text, table

CONFIGS = {
    "fp4": KvConfig("fp4"),
    "fp4_csa2": KvConfig("fp4_csa2"),
    "fp4_csa2_ced": KvConfig("fp4_csa2_ced", score="keydiff+attn"),
    "spans": KvConfig("fp4_csa2", group=2, hierarchical="on", span_pool=300),
    "half": KvConfig("fp4_csa2_ced", keep=0.5, tail=30, score="recent"),
    "sampled": KvConfig("fp4_csa2_ced", keep=0.5, tail=30, score="snapkv+entropy"),
    "odd": KvConfig("fp4", group=8, tail=7, sinks=0, swa_type="q8_0"),
    "scales of 32": KvConfig("fp4_csa2", scale_group=32),
    "scales of 64": KvConfig("fp4", scale_group=64, swa_type="q8_0"),
    "f16": KvConfig("f16"),
    "q4_0": KvConfig("q4_0"),
}
MODELS = [name for name in sorted(tiny_models.GOOD) if "nan" not in name]
LARGE = 2**40


def test_sizes_as_people_write_them() -> None:
    assert parse_size("8GiB") == parse_size("8g") == 8 * 2**30
    assert parse_size("8GB") == 8 * 10**9
    assert parse_size("1.5 MiB") == 3 * 2**19
    assert parse_count("64k") == parse_count("65536") == 65536
    for bad in ("", "8XB", "-1", "0", "GiB"):
        with pytest.raises(ValueError, match="size"):
            parse_size(bad)
    for bad in ("", "0", "1.3k", "-4", "many"):
        with pytest.raises(ValueError, match="tokens"):
            parse_count(bad)
    assert size_text(3 * 2**30) == "3.00 GiB"
    assert table(["a", "b"], [["xx", "1"]]).splitlines() == ["a   b", "--  -", "xx  1"]


@pytest.mark.parametrize("name", MODELS)
def test_the_header_tells_what_the_runtime_lays_out(core: object, tiny_path: Callable[[str], Path], name: str) -> None:
    """Every byte of every kind of cache, for one and for several sequences, for odd and for large contexts."""
    from kvfold.dry_run import DryRun

    path = tiny_path(name)
    layers = cache_layers(read_gguf_header(path))
    with DryRun(path) as run:
        for label, config in CONFIGS.items():
            for n_ctx, n_seq, n_ubatch in ((300, 1, 512), (8192, 1, 64), (65536, 3, 512)):
                measured = run.context(config, n_ctx, n_seq=n_seq, n_ubatch=n_ubatch, n_batch=2048)
                size = cache_size(layers, config, n_ctx, n_seq=n_seq, n_ubatch=n_ubatch)
                case = (label, n_ctx, n_seq)
                if not config.folds:
                    state = measured.total("context") - size.bytes
                    # Hybrid models keep a recurrent state beside the cache, of a few rows per sequence.
                    assert state == 0 or (name.startswith("lfm2") and 0 < state <= n_seq * 8192), case
                    continue
                stats = measured.cache
                assert size.bytes == stats["bytes"], case
                assert size.f16 == stats["f16_bytes"], case
                assert (size.far, size.window, size.n_cells) == (
                    stats["far_bytes"],
                    stats["swa_bytes"],
                    stats["n_cells"],
                ), case
                assert size.near == stats["near_bytes"], case
                assert sum(size.by_layer.values()) == size.bytes


@pytest.mark.parametrize("model", ["smollm2", "gemma3", "llama-128-gqa4", "gemma3-256-iswa"])
@pytest.mark.parametrize(
    "config",
    [KvConfig("fp4_csa2"), KvConfig("fp4", scale_group=64), KvConfig("q8_0")],
    ids=["fp4_csa2", "scales of 64", "q8_0"],
)
def test_the_plan_is_what_gets_allocated(
    model: str, config: KvConfig, request: pytest.FixtureRequest, tiny_path: Callable[[str], Path], make_llm: Any
) -> None:
    from kvfold.dry_run import measure
    from kvfold.plan import Wishes, make_plan

    real = model in ("smollm2", "gemma3")
    path = request.getfixturevalue(f"{model}_path") if real else tiny_path(model)
    plan = make_plan(path, Wishes(config=config, n_ctx=2048), ram=LARGE, compare=False).to_dict()
    llm = make_llm(path, **plan["arguments"])
    assert llm.kv_config == config
    assert plan["kv"]["bytes"] == llm.kv.bytes
    allocated = measure(request.getfixturevalue("core"), llm._ctx.ctx).total()
    # Weights that are mapped from the file include what lies between the tensors.
    assert abs(plan["total"]["bytes"] / allocated - 1) < 0.03


@pytest.mark.parametrize("name", sorted(sparse_models.SHAPES))
def test_shapes_of_real_models(name: str, tmp_path: Path, core: object, make_llm: Any) -> None:
    """Two layers of each really allocated; all layers planned for a card of 8 GiB, without reading a weight."""
    from kvfold.dry_run import measure
    from kvfold.plan import Wishes, make_plan

    small = sparse_models.write(tmp_path / "small.gguf", name, 2)
    plan = make_plan(small, Wishes(config=KvConfig("f16"), n_ctx=1024), ram=LARGE, compare=False).to_dict()
    llm = make_llm(small, **plan["arguments"])
    allocated = measure(core, llm._ctx.ctx).total()
    llm.close()
    assert abs(plan["total"]["bytes"] / allocated - 1) < 0.03
    whole = sparse_models.write(tmp_path / "whole.gguf", name)
    plan = make_plan(whole, vram=8 * 2**30, ram=LARGE, compare=False).to_dict()
    shape = sparse_models.SHAPES[name]
    assert plan["fits"] and plan["headroom"] >= 0.05
    assert plan["settings"]["n_gpu_layers"] == shape.layers + 1
    assert plan["kv"]["kv_type"] == "fp4_csa2"
    assert plan["settings"]["n_ctx"] >= 32768


@pytest.mark.parametrize("name", ["llama-128-gqa4", "llama-64-gqa3", "gemma3-256-iswa"])
def test_gpu_allocations(name: str, tiny_path: Callable[[str], Path], core: object, make_llm: Any) -> None:
    """The same on a GPU, device by device, and the sizes that are computed for a GPU that is not there."""
    from kvfold.devices import gpus
    from kvfold.dry_run import measure
    from kvfold.sizing import Planner, Settings

    if not gpus():
        pytest.skip("no GPU, or a build without support for it")
    for config in (KvConfig("fp4"), KvConfig("fp4_csa2"), KvConfig("fp4", scale_group=64), KvConfig("q8_0")):
        settings = Settings(config, 4096, -1, windows=True)
        with Planner(tiny_path(name)) as planner:
            need = planner.need(settings)
            computed = planner.computed(settings, CUDA_BUFFERS)
        flags = {"swa_full": False, "flash_attn": True}
        llm = make_llm(tiny_path(name), n_ctx=4096, n_gpu_layers=-1, kv=config, **flags)
        allocated = measure(core, llm._ctx.ctx)
        assert need.kv_bytes == llm.kv.bytes == computed.bytes
        assert need.gpu.kv == allocated.total("context", host=False)
        assert abs(need.gpu.total / allocated.total(host=False) - 1) < 0.03


def test_weights_by_layer(smollm2_path: Path) -> None:
    from kvfold.sizing import read_weights

    header = read_gguf_header(smollm2_path)
    weights = read_weights(header)
    assert len(weights.layers) == 30
    assert weights.tied
    assert weights.total == smollm2_path.stat().st_size - header.data_offset
    # Token embedding of SmolLM2: 49152 rows of 576 values, 34 bytes for 32 of them.
    assert weights.embedding == 49152 * 576 // 32 * 34


def test_bytes_per_token_is_the_slope(tiny_path: Callable[[str], Path]) -> None:
    layers = cache_layers(read_gguf_header(tiny_path("llama-64-gqa3")))
    for config in CONFIGS.values():
        for n_ctx in (16384, 262144):  # without and with spans
            small, large = (cache_size(layers, config, n).bytes for n in (n_ctx, n_ctx + 32768))
            assert (large - small) / 32768 == pytest.approx(bytes_per_token(layers, config, n_ctx), rel=1e-4)


def test_gpu_buffers_are_padded() -> None:
    """CUDA aligns to 128 bytes, and gives quantised tensors whose rows are no multiple of 512 a longer last row."""
    header = _header("llama", block_count=1)
    layers = cache_layers(header)
    f16, fp4 = KvConfig("f16"), KvConfig("fp4")
    assert cache_size(layers, f16, 1024, rules=CUDA_BUFFERS).bytes == cache_size(layers, f16, 1024).bytes
    cuda, cpu = (cache_size(layers, fp4, 1024, rules=rules) for rules in (CUDA_BUFFERS, CPU_BUFFERS))
    assert cuda.far == cpu.far
    # Two tensors, rows of 256 values: 256 more are 144 bytes each, rounded up.
    assert 2 * 144 <= cuda.padding - cpu.padding < 2 * 144 + 3 * 128


def _header(arch: str, **values: Any) -> GgufHeader:
    base: dict[str, Any] = {"general.architecture": arch}
    defaults = {"block_count": 4, "embedding_length": 256, "attention.head_count": 4}
    base.update({f"{arch}.{key}": value for key, value in {**defaults, **values}.items()})
    return GgufHeader(Path(f"{arch}.gguf"), base, [], 0)


def test_headers_that_do_not_tell() -> None:
    for header in (
        _header("somenew", **{"attention.sliding_window": 512}),
        _header("jamba", **{"ssm.state_size": 16, "attention.head_count_kv": 2}),
        _header("deepseek2", **{"attention.kv_lora_rank": 512}),
    ):
        with pytest.raises(UnknownLayout):
            cache_layers(header)
    with pytest.raises(ValueError, match="block_count"):
        cache_layers(_header("llama", block_count=0))
    # Named in the header, not used by the runtime.
    assert all(y.window == 0 for y in cache_layers(_header("phi3", **{"attention.sliding_window": 2047})))
    windows = [y.window for y in cache_layers(_header("gemma3", block_count=12, **{"attention.sliding_window": 512}))]
    assert windows == [512] * 5 + [0] + [512] * 5 + [0]


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_of(core: object, tiny_path: Callable[[str], Path]) -> Callable[..., Any]:
    from kvfold.plan import Wishes, make_plan

    def plan(**arguments: Any) -> Any:
        budget = {key: arguments.pop(key) for key in ("vram", "ram") if key in arguments}
        path = tiny_path("llama-128-gqa4")
        return make_plan(path, Wishes(**arguments), compare=False, **{"ram": LARGE, **budget})

    return plan


def test_room_for_all_takes_everything(plan_of: Callable[..., Any]) -> None:
    plan = plan_of(vram=LARGE)
    assert plan.settings.n_ctx == plan.planner.trained_context == 32768
    assert plan.settings.n_gpu_layers == 3
    assert plan.settings.n_ubatch == 2048  # throughput, once memory allows
    assert plan.fits and plan.worth
    assert plan.settings.config.kv_type == "fp4_csa2"


def test_every_budget_is_kept(plan_of: Callable[..., Any]) -> None:
    """The tighter the budget, the smaller the context, then the batch; the layers leave the GPU last."""
    contexts, layers = [], []
    for size in (80, 50, 35, 25, 18, 14):
        plan = plan_of(vram=size * 10**6)
        assert plan.fits, size
        assert plan.headroom >= 0.05, size
        contexts.append(plan.settings.n_ctx)
        layers.append(plan.settings.n_gpu_layers)
    assert contexts[0] == 32768
    assert contexts[:4] == sorted(contexts[:4], reverse=True)
    assert contexts[3] < contexts[0]
    assert layers[0] == 3


def test_layers_leave_the_gpu_when_the_context_is_fixed(plan_of: Callable[..., Any]) -> None:
    full = plan_of(n_ctx=32768, vram=LARGE, config=KvConfig("fp4"), n_ubatch=128)
    assert full.settings.n_gpu_layers == 3
    part = plan_of(n_ctx=32768, vram=int(full.need.gpu.total * 0.8), config=KvConfig("fp4"), n_ubatch=128)
    assert part.settings.n_gpu_layers < 3
    assert part.fits
    # Nothing is lost on the way: what is not on the GPU is in the machine, but for the copy of a shared embedding.
    assert part.need.kv_bytes == part.need.gpu.kv + part.need.host.kv
    assert part.need.gpu.model + part.need.host.model == full.planner.weights.total


def test_what_does_not_fit_says_so(plan_of: Callable[..., Any]) -> None:
    plan = plan_of(n_ctx=32768, ram=10**6)
    assert not plan.fits
    assert plan.headroom < 0
    assert any("does not fit" in note for note in plan.notes)


def test_small_caches_are_not_worth_folding(plan_of: Callable[..., Any]) -> None:
    plan = plan_of(n_ctx=512)
    assert not plan.worth
    assert plan.settings.config.kv_type == "f16"
    assert plan.arguments()["flash_attn"] is True
    long = plan_of(n_ctx=16384)
    assert long.worth
    assert long.settings.config.kv_type == "fp4_csa2"


def test_wishes_are_kept(plan_of: Callable[..., Any]) -> None:
    config = KvConfig("fp4", group=8)
    plan = plan_of(config=config, n_ctx=5000, n_batch=96, n_ubatch=48, vram=LARGE, n_gpu_layers=1)
    assert plan.settings == replace(plan.settings, config=config, n_ctx=5000, n_batch=96, n_ubatch=48, n_gpu_layers=1)
    assert plan.arguments()["kv_group"] == 8


def test_types_that_do_not_fit_the_model(core: object, tiny_path: Callable[[str], Path]) -> None:
    from kvfold.plan import Wishes, make_plan

    path = tiny_path("llama-80")
    with pytest.raises(ValueError, match="80"):
        make_plan(path, Wishes(config=KvConfig("fp4")))
    plan = make_plan(path, Wishes(n_ctx=4096), ram=LARGE)
    assert plan.settings.config.kv_type == "f16"
    assert "80" in next(row for row in plan.types if row["kv_type"] == "fp4")["unfit"]


# -- broken files ------------------------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _broken(kind: str) -> bytes:
    def head(tensors: int, values: int) -> bytes:
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, values)

    arch = _text("general.architecture") + struct.pack("<I", 8)
    llama = arch + _text("llama")
    return {
        "zero dimension": head(1, 1)
        + llama
        + _text("token_embd.weight")
        + struct.pack("<IqqIQ", 2, 0, 5, 0, 0)
        + bytes(256),
        "empty key": head(0, 1) + struct.pack("<QII", 0, 4, 1),
        "huge string": head(0, 1) + arch + struct.pack("<Q", 1 << 30),
        "huge count": head(0, 1 << 62),
        "odd alignment": head(1, 2)
        + llama
        + _text("general.alignment")
        + struct.pack("<II", 4, 1 << 30)
        + _text("a")
        + struct.pack("<IqIQ", 1, 8, 0, 0),
        "no layers": head(0, 1) + llama + bytes(64),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["zero dimension", "empty key", "huge string", "huge count", "odd alignment", "no layers"]
)
def test_malformed_headers_get_one_error(
    core: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(_broken(kind))
    assert cli.main(["plan", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert "broken.gguf" in captured.err


def test_damaged_files_get_one_error(core: object, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in tiny_models.write_damaged(tiny_folder).values():
        assert cli.main(["plan", str(path), "--ram", "8GiB"]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1, captured.err
        assert path.name in captured.err


# -- the command -------------------------------------------------------------------------------------------------------


def test_command(smollm2_path: Path, core: object, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(smollm2_path), "--ctx", "4k", "--kv-type", "fp4_csa2", "--vram", "8GiB"]
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv"]["kv_type"] == "fp4_csa2"
    assert report["kv"]["f16_bytes"] == 4096 * 30 * 2 * 3 * 64 * 2
    assert 0.3 < report["kv"]["ratio"] < 0.36
    assert report["settings"]["n_gpu_layers"] == 31
    assert report["fits"] is True
    assert report["total"]["bytes"] == report["total"]["gpu"] + report["total"]["host"]
    assert {row["kv_type"] for row in report["types"]} >= {"fp4", "fp4_csa2", "f16"}
    assert report["worth"]["worth_it"] is True
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for word in ("fp4_csa2", "largest context", "recommended", "budget", "no GPU support"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--vram", "lots"], "lots"),
        (["--ctx", "0"], "0"),
        (["--kv-tail", "64"], "--kv-type"),
        (["--kv-type", "fp5"], "fp5"),
    ],
)
def test_wrong_options(smollm2_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    check_refusal(capsys, ["plan", str(smollm2_path), *arguments], word)
