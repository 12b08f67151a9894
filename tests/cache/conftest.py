"""Fixtures of the cache contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from contract import CONFIGS, DEFAULTS, allowed, text
from harness import Context, Model, kld


@pytest.fixture(scope="session")
def model(tiny_path) -> Iterator[Callable[[str], Model]]:
    """``model(name)``: a tiny model, loaded once a session."""
    opened: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in opened:
            opened[name] = Model(tiny_path(name))
        return opened[name]

    yield get
    for each in opened.values():
        each.close()


@pytest.fixture
def open_context(model) -> Iterator[Callable[..., Context]]:
    """``open_context(config, model_name, **options)``: a context that is closed after the test.

    ``config`` is a name of :data:`CONFIGS` or an upstream cache type; ``settings`` given here override the named ones.
    """
    opened: list[Context] = []

    def make(config: str = "f16", name: str = "llama-64-mha", **options) -> Context:
        kv_type, settings = {**CONFIGS, **DEFAULTS}.get(config, (config, {}))
        merged = {**settings, **options.pop("settings", {})}
        context = Context(model(name), kv_type, settings=merged, **options)
        opened.append(context)
        return context

    yield make
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def fresh(model) -> Callable[..., np.ndarray]:
    """``fresh(config, model_name, seed, n, chunk)``: logits of a text in a new context; computed once a session."""

    @cache
    def run(config: str, name: str = "llama-64-mha", seed: int = 0, n: int = 300, chunk: int = 32) -> np.ndarray:
        kv_type, settings = CONFIGS.get(config, (config, {}))
        with Context(model(name), kv_type, settings=settings) as context:
            return context.feed(text(seed, n), chunk=chunk)

    return run


@pytest.fixture(scope="session")
def budget(fresh) -> Callable[..., float]:
    """``budget(model_name)``: largest acceptable mean KL divergence to f16 over a text of 300 tokens."""

    def largest(name: str = "llama-64-mha", seed: int = 0, n: int = 300, chunk: int = 32) -> float:
        return allowed(kld(fresh("f16", name, seed, n), fresh("q4_0", name, seed, n, chunk)))

    return largest
