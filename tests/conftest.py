"""Fixtures for the whole test suite.

Waiting threads must sleep instead of spinning: with two threads on two busy cores, spinning barriers cost a factor of
a hundred. The variables are read when llama.cpp's libraries are loaded, so they are set before anything else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import tiny_models


@pytest.fixture(scope="session")
def core():
    """The compiled module, with kvfold's llama.cpp libraries loaded.

    A missing runtime is an error. Set KVFOLD_TEST_NO_RUNTIME=1 to run only what needs none (the oracle's own tests).
    """
    if os.environ.get("KVFOLD_TEST_NO_RUNTIME"):
        pytest.skip("KVFOLD_TEST_NO_RUNTIME is set")
    from kvfold import _runtime

    return _runtime.load()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that tiny models are written to, once a session."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_path(tiny_folder: Path):
    """``tiny_path(name)``: path of a named tiny model."""
    return lambda name: tiny_models.write_named(tiny_folder, name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, from KVFOLD_TEST_SMOLLM2 or fetched as ``kvfold pull`` does."""
    given = os.environ.get("KVFOLD_TEST_SMOLLM2")
    if given:
        return Path(given)
    models = pytest.importorskip("kvfold.models", reason="kvfold, which fetches the model, is not installed")
    return Path(models.pull("smollm2"))
