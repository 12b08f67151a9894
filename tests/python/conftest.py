"""Fixtures of the Python tests: real models, and a tiny one with a real tokenizer where sense does not matter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

#: The types every behaviour is checked on. ``fp4`` with groups of 8 folds more often than with its default of 32.
KV_TYPES: dict[str, dict[str, Any]] = {
    "f16": {"kv_type": "f16"},
    "fp4": {"kv_type": "fp4", "kv_group": 8},
    "fp4_csa2": {"kv_type": "fp4_csa2"},
}


@pytest.fixture(params=list(KV_TYPES))
def kv_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(KV_TYPES[request.param])


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3-270M, from KVFOLD_TEST_GEMMA3 or fetched as ``kvfold pull`` does."""
    given = os.environ.get("KVFOLD_TEST_GEMMA3")
    if given:
        return Path(given)
    from kvfold.models import pull

    return pull("gemma3-270m")


@pytest.fixture(scope="session")
def talking_tiny(tiny_folder: Path, smollm2_path: Path) -> Path:
    """Two random layers with SmolLM2's tokenizer: everything works, nothing makes sense, all is fast."""
    return tiny_models.write(tiny_folder / "talking.gguf", tiny_models.Shape(seed=40), tokenizer=smollm2_path)


@pytest.fixture
def make_llm(core: object) -> Iterator[Callable[..., Any]]:
    """``make_llm(path, **settings)``: a quiet ``Llama`` that is closed after the test."""
    from kvfold import Llama

    made: list[Llama] = []

    def make(path: Path, **settings: Any) -> Llama:
        llm = Llama(path, **{"verbose": False, "n_ctx": 1024, **settings})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()
