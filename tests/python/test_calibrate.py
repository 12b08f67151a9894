"""``kvfold calibrate``: shares go where they pay, side files are whole or refused, what is written is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from cli_probe import check_refusal

from kvfold import KvConfig, cli
from kvfold.calibrate.run import BUDGETS
from kvfold.calibrate.schedule import Curve, allocate
from kvfold.calibration import VERSION, Calibration, read_calibration, write_calibration
from kvfold.verify.report import bundled_text

FOUND = Calibration(
    2**63 + 5, "tiny", "fp4_csa2", 8, (0.05, 0.25), 0.125, 64, "dense,full:0.5,reuse", "ab" * 32, 512, 64, {"x": [1.5]}
)

# -- allocating --------------------------------------------------------------------------------------------------------


def curve(weight: float, rate: float = 4.0, stop: float = 1.0) -> Curve:
    """A layer that loses less by ``rate`` a unit of share, and whose threshold stops it at ``stop``."""
    budgets = np.array(BUDGETS)
    return Curve(BUDGETS, list(np.minimum(budgets, stop)), list(weight * np.exp(-rate * np.minimum(budgets, stop))))


def cost(curves: list[Curve], budgets: list[float]) -> tuple[float, float]:
    """Share read, and sum of losses."""
    read, lost = 0.0, 0.0
    for layer, budget in zip(curves, budgets, strict=True):
        one = (np.ones(1), np.zeros(1)) if budget >= 1 else layer.at(np.array([budget]))
        read, lost = read + float(one[0][0]), lost + float(one[1][0])
    return read / len(curves), lost


def test_equal_layers_get_equal_shares() -> None:
    budgets = allocate([curve(1.0)] * 5, 0.2)
    assert budgets == [budgets[0]] * 5
    assert 0.18 <= budgets[0] <= 0.2


def test_layers_that_lose_more_get_more() -> None:
    weights = [0.01, 0.1, 1.0, 10.0]
    budgets = allocate([curve(w) for w in weights], 0.3)
    assert budgets == sorted(budgets) and budgets[0] < budgets[-1]
    assert allocate([curve(1e-9), curve(1.0, rate=0.1)], 0.6)[1] == 1.0, "a layer that nothing but all of it helps"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_no_exchange_between_two_layers_is_better(seed: int, share: float) -> None:
    rng = np.random.default_rng([seed, int(100 * share)])
    curves = [curve(w, r) for w, r in zip(10 ** rng.uniform(-2, 2, 12), rng.uniform(2, 20, 12), strict=True)]
    budgets = allocate(curves, share)
    read, lost = cost(curves, budgets)
    assert read <= share + 1e-9
    for i in range(12):
        for j in range(12):
            if i != j and budgets[i] <= 0.69 and budgets[j] >= 0.04 and budgets[j] < 1:
                other = list(budgets)
                other[i], other[j] = budgets[i] + 0.01, budgets[j] - 0.01
                # Losses are interpolated between shares that were tried, so they bend a little the wrong way there.
                assert cost(curves, other)[1] >= lost * 0.999


def test_what_a_threshold_stops_is_not_counted_twice() -> None:
    """A layer that never reads more than 5 % leaves the rest to the others."""
    curves = [curve(1.0, stop=0.05)] + [curve(1.0)] * 3
    read, _ = cost(curves, allocate(curves, 0.2))
    assert 0.19 <= read <= 0.2


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def side_file(tmp_path: Path) -> Path:
    path = tmp_path / "side.gguf"
    write_calibration(path, FOUND)
    return path


def test_what_is_written_is_read(side_file: Path) -> None:
    assert read_calibration(side_file) == FOUND
    assert [p.name for p in side_file.parent.iterdir()] == ["side.gguf"], "nothing else is left"


def test_a_file_is_whole_or_refused(core: Any, side_file: Path, tmp_path: Path) -> None:
    """Wherever it is cut, by Python and by the runtime, before there is a model."""
    data = side_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    checks = (read_calibration, lambda p: core.check_config({"kv_type": "fp4_csa2", "calibration": str(p)}))
    for size in [0, 3, *range(4, len(data), 41), len(data) - 1]:
        cut.write_bytes(data[:size])
        for check in checks:
            with pytest.raises(ValueError, match="kv_calibration"):
                check(cut)
    for check in checks:
        check(side_file)


def test_other_files_are_refused(core: Any, side_file: Path, smollm2_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("a calibration")
    newer = tmp_path / "newer.gguf"
    key = b"kvfold.calibration.version"
    data = side_file.read_bytes()
    at = data.index(key) + len(key) + 4
    newer.write_bytes(data[:at] + (VERSION + 1).to_bytes(4, "little") + data[at + 4 :])
    for path, word in (
        (tmp_path / "missing.gguf", "missing.gguf"),
        (tmp_path, "kv_calibration"),
        (text, "text.gguf"),
        (smollm2_path, "is not a calibration"),
        (newer, f"version {VERSION + 1}"),
    ):
        with pytest.raises(ValueError, match=word):
            KvConfig("fp4_csa2", calibration=path)
        with pytest.raises(ValueError, match=word):
            core.check_config({"kv_type": "fp4_csa2", "calibration": str(path)})


# -- settings ----------------------------------------------------------------------------------------------------------


def test_values_are_defaults_below_explicit_settings(side_file: Path) -> None:
    config = KvConfig("fp4_csa2", calibration=side_file)
    assert (config.group, config.lookup, config.threshold, config.min_tokens) == (8, (0.05, 0.25), 0.125, 64)
    assert config.layers == FOUND.layers == KvConfig("fp4_csa2", layers="auto", calibration=side_file).layers
    assert KvConfig("fp4_csa2", layers="full", calibration=side_file).layers == "full"
    assert KvConfig("fp4_csa2", group=2, threshold=0, calibration=side_file).group == 2
    assert KvConfig("fp4_csa2", lookup=0.3, calibration=side_file).layers == "dense,full,reuse", "no shares besides"
    with pytest.raises(ValueError, match=r"kv_calibration.*no effect"):
        KvConfig("fp4", calibration=side_file)


def test_merging_keeps_what_is_explicit(side_file: Path) -> None:
    config = KvConfig("fp4_csa2", calibration=side_file)
    assert KvConfig("fp4_csa2").merged(kv_calibration=str(side_file)) == config
    assert KvConfig("fp4_csa2", min_tokens=32).merged(kv_calibration=str(side_file)).min_tokens == 32
    assert config.merged(kv_lookup=0.3).layers == "dense,full,reuse"
    assert config.merged(kv_tail=64).layers == config.layers
    assert KvConfig.from_mapping({"kv": {"kv_type": "fp4_csa2", "calibration": str(side_file)}}) == config


def test_flags_say_the_same(core: Any, side_file: Path) -> None:
    text = KvConfig("fp4_csa2", calibration=side_file).to_text()
    assert text["kv_calibration"] == str(side_file) and text["kv_layers"] == FOUND.layers
    core.check_config(text)


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talking(tiny_folder: Path, smollm2_path: Path) -> Path:
    """Four random layers with SmolLM2's tokenizer."""
    return tiny_models.write(
        tiny_folder / "calibrated.gguf", tiny_models.Shape(seed=44, n_layer=4), tokenizer=smollm2_path
    )


ARGUMENTS = ["--kv-group", "2", "--kv-tail", "32", "--kv-min-tokens", "0", "-c", "640", "--length", "32"]


@pytest.fixture(scope="module")
def report(core: Any, talking: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of ``kvfold calibrate`` on two texts; ``path``: the file."""
    folder = tmp_path_factory.mktemp("calibrated")
    text = bundled_text()
    for name, piece in (("a.txt", text[:8000]), ("b.txt", text[20000:28000])):
        (folder / name).write_text(piece)
    output = folder / "side.gguf"
    texts = [str(folder / name) for name in ("a.txt", "b.txt")]
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = cli.main(["calibrate", str(talking), *texts, "-o", str(output), *ARGUMENTS, "--share", "0.25", "--json"])
    assert code == 0
    return {**json.loads(stdout.getvalue()), "path": output}


def test_command(report: dict[str, Any]) -> None:
    found = read_calibration(report["path"])
    assert found.group == 2 and found.min_tokens == 0 and found.n_ctx == 640 and found.tokens == 32
    assert report["kv"]["kv_layers"] == found.layers and report["text_hash"] == found.text_hash
    layers = report["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]
    for layer in layers:
        assert 0 < layer["worst"] <= layer["recalled"] <= 1 and layer["alone"] >= 0
        lost = layer["curve"]["lost"]
        assert lost[0] > lost[-1], "reading more loses less"
        # Of some 280 groups one is 0.4 %.
        assert layer["curve"]["read"][0] == pytest.approx(BUDGETS[0], abs=0.01)
        assert np.all(np.diff(layer["curve"]["read"]) >= 0)
    checks = report["check"]
    assert checks["calibrated"]["read"] <= 0.25 + 0.02
    assert checks["same share in all layers"]["read"] == pytest.approx(0.25, abs=0.02)
    assert found.measured["check"] == checks


def test_check_on_another_text(report: dict[str, Any], talking: Path, tmp_path: Path, capsys: Any) -> None:
    """What a file was made from is checked with the same numbers; nothing is written."""
    text = tmp_path / "other.txt"
    text.write_text(bundled_text()[40000:48000])
    arguments = ["calibrate", str(talking), str(text), "--check", str(report["path"]), *ARGUMENTS[2:]]
    assert cli.main([*arguments, "--json"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["calibrated"]["read"] == pytest.approx(report["check"]["calibrated"]["read"], abs=0.03)
    assert check["calibrated"]["kld"] > 0 and check["default"]["read"] > check["calibrated"]["read"]
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


def test_a_calibration_is_used_by_its_model_only(
    report: dict[str, Any], talking: Path, talking_tiny: Path, make_llm: Any
) -> None:
    llm = make_llm(talking, kv_type="fp4_csa2", kv_tail=32, kv_calibration=report["path"])
    stats = llm.kv.to_dict()
    assert stats["layers"] == report["kv"]["kv_layers"] and stats["group"] == 2
    assert llm("One, two,", max_tokens=4)["choices"][0]["text"] is not None
    with pytest.raises(ValueError, match="kv_calibration is that of another model"):
        make_llm(talking_tiny, kv_type="fp4_csa2", kv_calibration=report["path"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--kv-type", "fp4"], "fp4"),
        (["--kv-layers", "full"], "--kv-layers"),
        (["--share", "1.5"], "--share"),
        (["-c", "64"], "at least"),
        (["--check", "x.gguf"], "--check"),
        (["missing.txt"], "missing.txt"),
    ],
)
def test_errors(core: Any, talking: Path, tmp_path: Path, capsys: Any, arguments: list[str], word: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(bundled_text()[:4000])
    check_refusal(capsys, ["calibrate", str(talking), str(text), "-o", str(tmp_path / "x.gguf"), *arguments], word)
    assert not (tmp_path / "x.gguf").exists()
