"""A running ``llama-server`` with a folded cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import KEY, Server


@pytest.fixture(scope="session")
def server_arguments(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two slots of 4096 tokens in one cache of 8192 (small batches, so that a prefill can be left early)."""
    slots = tmp_path_factory.mktemp("slots")
    arguments = ["-m", str(smollm2_path), "--kv-type", "fp4_csa2", "-c", "8192", "-np", "2", "--kv-unified"]
    arguments += ["-b", "256", "-ub", "128", "--slots", "--slot-save-path", str(slots) + os.sep]
    return [*arguments, "--cache-ram", "0", "--alias", "smollm2"]


@pytest.fixture(scope="session")
def server(core: object, server_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"), *server_arguments, "--api-key", KEY)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture
def client(server: Server) -> Any:
    """The official client."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=300, max_retries=0)


@pytest.fixture
def long_prompt() -> str:
    """About 3000 tokens of prose."""
    from kvfold.cli import demo_document

    return demo_document()
