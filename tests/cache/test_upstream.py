"""With no kv type set nothing changes: upstream caches give upstream's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract import FOLDED, text
from harness import Context

TYPES = ["f16", "q8_0", "q4_0"]


def run_alone(tmp_path: Path, model: Path, kv_type: str, lib_path: str | None) -> np.ndarray:
    """Logits of a fresh process that never imports kvfold; ``lib_path`` names the libraries it uses."""
    import llama_cpp.llama_cpp as native

    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np\n"
        "from harness import Context, Model\n"
        "from contract import text\n"
        "np.save(sys.argv[4], Context(Model(sys.argv[2]), sys.argv[3]).feed(text(0, 200), chunk=9))\n"
    )
    out = tmp_path / "logits.npy"
    env = {
        **os.environ,
        "KVFOLD_TEST_UPSTREAM": "1",
        "LLAMA_CPP_LIB_PATH": lib_path or str(Path(native._lib._name).parent),
    }
    if lib_path:
        env["LD_LIBRARY_PATH"] = lib_path
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, here, str(model), kv_type, str(out)]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    return np.load(out)


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("name", ["llama-64-mha", "gemma3-256-iswa", "lfm2-64-hybrid"])
def test_beside_a_kvfold_context(open_context, tiny_path, tmp_path: Path, kv_type: str, name: str) -> None:
    """An upstream cache in a process that also uses kvfold caches gives the bits of a process that does not."""
    expected = run_alone(tmp_path, tiny_path(name), kv_type, None)
    neighbours = [open_context(config, name) for config in FOLDED]
    context = open_context(kv_type, name)
    parts = []
    for first in range(0, 200, 9):  # in turns, so that all are alive and at work
        for each in (*neighbours, context):
            logits = each.feed(text(0, 200)[first : first + 9], chunk=9)
        parts.append(logits)
    assert np.array_equal(expected, np.concatenate(parts))


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("name", ["llama-64-gqa3", "gpt-oss-64-sinks", "gemma2-64-softcap", "lfm2-64-hybrid"])
def test_against_unpatched_llama_cpp(open_context, tiny_path, tmp_path: Path, kv_type: str, name: str) -> None:
    """KVFOLD_TEST_PRISTINE names libraries of the same llama.cpp, built the same way without the patches."""
    pristine = os.environ.get("KVFOLD_TEST_PRISTINE")
    if not pristine:
        pytest.skip("KVFOLD_TEST_PRISTINE is not set")
    expected = run_alone(tmp_path, tiny_path(name), kv_type, pristine)
    assert np.array_equal(expected, open_context(kv_type, name).feed(text(0, 200), chunk=9))


def test_nvfp4_without_a_configuration_is_upstreams(model) -> None:
    """The cache type alone does not make a kvfold cache."""
    with Context(model("llama-64-mha"), "f16", type_k=40, type_v=40) as context:
        assert np.isfinite(context.feed(text(0, 100), chunk=9)).all()
        assert context.raw_stats() is None
