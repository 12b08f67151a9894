"""Settings in the layered form of a model's own description: ``kv_cache`` and ``csa2`` tables.

Files that describe a cache trained into a model name its parts ``kv_cache`` (types and window) and ``csa2``
(``encoder``, ``decoder``, ``indexer`` with ``hierarchical``), and list what layers do in groups. What such a file asks
for and this version can do becomes ordinary settings; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Tables that make a mapping a layered one.
TABLES = ("kv_cache", "csa2")
#: Tables and values beside them that say nothing about the cache.
_ELSEWHERE = frozenset({"model", "base_url", "context_window", "name"})

_POOL_TOKENS = 16384
_LOOKUP = ("lookup", "threshold", "min_tokens", "max_tokens", "min_context")
_MODES = {"full": "full", "reuse": "reuse", "reindex": "reindex", "window": "window", "dense": "dense"}
_FIRST_LAYERS = {"swa_only": "window", "window": "window", "dense": "dense"}


def is_layered(mapping: Mapping[str, Any]) -> bool:
    return any(isinstance(mapping.get(table), Mapping) for table in TABLES)


def settings(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The ``kv_*`` settings that the tables stand for.

    Raises:
        ValueError: a name that is unknown or a value that is impossible here, with its whole path and what is possible.
    """
    found: dict[str, Any] = {"kv_type": "fp4_csa2" if "csa2" in mapping else "fp4"}
    for name, table in mapping.items():
        if name in _ELSEWHERE:
            continue
        if name not in TABLES:
            raise _refusal(name, table, f"the tables {', '.join(TABLES)}")
        reader = _kv_cache if name == "kv_cache" else _csa2
        reader(_table(name, table), found)
    return found


def _refusal(path: str, value: Any, possible: str) -> ValueError:
    shown = "a table" if isinstance(value, Mapping) else repr(value)
    return ValueError(f"{path}={shown}: not available in this version; possible: {possible}")


def _table(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}={value!r}: must be a table")
    return value


def _one_of(path: str, value: Any, possible: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in possible:
        raise _refusal(path, value, ", ".join(possible))
    return possible[value]


def _kv_cache(table: Mapping[str, Any], found: dict[str, Any]) -> None:
    for name, value in table.items():
        path = f"kv_cache.{name}"
        if name == "global_kv_dtype":
            _one_of(path, value, {"fp4_e2m1": "fp4"})
        elif name == "global_kv_scale":
            found["kv_scale_group"] = int(_one_of(path, value, {f"e4m3_per_{n}_channel": str(n) for n in (16, 32, 64)}))
        elif name == "swa_kv_dtype":
            found["kv_swa_type"] = _one_of(path, value, {"f16": "f16", "q8_0": "q8_0"})
        elif name == "swa_window_size":
            found["kv_tail"] = value
        elif name in ("sinks", "tail"):
            found[f"kv_{name}"] = value
        else:
            raise _refusal(path, value, "global_kv_dtype, global_kv_scale, swa_kv_dtype, swa_window_size, sinks")


def _csa2(table: Mapping[str, Any], found: dict[str, Any]) -> None:
    layers: list[str] = []
    for part in ("encoder", "decoder"):
        if part in table:
            layers += _stack(f"csa2.{part}", _table(f"csa2.{part}", table[part]), found)
    if layers:
        found["kv_layers"] = ",".join(layers)
    for name, value in table.items():
        path = f"csa2.{name}"
        if name in ("encoder", "decoder"):
            continue
        if name == "indexer":
            _indexer(_table(path, value), found)
        elif name in _LOOKUP:
            found[f"kv_{name}"] = value
        else:
            raise _refusal(path, value, f"encoder, decoder, indexer, {', '.join(_LOOKUP)}")


def _stack(path: str, table: Mapping[str, Any], found: dict[str, Any]) -> list[str]:
    """Modes of the layers of an encoder or decoder; sets the group size."""
    layers: list[str] = []
    for name, value in table.items():
        here = f"{path}.{name}"
        if name == "first_two_layers":
            layers = [f"{_one_of(here, value, _FIRST_LAYERS)}*2", *layers]
        elif name == "compression_ratio":
            if found.setdefault("kv_group", value) != value:
                raise _refusal(here, value, f"one ratio for all layers, as {found['kv_group']} before")
        elif name == "groups":
            layers += _groups(here, value)
        elif name != "layers":
            raise _refusal(here, value, "layers, first_two_layers, compression_ratio, groups")
    listed = sum(int(text.rpartition("*")[2]) if "*" in text else 1 for text in layers)
    if layers and "layers" in table and listed != table["layers"]:
        raise ValueError(f"{path}.layers={table['layers']!r}: its groups list {listed} layers")
    return layers


def _groups(path: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{path}={value!r}: must be a list of groups")
    layers: list[str] = []
    for number, group in enumerate(value):
        here = f"{path}[{number}]"
        modes = _table(here, group).get("modes")
        if not isinstance(modes, list) or not modes:
            raise ValueError(f"{here}.modes={modes!r}: must be a list of modes ({', '.join(_MODES)})")
        if group.get("size", len(modes)) != len(modes):
            raise ValueError(f"{here}.size={group['size']!r}: the group lists {len(modes)} modes")
        for mode in modes:
            name = _one_of(f"{here}.modes", mode, _MODES)
            last, _, count = layers[-1].partition("*") if layers else ("", "", "")
            if last == name:
                layers[-1] = f"{name}*{int(count or 1) + 1}"
            else:
                layers.append(name)
    return layers


def _indexer(table: Mapping[str, Any], found: dict[str, Any]) -> None:
    for name, value in table.items():
        path = f"csa2.indexer.{name}"
        if name == "top_k":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{path}={value!r}: must be a whole number of groups, 1 or more")
            found["kv_min_tokens"] = value * int(found.get("kv_group", 4))
        elif name == "hierarchical":
            _hierarchical(path, _table(path, value), found)
        else:
            raise _refusal(path, value, "top_k, hierarchical (a group is scored by its summary; nothing is trained)")


def _hierarchical(path: str, table: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Whether there is a search in two levels. The pool that reindex layers choose from has one size."""
    fixed = {"candidate_pool_size": _POOL_TOKENS}
    blocks = table.get("max_blocks", 2048), table.get("positions_per_block", 8)
    for name, value in table.items():
        if name in ("max_blocks", "positions_per_block"):
            if blocks[0] * blocks[1] != _POOL_TOKENS:
                raise _refusal(f"{path}.{name}", value, f"blocks of {_POOL_TOKENS} positions together, as 2048 of 8")
        elif name == "enabled":
            if not isinstance(value, bool):
                raise _refusal(f"{path}.{name}", value, "true, false")
            found["kv_hierarchical"] = "auto" if value else "off"
        elif name not in fixed:
            raise _refusal(f"{path}.{name}", value, "enabled, max_blocks, positions_per_block, candidate_pool_size")
        elif value != fixed[name]:
            raise _refusal(f"{path}.{name}", value, str(fixed[name]).lower())
