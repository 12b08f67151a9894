"""``Llama``: everything upstream takes, plus a cache that says what it is, and no sharp edges around it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from llm_probe import count_evaluated, divergence, last_logits

from kvfold import KvConfig
from kvfold.gguf_header import read_gguf_header

FOLDING = [{"kv_type": "fp4", "kv_group": 8}, {"kv_type": "fp4_csa2"}]

#: Some tokens of the text vocabulary, no special ones.
TOKENS = np.random.default_rng(7).integers(300, 40000, size=1000).tolist()


# -- what is allocated -------------------------------------------------------------------------------------------------


def test_statistics_are_live(make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]) -> None:
    llm = make_llm(talking_tiny, **kv_settings)
    assert llm.kv.kv_type == kv_settings["kv_type"]
    assert llm.kv.tokens == 0
    llm.eval(TOKENS[:700])
    kv = llm.kv
    assert kv.tokens == 700
    assert kv.evicted_tokens == 0
    assert kv.lookup_share == 1.0
    assert kv.dense_fallbacks == 0
    assert kv.backend == "CPU"
    assert kv.ratio == pytest.approx(kv.bytes / kv.f16_bytes)
    told = kv.to_dict()
    assert told["ratio"] == kv.ratio
    assert kv_settings["kv_type"] in str(kv)
    assert "\n" not in str(kv)
    assert str(kv) in repr(kv)
    if kv_settings["kv_type"] == "f16":
        assert kv.ratio == 1.0
        assert kv.folded_tokens == 0
        # 2 layers, keys and values, 2 heads of 64 channels, 2 bytes each.
        assert kv.bytes == 2 * 2 * 2 * 64 * 2 * llm.n_ctx()
    else:
        # All but the tail, the sinks and at most one partial group at either end.
        assert 700 - 128 - 4 - 2 * 8 <= kv.folded_tokens <= 700 - 128
        assert 0 < kv.near_bytes < kv.bytes < kv.f16_bytes


def test_upstream_sizes_are_those_announced(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_type="q8_0")
    assert llm.kv.kv_type == "q8_0"
    # Announced to 0.01 MiB, of about 0.5.
    assert llm.kv.ratio == pytest.approx(8.5 / 16, rel=1e-3)


def test_settings_reach_the_runtime(make_llm: Callable[..., Any], talking_tiny: Path, tmp_path: Path) -> None:
    settings = {"group": 8, "tail": 64, "sinks": 2, "swa_type": "q8_0", "scale_group": 32}
    expected = {"kv_type": "fp4_csa2", **settings}
    config = KvConfig("fp4_csa2", group=8, tail=64, sinks=2, swa_type="q8_0", scale_group=32)
    path = tmp_path / "kv.toml"
    path.write_text('type = "fp4_csa2"\ngroup = 8\ntail = 64\nsinks = 4\nswa_type = "q8_0"\nscale_group = 32\n')
    for llm in (
        make_llm(talking_tiny, **config.to_dict()),
        make_llm(talking_tiny, kv=config),
        make_llm(talking_tiny, kv=config.to_dict()),
        make_llm(talking_tiny, kv=path, kv_sinks=2),
    ):
        told = llm.kv.to_dict()
        assert {name: told[name] for name in expected} == expected
        assert llm.kv_config == config


def test_a_scope_does_not_leak_into_the_next_object(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    make_llm(talking_tiny, kv_type="fp4_csa2")
    with pytest.raises(ValueError):
        make_llm(talking_tiny, kv_type="fp4_csa2", kv_group=5)
    assert make_llm(talking_tiny).kv.kv_type == "f16"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_type": "fp5"}, ["kv_type", "fp5", "did you mean 'fp4'"]),
        ({"kv_typ": "fp4"}, ["kv_typ", "did you mean 'kv_type'"]),
        ({"kv_type": "fp4", "type_k": 8}, ["kv_type", "type_k=8"]),
        ({"kv_type": "fp4", "type_v": 8}, ["kv_type", "type_v=8"]),
        ({"kv_type": "q8_0", "type_k": 8}, ["kv_type", "type_k=8"]),
        ({"kv_type": "fp4", "flash_attn": False}, ["fp4", "flash_attn=False"]),
        ({"kv_type": "q4_0", "flash_attn": False}, ["q4_0", "flash_attn=False"]),
        ({"kv_type": "fp4", "kv_tail": 0}, ["kv_tail=0"]),
        ({"kv_type": "fp4", "kv_tail": -5}, ["kv_tail=-5"]),
        ({"kv_type": "fp4_csa2", "kv_group": 6}, ["kv_group=6", "2, 4, 8, 16"]),
        ({"kv_type": "fp4_csa2", "kv_keep": 0.8}, ["kv_keep", "fp4_csa2_ced"]),
        ({"kv_type": "fp4_csa2_ced", "kv_keep": 0.0}, ["kv_keep=0.0"]),
        ({"kv_tail": 64}, ["kv_tail", "kv_type"]),
        ({"kv": 7}, ["kv=7"]),
        ({"kv": "missing.toml"}, ["missing.toml"]),
        ({"n_ctx": -1}, ["n_ctx=-1"]),
        ({"n_ctx": 1.5}, ["n_ctx=1.5"]),
        ({"n_ctx": "4096"}, ["n_ctx='4096'"]),
        ({"n_batch": 0}, ["n_batch=0"]),
        ({"n_threads": -2}, ["n_threads=-2"]),
        ({"kv_type": "fp4", "embedding": True}, ["fp4", "embedding"]),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_impossible_arguments_are_named(
    make_llm: Callable[..., Any], talking_tiny: Path, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        make_llm(talking_tiny, **settings)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_upstream_arguments_that_start_with_kv_still_work(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_overrides={"general.name": "renamed"})
    assert llm.kv_overrides == {"general.name": "renamed"}


@pytest.mark.parametrize("name", sorted(tiny_models.REFUSED))
def test_unfit_models_are_refused_before_they_are_loaded(
    core: object, tiny_path: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    from kvfold import Llama

    def no_loading(*_: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_load_from_file", no_loading)
    with pytest.raises(ValueError, match=tiny_models.REFUSED[name][1]):
        Llama(tiny_path(name), kv_type="fp4_csa2", verbose=False)


def test_failing_loads_are_one_error(tiny_folder: Path, talking_tiny: Path, core: object) -> None:
    """Case 28: nothing but the traceback's last line; no "Exception ignored", exit code 1, no crash."""
    damaged = tiny_models.write_damaged(tiny_folder)
    whole = talking_tiny.read_bytes()
    late = tiny_folder / "cut-late.gguf"
    late.write_bytes(whole[:-100])
    damaged["late"] = late
    for name, path in damaged.items():
        code = f"from kvfold import Llama; Llama({str(path)!r}, kv_type='fp4', verbose=False)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert result.returncode == 1, name
        assert "Exception ignored" not in result.stderr
        errors = [line for line in result.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
        assert len(errors) == 1, result.stderr
        assert errors[0].startswith("ValueError: model "), errors
        assert path.name in errors[0]


@pytest.mark.parametrize("settings", [{}, *FOLDING], ids=["f16", "fp4", "fp4_csa2"])
def test_contexts_no_memory_holds_are_refused(
    make_llm: Callable[..., Any], talking_tiny: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocating them would not fail: the kernel would kill this process, or another one."""
    import kvfold.memory

    monkeypatch.setattr(kvfold.memory, "usable_memory", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"n_ctx=16777216: .* GiB, this machine has 1\.0"):
        make_llm(talking_tiny, n_ctx=1 << 24, **settings)
    least = kvfold.memory.least_cache_bytes
    llm = make_llm(talking_tiny, n_ctx=2048, **settings)
    assert least(read_gguf_header(talking_tiny), 2048, llm.kv.kv_type) <= llm.kv.bytes


def test_gpu_layers_on_a_cpu_build_warn(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    """Case 29."""
    import llama_cpp

    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build has GPU support")
    with pytest.warns(RuntimeWarning, match="n_gpu_layers=-1.*CPU"):
        make_llm(talking_tiny, n_gpu_layers=-1, kv_type="fp4")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        make_llm(talking_tiny)


def test_logits_of_a_long_context_are_announced(
    make_llm: Callable[..., Any], talking_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 33, with the limit lowered instead of the context grown."""
    import kvfold.llama

    make_llm(talking_tiny, n_ctx=256, logits_all=True)
    monkeypatch.setattr(kvfold.llama, "_LOGITS_WARNING_BYTES", 256 * 49152 * 4 - 1)
    with pytest.warns(RuntimeWarning, match=r"256 x 49152 logits: 0\.0 GiB"):
        make_llm(talking_tiny, n_ctx=256, logits_all=True)


# -- results -----------------------------------------------------------------------------------------------------------


def test_zero_context(make_llm: Callable[..., Any], tiny_folder: Path, smollm2_path: Path) -> None:
    path = tiny_models.write(tiny_folder / "short.gguf", tiny_models.Shape(seed=41))
    with pytest.raises(ValueError, match=r"n_ctx=0 with kv_type='fp4_csa2'.*32768"):
        make_llm(path, n_ctx=0, kv_type="fp4_csa2")
    assert make_llm(path, n_ctx=0).n_ctx() == 32768  # upstream's meaning: what the model was trained with
    llm = make_llm(path, n_ctx=32768, kv_type="fp4_csa2")
    assert llm.kv.bytes < 0.34 * llm.kv.f16_bytes


def test_odd_contexts_can_be_filled(
    make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]
) -> None:
    llm = make_llm(talking_tiny, n_ctx=300, **kv_settings)
    size = llm.n_ctx()
    assert size >= 300
    llm.eval(TOKENS[: size - 1])
    llm.eval(TOKENS[size - 1 : size])
    assert llm.n_tokens == size
    with pytest.raises(ValueError, match=f"{size + 1}.*{size}"):
        llm.eval([5])
    llm.reset()
    llm.eval(TOKENS[:10])
    assert np.isfinite(last_logits(llm)).all()


def test_prompts_that_do_not_fit_are_refused(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, n_ctx=256, kv_type="fp4_csa2")
    with pytest.raises(ValueError, match="256"):
        llm.create_completion(TOKENS[:300], max_tokens=1)
    assert llm.create_completion(TOKENS[:200], max_tokens=1)["usage"]["completion_tokens"] == 1


def greedy(llm: Any, prompt: list[int], count: int = 24) -> list[int]:
    produced: list[int] = []
    for token in llm.generate(prompt, temp=0.0):
        produced.append(token)
        if len(produced) == count:
            break
    return produced


def test_the_same_call_again_gives_the_same(
    make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]
) -> None:
    """Case 32. Prompts and answers within the near tier are exact, so every way to come back is.

    A long prompt that is evaluated afresh is exact too, whatever was in the cache before.
    """
    llm = make_llm(talking_tiny, **kv_settings)
    a, b = TOKENS[:60], TOKENS[200:270]
    first_a, first_b = greedy(llm, a), greedy(llm, b)
    assert greedy(llm, a) == first_a
    assert greedy(llm, a) == first_a, "exact prompt in the cache"
    llm.reset()
    assert greedy(llm, b) == first_b
    long = TOKENS[:600]
    llm.reset()
    first = greedy(llm, long)
    greedy(llm, b)
    llm.reset()
    assert greedy(llm, long) == first


def test_coming_back_to_a_long_prompt_stays_close(
    make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]
) -> None:
    """A prompt whose rows have been folded in between: the logits are those of a fresh run within the type's tolerance.

    The tolerance is what folding itself does to these logits (f16 against the type, measured here), doubled: a wrong or
    missing row is far outside of it.
    """
    reference = make_llm(talking_tiny)
    reference.eval(TOKENS[:600])
    exact = last_logits(reference)
    llm = make_llm(talking_tiny, **kv_settings)
    llm.eval(TOKENS[:600])
    fresh = last_logits(llm)
    llm.eval(TOKENS[600:900])
    llm.n_tokens = 400
    llm.eval(TOKENS[400:600])
    again = last_logits(llm)
    scale = float(np.abs(exact - exact.mean()).max())
    tolerance = max(2 * divergence(exact, fresh), 1e-4)
    assert divergence(fresh, again) <= tolerance, f"logits of up to {scale:.1f}"
    llm.n_tokens = 100
    llm.eval(TOKENS[900:1000])
    wrong = last_logits(llm)
    assert divergence(fresh, wrong) > 10 * tolerance, "this test could not fail"


def test_prefix_reuse_evaluates_only_what_is_new(
    make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]
) -> None:
    llm = make_llm(talking_tiny, **kv_settings)
    evaluated = count_evaluated(llm)
    greedy(llm, TOKENS[:400], 4)
    assert sum(evaluated) == 400 + 3
    evaluated.clear()
    greedy(llm, TOKENS[:350] + TOKENS[500:520], 1)
    assert sum(evaluated) == 20


@pytest.mark.parametrize("settings", [{"swa_full": False}, *FOLDING], ids=["f16", "fp4", "fp4_csa2"])
def test_sliding_windows_that_moved_on_are_evaluated_again(
    make_llm: Callable[..., Any], tiny_path: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """Case 18: going back a little is cheap, going back behind the window is right."""
    tokens = [t % tiny_models.N_VOCAB for t in TOKENS]
    path = tiny_path("gemma3-256-iswa")
    llm = make_llm(path, n_batch=64, n_ubatch=64, **settings)
    window = llm._window
    assert 0 < window < 200, "this test needs a window that moves on"
    evaluated = count_evaluated(llm)
    llm.eval(tokens[:900])
    llm.n_tokens = 895
    evaluated.clear()
    llm.eval(tokens[895:900])
    assert sum(evaluated) == 5
    near = last_logits(llm)
    llm.eval(tokens[900:950])
    llm.n_tokens = 300
    evaluated.clear()
    llm.eval(tokens[300:320])
    back = last_logits(llm)
    assert sum(evaluated) == 320
    assert llm.n_tokens == 320
    fresh = make_llm(path, n_batch=64, n_ubatch=64, **settings)
    fresh.eval(tokens[:320])
    assert np.array_equal(back, last_logits(fresh)), "a full evaluation is the same as the first one"
    fresh.reset()
    fresh.eval(tokens[:900])
    # Five tokens at once or at the end of a batch: the order of additions differs, and for folding types the tail.
    assert divergence(last_logits(fresh), near) < 0.02


def test_default_windows(make_llm: Callable[..., Any], tiny_path: Callable[[str], Path]) -> None:
    path = tiny_path("gemma3-256-iswa")
    assert make_llm(path).context_params.swa_full, "upstream's default stays"
    assert not make_llm(path, kv_type="fp4_csa2").context_params.swa_full
    full = make_llm(path, kv_type="fp4_csa2", swa_full=True)
    assert full.context_params.swa_full
    assert full._window == 0


# Models with "nan" in their name poison the cache on purpose; the tests of the cache use them.
@pytest.mark.parametrize("name", sorted(name for name in tiny_models.GOOD if "nan" not in name))
def test_every_good_model_runs(make_llm: Callable[..., Any], tiny_path: Callable[[str], Path], name: str) -> None:
    tokens = [t % tiny_models.N_VOCAB for t in TOKENS[:400]]
    llm = make_llm(tiny_path(name), kv_type="fp4_csa2", n_ctx=512)
    llm.eval(tokens)
    assert np.isfinite(last_logits(llm)).all()
    assert llm.kv.folded_tokens > 200


def test_logprobs(make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]) -> None:
    llm = make_llm(talking_tiny, logits_all=True, n_ctx=256, **kv_settings)
    reply = llm.create_completion("The boat", max_tokens=4, temperature=0.0, logprobs=2)
    told = reply["choices"][0]["logprobs"]
    assert len(told["tokens"]) == 4
    assert all(p <= 0.0 for p in told["token_logprobs"])


def test_streams_equal_whole_replies(
    make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]
) -> None:
    llm = make_llm(talking_tiny, **kv_settings)
    whole = llm.create_completion("The boat", max_tokens=12, temperature=0.0)["choices"][0]["text"]
    llm.reset()
    pieces = [
        c["choices"][0]["text"] for c in llm.create_completion("The boat", max_tokens=12, temperature=0, stream=True)
    ]
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def test_seeds(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")

    def sample(seed: int) -> str:
        llm.reset()
        return str(llm.create_completion("The boat", max_tokens=16, temperature=1.0, seed=seed)["choices"][0]["text"])

    assert sample(1) == sample(1) != sample(2)


def test_embeddings_of_more_than_a_micro_batch(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    """Case 26: upstream aborts the process here."""
    llm = make_llm(talking_tiny, embedding=True, n_ctx=512, n_batch=256, n_ubatch=32, pooling_type=1)
    vector = llm.embed("word " * 150)
    assert len(vector) == llm.n_embd()


# -- state -------------------------------------------------------------------------------------------------------------


def test_state_round_trips_are_exact(
    make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]
) -> None:
    """Case 6: 20 times saved and loaded, in this object and in another one."""
    llm = make_llm(talking_tiny, **kv_settings)
    llm.eval(TOKENS[:500])
    state = llm.save_state()
    llm.eval(TOKENS[500:510])
    expected = last_logits(llm)
    other = make_llm(talking_tiny, **kv_settings)
    for target in (llm, other):
        for _ in range(10):
            target.load_state(pickle.loads(pickle.dumps(state)))
            assert target.n_tokens == 500
            target.eval(TOKENS[500:510])
            assert np.array_equal(last_logits(target), expected)
            target.load_state(state)
            state = target.save_state()


def test_generation_continues_from_a_state(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    greedy(llm, TOKENS[:400], 1)
    state = llm.save_state()
    evaluated = count_evaluated(llm)
    expected = greedy(llm, TOKENS[:400] + TOKENS[500:505], 8)
    assert sum(evaluated) == 5 + 7
    llm.reset()
    llm.load_state(state)
    evaluated.clear()
    assert greedy(llm, TOKENS[:400] + TOKENS[500:505], 8) == expected
    assert sum(evaluated) == 5 + 7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_type": "fp4"}, ["fp4_csa2", "kv_type=fp4,"]),
        ({"kv_type": "fp4_csa2", "kv_group": 8}, ["kv_group=4", "kv_group=8"]),
        ({"kv_type": "q8_0"}, ["fp4_csa2", "q8_0"]),
        ({}, ["fp4_csa2", "f16"]),
        ({"kv_type": "fp4_csa2", "n_ctx": 256}, ["300", "256"]),
    ],
    ids=["type", "group", "q8_0", "f16", "short"],
)
def test_foreign_states_are_refused_and_change_nothing(
    make_llm: Callable[..., Any], talking_tiny: Path, settings: dict[str, Any], words: list[str]
) -> None:
    source = make_llm(talking_tiny, kv_type="fp4_csa2")
    source.eval(TOKENS[:300])
    state = source.save_state()
    llm = make_llm(talking_tiny, **settings)
    check_refused(llm, state, words)


def test_states_of_another_model_are_refused(
    make_llm: Callable[..., Any], talking_tiny: Path, smollm2_path: Path
) -> None:
    source = make_llm(smollm2_path, kv_type="fp4_csa2", n_ctx=256)
    source.eval(TOKENS[:8])
    check_refused(make_llm(talking_tiny, kv_type="fp4_csa2"), source.save_state(), ["another model"])


def check_refused(llm: Any, state: Any, words: list[str]) -> None:
    llm.reset()
    llm.eval(TOKENS[:200])
    undisturbed = llm.save_state()
    llm.eval(TOKENS[200:201])
    expected = last_logits(llm)
    llm.load_state(undisturbed)
    with pytest.raises(ValueError) as caught:
        llm.load_state(state)
    for word in words:
        assert word in str(caught.value)
    assert llm.n_tokens == 200
    llm.eval(TOKENS[200:201])
    assert np.array_equal(last_logits(llm), expected)


@pytest.mark.parametrize("settings", FOLDING, ids=["fp4", "fp4_csa2"])
def test_damaged_states_are_refused_and_change_nothing(
    make_llm: Callable[..., Any], talking_tiny: Path, settings: dict[str, Any]
) -> None:
    """Case 16, with the seal of ``LlamaKvState`` and, for states without one, with the runtime's own checks."""
    import llama_cpp

    llm = make_llm(talking_tiny, **settings)
    llm.eval(TOKENS[:300])
    good = llm.save_state()
    data = good.llama_state
    offsets = [*range(0, 40, 8), *np.linspace(40, len(data) - 1, 8).astype(int).tolist()]
    for offset in offsets:
        flipped = data[:offset] + bytes([data[offset] ^ 0x55]) + data[offset + 1 :]
        damaged = pickle.loads(pickle.dumps(good))
        damaged.llama_state = flipped
        check_refused(llm, damaged, ["altered"])
        cut = pickle.loads(pickle.dumps(good))
        cut.llama_state = data[:offset]
        check_refused(llm, cut, ["incomplete"])
        plain = llama_cpp.LlamaState(
            input_ids=good.input_ids,
            scores=good.scores,
            n_tokens=good.n_tokens,
            llama_state=data[: max(offset, 1)],
            llama_state_size=max(offset, 1),
            seed=good.seed,
        )
        check_refused(llm, plain, ["does not fit"])


def test_prompt_caches_of_upstream_work(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    import llama_cpp

    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    llm.set_cache(llama_cpp.LlamaRAMCache(64 << 20))
    first = llm.create_completion(TOKENS[:300], max_tokens=4, temperature=0.0)
    llm.create_completion(TOKENS[400:500], max_tokens=4, temperature=0.0)
    evaluated = count_evaluated(llm)
    again = llm.create_completion(TOKENS[:300], max_tokens=4, temperature=0.0)
    assert again["choices"] == first["choices"]
    assert sum(evaluated) < 20, "the saved state was used"


# -- one object, its end, and its neighbours ---------------------------------------------------------------------------


def test_closing(make_llm: Callable[..., Any], talking_tiny: Path, kv_settings: dict[str, Any]) -> None:
    """Case 27: twice is fine, use afterwards is an exception."""
    llm = make_llm(talking_tiny, **kv_settings)
    kv = llm.kv
    tokenizer = llm.tokenizer()
    llm.create_completion("The boat", max_tokens=2)
    llm.close()
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.create_completion("The boat", max_tokens=2),
        lambda: llm.create_chat_completion(messages=[{"role": "user", "content": "hi"}], max_tokens=2),
        lambda: llm.eval([5]),
        lambda: llm.tokenize(b"hi"),
        lambda: llm.detokenize([500]),
        lambda: llm.save_state(),
        lambda: llm.n_ctx(),
        lambda: llm.n_vocab(),
        lambda: llm.token_eos(),
        lambda: llm.reset(),
        lambda: llm.ctx,
        lambda: next(llm.generate([500])),
        lambda: kv.bytes,
        lambda: llm.kv.tokens,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="closed"):
            use()
    with pytest.raises(Exception):  # noqa: B017  (ctypes has a type of its own for it)
        tokenizer.tokenize(b"hi")


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_comes_back(core: object, talking_tiny: Path, kv_settings: dict[str, Any]) -> None:
    """Case 27: create, use, close; and the same with ``del`` only."""
    from kvfold import Llama

    sizes = []
    for i in range(20):
        llm = Llama(talking_tiny, n_ctx=4096, verbose=False, **kv_settings)
        llm.eval(TOKENS[:300])
        if i % 2:
            llm.close()
        del llm
        gc.collect()
        sizes.append(resident_bytes())
    # The first rounds fill pools of the allocator. One leaked model or context would be 50 or 30 MB a round.
    assert max(sizes[10:]) - min(sizes[8:10]) < 16 << 20, [s >> 20 for s in sizes]


@pytest.mark.parametrize("settings", FOLDING, ids=["fp4", "fp4_csa2"])
def test_nothing_grows_after_load(make_llm: Callable[..., Any], talking_tiny: Path, settings: dict[str, Any]) -> None:
    """Case 10: a full context takes no more than one of a few hundred tokens. (Upstream's f16 without flash attention
    touches more and more of the attention matrix that it reserved.)"""
    llm = make_llm(talking_tiny, n_ctx=8192, **settings)
    tokens = TOKENS * 8
    llm.eval(tokens[:600])
    before = resident_bytes()
    llm.eval(tokens[600:8000])
    assert resident_bytes() - before < 16 << 20


def test_with_statement_closes(talking_tiny: Path, core: object) -> None:
    from kvfold import Llama

    with Llama(talking_tiny, kv_type="fp4", verbose=False) as llm:
        llm.eval(TOKENS[:5])
    with pytest.raises(RuntimeError, match="closed"):
        llm.eval(TOKENS[:5])


def test_no_noise_at_exit(talking_tiny: Path, core: object) -> None:
    """An object that lives until the interpreter ends, quiet as asked."""
    code = f"""
from kvfold import Llama
llm = Llama({str(talking_tiny)!r}, kv_type="fp4_csa2", verbose=False)
llm.create_completion("The boat", max_tokens=2)
stream = llm.create_completion("The boat", max_tokens=5, stream=True)
next(stream)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout == ""


@pytest.fixture
def slow_llm(make_llm: Callable[..., Any], talking_tiny: Path) -> Iterator[Any]:
    """An object whose decoding waits in the middle until ``release`` is set; ``entered`` tells that it got there."""
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    llm.entered, llm.release = threading.Event(), threading.Event()
    decode = llm._ctx.decode

    def waiting(batch: Any) -> None:
        llm.entered.set()
        llm.release.wait(30)
        decode(batch)

    llm._ctx.decode = waiting
    yield llm
    llm.release.set()


def test_two_threads_on_one_object(slow_llm: Any) -> None:
    """Case 31: the second thread gets an exception, the first one its result."""
    results: list[Any] = []
    worker = threading.Thread(target=lambda: results.append(greedy(slow_llm, TOKENS[:30], 3)))
    worker.start()
    assert slow_llm.entered.wait(30)
    for use in (
        lambda: slow_llm.eval([5]),
        lambda: slow_llm.create_completion("The boat", max_tokens=1),
        lambda: next(slow_llm.generate([5])),
        lambda: slow_llm.save_state(),
        lambda: slow_llm.reset(),
        lambda: slow_llm.close(),
    ):
        with pytest.raises(RuntimeError, match="thread"):
            use()
    slow_llm.release.set()
    worker.join(60)
    assert len(results[0]) == 3
    assert len(greedy(slow_llm, TOKENS[:30], 3)) == 3, "afterwards the object is free"


def test_a_stream_of_another_thread_is_not_disturbed(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    expected = greedy(llm, TOKENS[:30], 6)
    stream = llm.generate(TOKENS[:30], temp=0.0)
    got = [next(stream)]
    errors: list[str] = []

    def intrude() -> None:
        try:
            greedy(llm, TOKENS[40:50], 2)
        except RuntimeError as error:
            errors.append(str(error))

    worker = threading.Thread(target=intrude)
    worker.start()
    worker.join(60)
    assert len(errors) == 1
    assert "another thread" in errors[0]
    got += [next(stream) for _ in range(5)]
    assert got == expected
    stream.close()
    worker = threading.Thread(target=intrude)
    worker.start()
    worker.join(60)
    assert len(errors) == 1, "a closed stream blocks nobody"


def test_a_later_call_ends_an_open_stream(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    expected = greedy(llm, TOKENS[40:50], 4)
    stream = llm.generate(TOKENS[:30], temp=0.0)
    next(stream)
    assert greedy(llm, TOKENS[40:50], 4) == expected
    with pytest.raises(RuntimeError, match="later call"):
        next(stream)


def test_streams_may_change_threads(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    """As in web servers that advance a stream from a pool."""
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    expected = greedy(llm, TOKENS[:30], 4)
    stream = llm.generate(TOKENS[:30], temp=0.0)
    got: list[int] = []
    for _ in range(4):
        worker = threading.Thread(target=lambda: got.append(next(stream)))
        worker.start()
        worker.join(60)
    assert got == expected
    stream.close()


def test_other_threads_run_while_decoding(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    """The interpreter lock is released: a counter goes on while the main thread is in native code."""
    llm = make_llm(talking_tiny, kv_type="fp4_csa2", n_ctx=4096, n_batch=2048, n_ubatch=2048, n_threads_batch=1)
    ticks: list[float] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    worker = threading.Thread(target=count)
    worker.start()
    started = time.perf_counter()
    llm.eval((TOKENS * 3)[:2048])
    ended = time.perf_counter()
    stop.set()
    worker.join()
    inside = [t for t in ticks if started < t < ended]
    # Without release there could be ticks at either end only; a quarter of what fits is far from both.
    assert len(inside) > (ended - started) / 0.001 / 40, (len(inside), ended - started)


@pytest.mark.parametrize("kv", [{"kv_type": "f16"}, {"kv_type": "fp4_csa2"}], ids=["f16", "fp4_csa2"])
@pytest.mark.parametrize("batch", [64, 4096], ids=["small-batches", "one-batch"])
def test_ctrl_c_during_a_long_prefill(smollm2_path: Path, core: object, kv: dict[str, Any], batch: int) -> None:
    """Case 34: back soon, and the object goes on working with the same results."""
    code = f"""
import os, signal, threading, time
import numpy as np
from kvfold import Llama
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background may inherit that it is ignored
llm = Llama({str(smollm2_path)!r}, n_ctx=8192, n_batch={batch}, n_ubatch={batch}, verbose=False, **{kv!r})
tokens = np.random.default_rng(3).integers(300, 40000, size=7000).tolist()
def short():
    llm.reset()
    llm.eval(tokens[:100])
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()
expected = short()
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
llm.reset()
started = time.perf_counter()
try:
    llm.eval(tokens)
    print("finished")
except KeyboardInterrupt:
    print("interrupted", time.perf_counter() - started)
assert np.array_equal(short(), expected), "results differ after the interruption"
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:
    print("handler restored")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    assert words[0] == "interrupted", "the prompt was too short for this machine"
    # 0.5 s until the signal, a second to react, and generous room for a busy machine; a full prefill takes far longer.
    assert float(words[1]) < 0.5 + 1.0 + 8.0
    assert words[2:] == ["handler", "restored"]


def test_own_signal_handlers_are_left_alone(make_llm: Callable[..., Any], talking_tiny: Path) -> None:
    llm = make_llm(talking_tiny, kv_type="fp4_csa2")
    seen: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        handler = signal.getsignal(signal.SIGINT)
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        while not seen:
            llm.reset()
            llm.eval(TOKENS[:500])
        assert signal.getsignal(signal.SIGINT) is handler
        assert llm.n_tokens == 500
    finally:
        signal.signal(signal.SIGINT, old)


def test_pickling_keeps_the_cache_settings(talking_tiny: Path, make_llm: Callable[..., Any]) -> None:
    llm = make_llm(talking_tiny, kv_type="fp4_csa2", kv_tail=64)
    state = llm.__getstate__()
    assert state["kv"] == llm.kv_config
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.kv.to_dict()["tail"] == 64
    assert copy.kv.bytes == llm.kv.bytes
    copy.close()


def test_models_without_a_tokenizer_take_ids_and_refuse_text(
    make_llm: Callable[..., Any], tiny_path: Callable[[str], Path]
) -> None:
    llm = make_llm(tiny_path("gemma3-256-iswa"), kv_type="fp4_csa2")
    assert not llm.has_tokenizer
    for ask in (
        lambda: llm.tokenize(b"text"),
        lambda: llm.detokenize([1, 2]),
        lambda: llm.create_completion("text", max_tokens=1),
    ):
        with pytest.raises(ValueError, match=r"has no tokenizer .* takes and gives token ids"):
            ask()
    llm.eval([1, 2, 3])
    assert 0 <= llm.sample(temp=0.0) < llm.n_vocab()
