"""Shares of single layers, and the side file that sets them: what the runtime reads, uses and refuses."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
from contract import text
from harness import Context, HarnessError, Model

from kvfold.calibration import Calibration, write_calibration

NAME = "llama-64-gqa3"  # two layers that keep the whole context
SHRUNK = {"tail": 10, "sinks": 4, "min_context": 40}
FOUND = Calibration(1, "tiny", "fp4_csa2", 2, (0.05, 0.2), 0.0, 8, "full:0.5,full:0.25", "00", 512, 64, {"x": [1.5]})


@pytest.fixture
def looking(open_context):
    def make(**settings) -> Context:
        return open_context("default-fp4_csa2", NAME, n_threads=2, settings={**SHRUNK, **settings})

    return make


@pytest.fixture
def side_file(core, model, tmp_path: Path):
    """``side_file(**changes)``: path of a calibration of the model."""
    handle: Model = model(NAME).handle
    address = ctypes.cast(handle, ctypes.c_void_p).value
    fingerprint = core.model_fingerprint(address)

    def write(**changes) -> Path:
        path = tmp_path / "side.gguf"
        write_calibration(path, replace(FOUND, **{"fingerprint": fingerprint, **changes}))
        return path

    return write


def read_shares(context: Context) -> list[float]:
    """Share of the groups that each layer's look-ups read over some tokens; 0 for layers that choose nothing."""
    context.feed(text(0, 300), chunk=30)
    context.feed(text(1, 20), chunk=1)
    return [row[6] for row in context.alignment()][:: len(context.alignment()) // 2]


def test_layers_have_shares_of_their_own(looking) -> None:
    """More than kv_lookup too: the lists have room for the largest of all."""
    settings = {"group": 4, "lookup": "0.2", "min_tokens": 0, "threshold": 0, "alignment": "true"}
    for layers, shares in (
        ("full:0.6,full:0.1", [0.6, 0.1]),
        ("full,full:0.4", [0.2, 0.4]),
        ("full:0.3,reuse", [0.3, 0.0]),
        ("full:0.9,reindex:0.5", [0.9, 0.5]),
    ):
        # A list is rounded up to whole groups, of which there are about 70.
        assert read_shares(looking(layers=layers, **settings)) == pytest.approx(shares, abs=0.02), layers


def test_a_small_share_of_a_layer_is_its_least_too(looking) -> None:
    settings = {"group": 4, "lookup": "0.2,0.3", "min_tokens": 0, "threshold": 1, "alignment": "true"}
    assert read_shares(looking(layers="full:0.1,full", **settings)) == pytest.approx([0.1, 0.2], abs=0.02)


def test_values_of_a_calibration_are_defaults(looking, side_file) -> None:
    path = str(side_file())
    stats = looking(calibration=path).stats()
    assert stats["group"] == 2 and stats["min_tokens"] == 8 and stats["threshold"] == 0.0
    assert stats["lookup"] == pytest.approx((0.05, 0.2)) and stats["layers"] == "full:0.5,full:0.25"
    assert read_shares(looking(calibration=path, alignment="true")) == pytest.approx([0.5, 0.25], abs=0.02)
    assert looking(calibration=path, layers="auto").stats()["layers"] == "full:0.5,full:0.25"


def test_explicit_settings_go_before_a_calibration(looking, side_file) -> None:
    path = str(side_file())
    stats = looking(group=4, threshold=0.2, min_tokens=0, layers="dense,full", calibration=path).stats()
    assert stats["group"] == 4 and stats["min_tokens"] == 0 and stats["layers"] == "dense,full"
    assert stats["threshold"] == pytest.approx(0.2)
    # An explicit budget goes before those of the layers.
    for settings in ({"calibration": path, "lookup": "0.3"}, {"lookup": "0.3", "calibration": path}):
        stats = looking(**settings).stats()
        assert stats["layers"] == "full,full" and stats["lookup"] == pytest.approx((0.3, 0.3))


def test_a_calibration_of_another_model_is_refused(looking, side_file) -> None:
    with pytest.raises(HarnessError, match="kv_calibration is that of another model"):
        looking(calibration=str(side_file(fingerprint=12345)))


def test_models_have_fingerprints_of_their_own(core, model, tiny_path) -> None:
    def fingerprint(handle) -> int:
        return core.model_fingerprint(ctypes.cast(handle, ctypes.c_void_p).value)

    again = Model(tiny_path(NAME))
    try:
        assert fingerprint(again.handle) == fingerprint(model(NAME).handle) != 0
        assert fingerprint(again.handle) != fingerprint(model("llama-64-mha").handle)
    finally:
        again.close()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": "full*50"}, "lists 50 layers"),
        ({"layers": "fulll"}, "kv_layers"),
        ({"layers": "full:2"}, "kv_layers"),
        ({"group": 3}, "kv_group"),
        ({"lookup": (0.3, 0.2)}, "kv_lookup"),
        ({"threshold": 7.0}, "kv_threshold"),
        ({"fingerprint": 0}, "which model"),
    ],
)
def test_impossible_values_are_refused(looking, side_file, changes: dict, word: str) -> None:
    with pytest.raises((HarnessError, ValueError), match=word):
        looking(calibration=str(side_file(**changes)))
