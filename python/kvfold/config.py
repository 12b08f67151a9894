"""Settings of the key/value cache: what is known, what is possible, and one clear error for everything else."""

from __future__ import annotations

import difflib
import importlib
import json
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from . import layer_modes, layered_file
from .calibration import read_calibration

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

#: Group sizes each folding type accepts (tokens per group); the first is the default.
GROUPS: dict[str, tuple[int, ...]] = {
    "fp4": (32, 2, 4, 8, 16),
    "fp4_csa2": (4, 2, 8, 16),
    "fp4_csa2_ced": (4, 2, 8, 16),
}

#: Types that upstream implements, by name, with their ``ggml_type`` number.
UPSTREAM_TYPES: dict[str, int] = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}

#: Upstream types whose value cache only works with flash attention.
QUANTIZED_TYPES = frozenset(UPSTREAM_TYPES) - {"f32", "f16", "bf16"}

#: The storage type (``GGML_TYPE_NVFP4``) of folded rows: what a folding cache asks llama.cpp for.
FOLDED_GGML_TYPE = 40

#: Cache types of sliding-window layers: never below 8 bits.
SWA_TYPES = ("f16", "q8_0")

#: Channels of a folded row that share a scale; the first is the default.
SCALE_GROUPS = (16, 32, 64)

#: Names that belong to the design but that this version cannot honour.
LATER_SETTINGS = (
    "kv_mode",
    "kv_tier",
)

#: ``llama_cpp.Llama`` arguments that start with ``kv_`` and are none of ours.
FOREIGN_SETTINGS = frozenset({"kv_overrides"})

DEFAULT_TAIL = 128
DEFAULT_SINKS = 4
DEFAULT_SWA_TYPE = "f16"

#: Look-up: which part of the folded rows decoding reads, for the types that can.
LOOKUP_TYPES = ("fp4_csa2", "fp4_csa2_ced")
DEFAULT_LOOKUP = (0.2, 0.2)
DEFAULT_THRESHOLD = 0.1
DEFAULT_MIN_TOKENS = 256
#: The default of kv_min_context, which the runtime chooses by where the cache is: on the CPU, with layers on a GPU.
DEFAULT_MIN_CONTEXTS = (4096, 2**31 - 1)
_MAX_BOUND = 65535  # of kv_min_tokens and kv_max_tokens

#: Search in two levels: when, and among how many groups a choice is left then. "auto" is beyond so many tokens.
HIERARCHICAL = ("off", "auto", "on")
AUTO_SPAN_TOKENS = 65536
SPAN_TOKENS = 128
DEFAULT_SPAN_POOL = 16384
_MAX_SPAN_POOL = 262144

#: Eviction: which part of its context a cache has room for, and which tokens go first, for the types that evict.
EVICTING_TYPES = ("fp4_csa2_ced",)
DEFAULT_KEEP = 0.78
SCORES = ("keydiff", "vnorm", "attn", "recent", "snapkv", "entropy")
DEFAULT_SCORE = "keydiff+attn"

# The C side keeps these as 32-bit signed numbers.
_INT_LIMIT = 2**31 - 1


def is_folding(kv_type: str) -> bool:
    """Whether ``kv_type`` is one of kvfold's own types (as opposed to one that upstream implements)."""
    return kv_type in GROUPS


def kv_type_names() -> list[str]:
    """All kv types this version accepts, kvfold's own first."""
    return [*GROUPS, *UPSTREAM_TYPES]


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}" if close else ""


def _choices(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)


def _whole_number(setting: str, value: object, minimum: int, *, what: str) -> int:
    """``value`` as an ``int`` of at least ``minimum``; booleans and fractions are refused."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            if minimum <= number <= _INT_LIMIT:
                return number
    raise ValueError(f"{setting}={value!r}: must be a whole number of {what}, {minimum} or more")


def _share(setting: str, value: object, *, above_zero: bool = False) -> float:
    """``value`` as a number from 0 to 1."""
    if not isinstance(value, bool):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        else:
            if 0 <= number <= 1 and (number > 0 or not above_zero):
                return number
    raise ValueError(f"{setting}={value!r}: must be a number {'above' if above_zero else 'from'} 0 and up to 1")


def _lookup(value: object) -> tuple[float, float]:
    """``kv_lookup`` as smallest and largest share; one number, or a text as of the flag, is taken too."""
    given = value
    if isinstance(value, str):
        value = value.split(",") if "," in value else value
    shares = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value, value]
    if len(shares) != 2:
        raise ValueError(f"kv_lookup={given!r}: must be a share above 0 and up to 1, or two of them (MIN, MAX)")
    least, most = _share("kv_lookup", shares[0]), _share("kv_lookup", shares[1], above_zero=True)
    if least > most:
        raise ValueError(f"kv_lookup={given!r}: the smallest share must not be above the largest one")
    return least, most


def _text(value: object) -> str:
    """A value as a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _score(value: object) -> str:
    """``kv_score``: one of ``SCORES``, or several joined by ``+``."""
    possible = f"{_choices(SCORES)}, or several of them as in keydiff+attn"
    if not isinstance(value, str):
        raise ValueError(f"kv_score={value!r}: must be a name; possible: {possible}")
    names = value.split("+")
    for name in names:
        if name == "reconstruct":
            raise ValueError(
                f"kv_score={value!r}: reconstruct needs the text a second time, as in llm.kv.compact(); "
                f"possible here: {possible}"
            )
        if name not in SCORES or names.count(name) > 1:
            raise ValueError(f"kv_score={value!r} is unknown{_suggest(name, SCORES)}; possible: {possible}")
    return value


def check_kv_type(value: object) -> str:
    """``value`` as a kv type name.

    Raises:
        ValueError: not a string, or unknown (with the closest known name).
    """
    names = kv_type_names()
    if not isinstance(value, str):
        raise ValueError(f"kv_type={value!r}: must be a name, one of {_choices(names)}")
    if value not in names:
        raise ValueError(f"kv_type={value!r} is unknown{_suggest(value.lower(), names)}; possible: {_choices(names)}")
    return value


@dataclass(frozen=True)
class KvConfig:
    """Settings of one key/value cache, checked on construction.

    ``None`` means "the default of this kv_type". With a kvfold type every field holds a value afterwards; with
    an upstream type (``f16``, ``q8_0``, ...) the other fields stay ``None``, because they mean nothing there.

    Attributes:
        kv_type: ``fp4``, ``fp4_csa2``, ``fp4_csa2_ced``, or an upstream type.
        group: tokens per group, the unit that is folded (``kv_group``).
        tail: most recent tokens kept exact, at least 1 (``kv_tail``).
        sinks: first tokens of a sequence kept exact, 0 or more (``kv_sinks``).
        swa_type: type of sliding-window layers, ``f16`` or ``q8_0`` (``kv_swa_type``).
        scale_group: channels of a folded row that share a scale: 16, 32 or 64 (``kv_scale_group``).
        lookup: ``fp4_csa2...``: share of the folded groups that decoding reads, one number or smallest and largest
            (``kv_lookup``); 1 reads everything.
        threshold: share of the estimated attention that may stay unread between those (``kv_threshold``).
        min_tokens: folded tokens that are read at least (``kv_min_tokens``).
        max_tokens: and at most, by a query and KV head; 0 is no bound (``kv_max_tokens``).
        min_context: sequences with fewer tokens are read whole (``kv_min_context``). ``None`` stays: the runtime takes
            4096, and with layers on a GPU all are.
        layers: what each layer does, see ``kvfold.layer_modes`` (``kv_layers``).
        calibration: file of ``kvfold calibrate``, whose values are the defaults of ``group``, ``lookup``,
            ``threshold``, ``min_tokens`` and ``layers`` for the model it was made with (``kv_calibration``).
        alignment: ``fp4_csa2``: compare every look-up with attention over everything, for
            ``Llama.kv.alignment()``; slow (``kv_alignment``).
        hierarchical: whether ``full`` layers score summaries of 128 tokens first, and then only the groups of the best:
            ``off``, ``auto`` beyond 65536 tokens, ``on`` (``kv_hierarchical``).
        span_pool: groups that are left to choose from then; with fewer there is one level (``kv_span_pool``).
        keep: ``fp4_csa2_ced``: share of ``n_ctx`` that the cache has room for, above 0 (``kv_keep``).
        score: which tokens it gives up: the lowest of ``SCORES``, or of the sum of the ranks in several, as in
            ``keydiff+attn`` (``kv_score``).

    Raises:
        ValueError: a value that is impossible; the message names the setting, the value and what is possible.
    """

    kv_type: str = "f16"
    group: int | None = None
    tail: int | None = None
    sinks: int | None = None
    swa_type: str | None = None
    scale_group: int | None = None
    lookup: float | tuple[float, float] | None = None
    threshold: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_context: int | None = None
    layers: str | None = None
    alignment: bool | None = None
    calibration: str | Path | None = None
    hierarchical: str | None = None
    span_pool: int | None = None
    keep: float | None = None
    score: str | None = None

    def __post_init__(self) -> None:
        kv_type = check_kv_type(self.kv_type)
        if not is_folding(kv_type):
            self._refuse_idle_settings("kv_type", GROUPS)
            return
        if kv_type in LOOKUP_TYPES and self.calibration is not None:
            self._calibrate()
        groups = GROUPS[kv_type]
        group = groups[0] if self.group is None else self.group
        if isinstance(group, bool) or group not in groups:
            raise ValueError(f"kv_group={group!r}: {kv_type} takes {_choices(sorted(groups))}")
        tail = DEFAULT_TAIL if self.tail is None else self.tail
        sinks = DEFAULT_SINKS if self.sinks is None else self.sinks
        swa_type = DEFAULT_SWA_TYPE if self.swa_type is None else self.swa_type
        if swa_type not in SWA_TYPES:
            raise ValueError(
                f"kv_swa_type={swa_type!r}: sliding-window layers take {_choices(SWA_TYPES)} (at least 8 bits)"
            )
        scale_group = SCALE_GROUPS[0] if self.scale_group is None else self.scale_group
        if isinstance(scale_group, bool) or scale_group not in SCALE_GROUPS:
            raise ValueError(f"kv_scale_group={scale_group!r}: must be {_choices(SCALE_GROUPS)} channels")
        self._set("scale_group", operator.index(scale_group))
        self._set("group", operator.index(group))
        self._set("tail", _whole_number("kv_tail", tail, 1, what="tokens"))
        self._set("sinks", _whole_number("kv_sinks", sinks, 0, what="tokens"))
        self._set("swa_type", swa_type)
        if kv_type in LOOKUP_TYPES:
            self._set_lookup()
        else:
            self._refuse_idle_settings("kv_type group tail sinks swa_type scale_group", LOOKUP_TYPES)
        if kv_type in EVICTING_TYPES:
            keep = DEFAULT_KEEP if self.keep is None else self.keep
            self._set("keep", _share("kv_keep", keep, above_zero=True))
            self._set("score", _score(DEFAULT_SCORE if self.score is None else self.score))
        else:
            stored = [f.name for f in fields(self) if f.name not in ("keep", "score")]
            self._refuse_idle_settings(" ".join(stored), EVICTING_TYPES)

    def _calibrate(self) -> None:
        """Fills in what the calibration says and nothing explicit does."""
        if not isinstance(self.calibration, (str, Path)):
            raise ValueError(f"kv_calibration={self.calibration!r}: must be the path of a file of `kvfold calibrate`")
        found = read_calibration(self.calibration)
        self._set("calibration", str(self.calibration))
        layers = found.layers if self.lookup is None else layer_modes.without_shares(found.layers)
        if self.layers in (None, layer_modes.AUTO):
            self._set("layers", layers)
        for name in ("group", "lookup", "threshold"):
            if getattr(self, name) is None:
                self._set(name, getattr(found, name))
        if self.min_tokens is None:
            self._set("min_tokens", min(found.min_tokens, self.max_tokens or found.min_tokens))

    def _set_lookup(self) -> None:
        threshold = DEFAULT_THRESHOLD if self.threshold is None else self.threshold
        max_tokens = _whole_number("kv_max_tokens", self.max_tokens or 0, 0, what="tokens")
        min_tokens = self.min_tokens
        if min_tokens is None:
            min_tokens = min(DEFAULT_MIN_TOKENS, max_tokens or DEFAULT_MIN_TOKENS)
        layers = layer_modes.AUTO if self.layers is None else self.layers
        self._set("lookup", _lookup(DEFAULT_LOOKUP if self.lookup is None else self.lookup))
        self._set("threshold", _share("kv_threshold", threshold))
        self._set("min_tokens", _whole_number("kv_min_tokens", min_tokens, 0, what="tokens"))
        self._set("max_tokens", max_tokens)
        for name, bound in (("kv_min_tokens", min_tokens), ("kv_max_tokens", max_tokens)):
            if bound > _MAX_BOUND:
                raise ValueError(f"{name}={bound!r}: must be {_MAX_BOUND} or fewer tokens")
        for name, least in (("kv_group", int(self.group or 0)), ("kv_min_tokens", min_tokens)):
            if 0 < max_tokens < least:
                raise ValueError(f"kv_max_tokens={max_tokens!r}: less than {name}={least!r}; 0 is no bound")
        if self.min_context is not None:
            self._set("min_context", _whole_number("kv_min_context", self.min_context, 0, what="tokens"))
        if not isinstance(layers, str):
            raise ValueError(f"kv_layers={layers!r}: must be a text such as 'auto' or 'dense*2,full'")
        layer_modes.expand(layers)
        self._set("layers", layers)
        if not isinstance(self.alignment, bool | None):
            raise ValueError(f"kv_alignment={self.alignment!r}: must be True or False")
        self._set_search()

    def _set_search(self) -> None:
        hierarchical = HIERARCHICAL[0] if self.hierarchical is None else self.hierarchical
        pool = DEFAULT_SPAN_POOL if self.span_pool is None else self.span_pool
        if hierarchical not in HIERARCHICAL:
            raise ValueError(f"kv_hierarchical={hierarchical!r}: must be one of {_choices(HIERARCHICAL)}")
        if hierarchical == "on" and not self.looks_up:
            raise ValueError(
                f"kv_hierarchical='on': has no effect with kv_lookup={self.lookup!r}, which reads everything"
            )
        self._set("hierarchical", hierarchical)
        self._set("span_pool", _whole_number("kv_span_pool", pool, 1, what="groups"))
        if int(self.span_pool or 0) > _MAX_SPAN_POOL:
            raise ValueError(f"kv_span_pool={pool!r}: must be {_MAX_SPAN_POOL} or fewer groups")

    def exceeds_pool(self, n_tokens: int) -> bool:
        """Whether a look-up among the groups of so many tokens searches in two levels."""
        if self.hierarchical == "auto" and n_tokens <= AUTO_SPAN_TOKENS:
            return False
        return self.hierarchical in ("auto", "on") and n_tokens // int(self.group or 1) > int(self.span_pool or 0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse_idle_settings(self, meaningful: str, needed: Iterable[str]) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in meaningful.split() and value is not None:
                raise ValueError(
                    f"{_SETTING_OF_FIELD[field.name]}={value!r} has no effect with kv_type={self.kv_type!r}; "
                    f"it needs one of {_choices(needed)}"
                )

    @property
    def folds(self) -> bool:
        """Whether this is one of kvfold's own types."""
        return is_folding(self.kv_type)

    @property
    def looks_up(self) -> bool:
        """Whether decoding may read less than everything."""
        return isinstance(self.lookup, tuple) and self.lookup[1] < 1

    @property
    def ggml_type(self) -> int:
        """The ``ggml_type`` number to ask llama.cpp for, for keys and values alike."""
        return FOLDED_GGML_TYPE if self.folds else UPSTREAM_TYPES[self.kv_type]

    def to_dict(self) -> dict[str, Any]:
        """The settings under their public names (``kv_type``, ``kv_group``, ...), without those that do not apply."""
        named = {_SETTING_OF_FIELD[f.name]: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def to_text(self) -> dict[str, str]:
        """The settings as the flags of the command line tools take them."""
        return {name: _text(value) for name, value in self.to_dict().items()}

    @classmethod
    def from_kwargs(cls, **settings: Any) -> KvConfig:
        """Build from ``kv_*`` keyword arguments; ``None`` means default.

        Raises:
            ValueError: an unknown or not yet available name, or an impossible value.
        """
        values: dict[str, Any] = {}
        for name, value in settings.items():
            check_setting_name(name)
            if value is not None:
                values[_FIELD_OF_SETTING[name]] = value
        return cls(**values)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> KvConfig:
        """Build from a mapping. Names may leave the ``kv_`` prefix out; one table named ``kv`` is looked into.

        Tables named ``kv_cache`` and ``csa2`` are understood too, see ``kvfold.layered_file``.

        Raises:
            ValueError: as ``from_kwargs``, and when a name is given twice or the table holds other things besides.
        """
        if layered_file.is_layered(mapping):
            return cls.from_kwargs(**layered_file.settings(mapping))
        if set(mapping) == {"kv"} and isinstance(mapping["kv"], Mapping):
            mapping = mapping["kv"]
        settings: dict[str, Any] = {}
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise ValueError(f"kv setting {key!r}: names must be strings")
            name = key if key.startswith("kv_") else f"kv_{key}"
            if name in settings:
                raise ValueError(f"{name} is given twice, as {key!r} and with the other spelling")
            settings[name] = value
        return cls.from_kwargs(**settings)

    @classmethod
    def from_file(cls, path: str | Path) -> KvConfig:
        """Build from a TOML (``.toml``) or JSON (``.json``) file, see ``from_mapping`` for the names.

        Raises:
            ValueError: the file is missing, of another kind, malformed, or holds a bad setting.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"kv settings file {str(path)!r} cannot be read: {error}") from None
        try:
            if path.suffix.lower() == ".toml":
                data: object = _toml.loads(text)
            elif path.suffix.lower() == ".json":
                data = json.loads(text)
            else:
                raise ValueError("its name must end in .toml or .json")
            if not isinstance(data, Mapping):
                raise ValueError(f"a table of settings is expected, not {type(data).__name__}")
            return cls.from_mapping(data)
        except ValueError as error:
            # The decode errors of both formats are ValueErrors too.
            raise ValueError(f"kv settings file {str(path)!r}: {error}") from None

    @classmethod
    def coerce(cls, kv: KvConfig | Mapping[str, Any] | str | Path) -> KvConfig:
        """A ``KvConfig`` from what ``Llama(kv=...)`` takes: a config, a mapping, or the path of a file."""
        if isinstance(kv, KvConfig):
            return kv
        if isinstance(kv, Mapping):
            return cls.from_mapping(kv)
        if isinstance(kv, (str, Path)):
            return cls.from_file(kv)
        raise ValueError(f"kv={kv!r}: must be a KvConfig, a mapping, or the path of a TOML or JSON file")

    def merged(self, **settings: Any) -> KvConfig:
        """This config with some ``kv_*`` settings replaced.

        A change of ``kv_type`` drops a group size that was only the old type's default. Values of a calibration, and
        defaults that it replaces, are not settings of one's own: they give way.
        """
        base = self.to_dict()
        if self.kv_type in LOOKUP_TYPES and (self.calibration or settings.get("kv_calibration")):
            filled = type(self)(self.kv_type, calibration=self.calibration).to_dict()
            for name in CALIBRATED_SETTINGS:
                if base.get(name) == filled[name]:
                    del base[name]
        for name, value in settings.items():
            check_setting_name(name)
            if value is not None:
                base[name] = value
        retyped = self.folds and base["kv_type"] != self.kv_type
        if retyped and settings.get("kv_group") is None and self.group == GROUPS[self.kv_type][0]:
            base.pop("kv_group", None)
        idle: list[str] = []
        if retyped:
            idle += LOOKUP_SETTINGS if base["kv_type"] not in LOOKUP_TYPES else ()
            idle += EVICTION_SETTINGS if base["kv_type"] not in EVICTING_TYPES else ()
        if idle:
            defaults = type(self)(self.kv_type).to_dict()
            for name in idle:
                if settings.get(name) is None and base.get(name) == defaults.get(name):
                    base.pop(name, None)
        return type(self).from_kwargs(**base)


_FIELD_OF_SETTING = {
    "kv_type": "kv_type",
    "kv_group": "group",
    "kv_tail": "tail",
    "kv_sinks": "sinks",
    "kv_swa_type": "swa_type",
    "kv_scale_group": "scale_group",
    "kv_lookup": "lookup",
    "kv_threshold": "threshold",
    "kv_min_tokens": "min_tokens",
    "kv_max_tokens": "max_tokens",
    "kv_min_context": "min_context",
    "kv_layers": "layers",
    "kv_alignment": "alignment",
    "kv_calibration": "calibration",
    "kv_hierarchical": "hierarchical",
    "kv_span_pool": "span_pool",
    "kv_keep": "keep",
    "kv_score": "score",
}
#: Settings that decide what is read, not what is stored.
LOOKUP_SETTINGS = (
    "kv_lookup",
    "kv_threshold",
    "kv_min_tokens",
    "kv_max_tokens",
    "kv_min_context",
    "kv_layers",
    "kv_alignment",
    "kv_calibration",
    "kv_hierarchical",
    "kv_span_pool",
)
#: Settings that a calibration has defaults for.
CALIBRATED_SETTINGS = ("kv_group", "kv_lookup", "kv_threshold", "kv_min_tokens", "kv_layers")
EVICTION_SETTINGS = ("kv_keep", "kv_score")
_SETTING_OF_FIELD = {field: setting for setting, field in _FIELD_OF_SETTING.items()}


def setting_names() -> list[str]:
    """The names of all settings this version honours."""
    return list(_FIELD_OF_SETTING)


def check_setting_name(name: str) -> None:
    """Accept the name of a setting this version honours.

    Raises:
        ValueError: not available in this version, or unknown (with the closest known name).
    """
    if name in _FIELD_OF_SETTING:
        return
    known = _choices(_FIELD_OF_SETTING)
    if name in LATER_SETTINGS:
        raise ValueError(f"{name} is not available in this version; possible settings: {known}")
    raise ValueError(f"{name} is not a kv setting{_suggest(name, _FIELD_OF_SETTING)}; possible settings: {known}")
