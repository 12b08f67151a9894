"""``kvfold plan``: what a model and its cache take, what fits into a memory, and the best settings for it.

Weights come from the GGUF header. The cache is computed from the header too (``kv_layout``) and taken from a dry run of
the runtime (``dry_run``), as are the compute buffers, which nobody else knows. Settings are chosen in the order memory,
then throughput: first everything has to fit, then the micro-batch grows while there is room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .config import KvConfig
from .devices import Device, free_memory
from .kv_layout import bytes_per_token
from .sizing import DEFAULT_BATCH, Need, Planner, Settings, Share, Weights
from .units import MIB, count_text, size_text, table

#: Share of a memory budget that a recommendation leaves free: for the driver's own use and what others take.
HEADROOM = 0.05
#: A smaller cache is worth having where an f16 cache is at least this share of the weights.
WORTH_SHARE = 0.5

#: Types the table compares.
TABLE_TYPES = ("fp4", "fp4_csa2", "q4_0", "q8_0", "f16")
#: Types a recommendation chooses from when none is given, the preferred first.
RECOMMENDED_TYPES = ("fp4_csa2", "fp4")

_CONTEXT_STEP = 1024
_LEAST_CONTEXT = 1024
_MICRO_BATCHES = (2048, 1024, 512)
_SMALL_MICRO_BATCHES = (256, 128)


@dataclass(frozen=True)
class Budget:
    """Memory to plan for, in bytes: of the GPU (``None``: there is none), and of the machine (``None``: any)."""

    gpu: int | None
    host: int | None
    source: str

    @property
    def place(self) -> str:
        """Which of the two is the tight one."""
        return "gpu" if self.gpu is not None else "host"

    @property
    def tight(self) -> int | None:
        """Bytes of the tight one."""
        return self.gpu if self.gpu is not None else self.host

    def headroom(self, need: Need) -> float | None:
        """Share of the tight budget that stays free, negative when ``need`` does not fit; ``None`` without a limit."""
        if self.tight is None:
            return None
        used = need.gpu.total if self.gpu is not None else need.host.total
        free = 1 - used / self.tight
        if self.gpu is not None and self.host is not None:
            free = min(free, 1 - need.host.total / self.host)
        return free

    def fits(self, need: Need, spare: float = 0.0) -> bool:
        """Whether it fits with a share of ``spare`` left."""
        free = self.headroom(need)
        return free is None or free >= spare


# -- choosing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wishes:
    """What the user has fixed; ``None`` leaves the choice open.

    Attributes:
        config: kv type and settings.
        n_ctx: tokens.
        n_gpu_layers: layers on the GPU.
        n_batch, n_ubatch: batch and micro-batch.
        n_seq: sequences at a time.
    """

    config: KvConfig | None = None
    n_ctx: int | None = None
    n_gpu_layers: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_seq: int = 1


@dataclass
class Plan:
    """Settings, what they take, and what else would be possible.

    Attributes:
        settings: the chosen ones.
        need: what they take.
        budget: what was planned for.
        fits: whether they fit at all; ``headroom`` is the share of the budget that stays free.
        worth: whether a folded cache pays here: f16's cache is more than half of the weights.
        types: by kv type, the sizes at this context and the largest context that fits.
        notes: sentences a reader should know.
    """

    planner: Planner
    settings: Settings
    need: Need
    budget: Budget
    imagined_gpu: bool
    notes: list[str] = field(default_factory=list)
    types: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headroom(self) -> float | None:
        return self.budget.headroom(self.need)

    @property
    def fits(self) -> bool:
        return self.budget.fits(self.need)

    @property
    def f16_share(self) -> float:
        """f16's cache over the weights."""
        return self.need.f16_bytes / max(self.planner.weights.total, 1)

    @property
    def worth(self) -> bool:
        return self.f16_share > WORTH_SHARE

    def arguments(self) -> dict[str, Any]:
        """The settings as arguments of ``Llama``."""
        s = self.settings
        everything = s.n_gpu_layers >= self.planner.all_layers
        defaults = KvConfig(s.config.kv_type).to_dict()
        cache = {k: v for k, v in s.config.to_dict().items() if k == "kv_type" or v != defaults[k]}
        arguments: dict[str, Any] = {
            "n_ctx": s.n_ctx,
            **cache,
            "n_gpu_layers": -1 if everything else s.n_gpu_layers,
            "n_batch": s.n_batch,
            "n_ubatch": s.n_ubatch,
        }
        return arguments if s.config.folds else {**arguments, "flash_attn": True}

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``. Sizes are bytes."""
        p, s, need = self.planner, self.settings, self.need
        per_token = bytes_per_token(p.layers, s.config, s.n_ctx) if p.layers is not None else None
        return {
            "model": {
                "path": str(p.header.path),
                "architecture": p.header.architecture,
                "n_layer": p.n_layer,
                "n_ctx_train": p.trained_context,
                "bytes": p.weights.total,
                "layer_bytes": list(p.weights.layers),
                "embedding_bytes": p.weights.embedding,
                "output_bytes": p.weights.output,
            },
            "settings": {**self.arguments(), "n_gpu_layers": s.n_gpu_layers, "n_seq": s.n_seq},
            "kv": {
                **s.config.to_dict(),
                "bytes": need.kv_bytes,
                "f16_bytes": need.f16_bytes,
                "ratio": need.kv_bytes / need.f16_bytes if need.f16_bytes else 1.0,
                "bytes_per_token": per_token,
                "parts": need.parts,
            },
            "compute": {"bytes": need.gpu.compute + need.host.compute},
            "total": {"bytes": need.total, "gpu": need.gpu.total, "host": need.host.total},
            "gpu": asdict(need.gpu),
            "host": asdict(need.host),
            "budget": {"gpu": self.budget.gpu, "host": self.budget.host, "source": self.budget.source},
            "fits": self.fits,
            "headroom": self.headroom,
            "worth": {
                "f16_bytes": need.f16_bytes,
                "weights_bytes": p.weights.total,
                "share": self.f16_share,
                "worth_it": self.worth,
            },
            "types": self.types,
            "arguments": self.arguments(),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return _report(self)


def _round_down(value: int) -> int:
    return max(value // _CONTEXT_STEP * _CONTEXT_STEP, _LEAST_CONTEXT)


class _Chooser:
    """Finds settings for a budget."""

    def __init__(self, planner: Planner, wishes: Wishes, budget: Budget, imagined_gpu: bool) -> None:
        self.planner, self.wishes, self.budget, self.imagined = planner, wishes, budget, imagined_gpu
        wanted = wishes.n_gpu_layers
        gpu_layers = planner.all_layers if wanted is None or wanted < 0 else min(wanted, planner.all_layers)
        self.gpu_layers = gpu_layers if budget.gpu is not None else 0
        self.spare = HEADROOM

    def settings(self, config: KvConfig, n_ctx: int, n_gpu_layers: int, n_ubatch: int | None = None) -> Settings:
        ubatch = self.wishes.n_ubatch or n_ubatch or min(self.wishes.n_batch or DEFAULT_BATCH, DEFAULT_BATCH)
        batch = self.wishes.n_batch or max(ubatch, DEFAULT_BATCH)
        return Settings(config, n_ctx, n_gpu_layers, batch, ubatch, self.wishes.n_seq)

    def need(self, settings: Settings) -> Need:
        return self.planner.need(settings, imagined_gpu=self.imagined)

    def fits(self, settings: Settings) -> bool:
        return self.budget.fits(self.need(settings), self.spare)

    def largest_context(
        self, config: KvConfig, n_gpu_layers: int, n_ubatch: int | None = None, windows: bool | None = None
    ) -> int:
        """The largest context (a multiple of 1024, at most what the model was trained with) that fits; 0 if none."""

        def possible(steps: int) -> bool:
            settings = self.settings(config, steps * _CONTEXT_STEP, n_gpu_layers, n_ubatch)
            return self.fits(replace(settings, windows=windows))

        return _CONTEXT_STEP * _last(possible, max(self.planner.trained_context // _CONTEXT_STEP, 1))

    def most_layers(self, config: KvConfig, n_ctx: int) -> int:
        """The most layers on the GPU that fit."""
        return _last(lambda n: self.fits(self.settings(config, n_ctx, n)), self.planner.all_layers)

    def types(self) -> list[KvConfig]:
        if self.wishes.config is not None:
            return [self.wishes.config]
        if self.planner.unfit(KvConfig("fp4")):
            return [KvConfig("f16"), KvConfig("q8_0")]
        n_ctx = self.wishes.n_ctx or self.planner.trained_context
        share = self.planner.f16_cache(n_ctx, self.wishes.n_seq) / max(self.planner.weights.total, 1)
        folded = [KvConfig(name) for name in RECOMMENDED_TYPES]
        return folded if share > WORTH_SHARE else [KvConfig("f16"), *folded]

    def choose(self) -> Settings:
        chosen = self._choose_memory()
        return self._widen(chosen)

    def _choose_memory(self) -> Settings:
        types = self.types()
        for n_ubatch in self._micro_batches():
            for config in types:
                if self.wishes.n_ctx is not None:
                    settings = self.settings(config, self.wishes.n_ctx, self.gpu_layers, n_ubatch)
                    if self.fits(settings):
                        return settings
                    continue
                largest = self.largest_context(config, self.gpu_layers, n_ubatch)
                full = _round_down(self.planner.trained_context)
                if largest and (largest >= full or config is types[-1] or config.folds):
                    return self.settings(config, min(largest, full), self.gpu_layers, n_ubatch)
        # Not with these layers on the GPU.
        config = types[-1]
        n_ctx = self.wishes.n_ctx or _round_down(min(self.planner.trained_context, 4096))
        layers = self.gpu_layers
        if self.budget.gpu is not None and self.wishes.n_gpu_layers is None:
            layers = self.most_layers(config, n_ctx)
        return self.settings(config, n_ctx, layers)

    def _micro_batches(self) -> Iterable[int | None]:
        return (None,) if self.wishes.n_ubatch or self.wishes.n_batch else (None, *_SMALL_MICRO_BATCHES)

    def _widen(self, settings: Settings) -> Settings:
        """A larger micro-batch where the GPU has room for it: prompts are read faster."""
        if self.budget.gpu is None or self.wishes.n_ubatch or self.wishes.n_batch or settings.n_ubatch < DEFAULT_BATCH:
            return settings
        for n_ubatch in _MICRO_BATCHES:
            wider = replace(settings, n_ubatch=n_ubatch, n_batch=max(n_ubatch, DEFAULT_BATCH))
            if n_ubatch <= settings.n_ctx and self.fits(wider):
                return wider
        return settings


def _last(possible: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that is possible (possible up to it, impossible beyond); 0 if none."""
    if possible(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def find_budget(vram: int | None, ram: int | None, devices: list[Device], n_gpu_layers: int | None) -> Budget:
    """The memory to plan for: what was given, else what is free."""
    host = ram if ram is not None else free_memory()
    if vram is not None:
        return Budget(vram, host, "given")
    if devices and n_gpu_layers != 0:
        names = ", ".join(f"{d.name} ({d.description})" for d in devices)
        return Budget(sum(d.free for d in devices), host, f"free on {names}, as the {devices[0].source} says")
    return Budget(None, host, "given" if ram is not None else "free memory of this machine")


def make_plan(
    path: str | os.PathLike[str],
    wishes: Wishes | None = None,
    *,
    vram: int | None = None,
    ram: int | None = None,
    compare: bool = True,
    advise: bool = True,
) -> Plan:
    """Plan a model.

    Args:
        path: a GGUF file.
        wishes: what is fixed.
        vram, ram: budgets in bytes; default: what is free.
        compare: also fill ``Plan.types``.
        advise: where the wishes do not fit, also find out what would.

    Raises:
        ValueError: the model is missing, malformed or cannot be loaded, or a wish cannot be honoured.
    """
    wishes = wishes or Wishes()
    with Planner(path) as planner:
        if wishes.config is not None and (reason := planner.unfit(wishes.config)):
            raise ValueError(
                f"kv_type={wishes.config.kv_type!r} does not fit {Path(path).name}: {reason}. Use kv_type='f16' there"
            )
        budget = find_budget(vram, ram, planner.devices, wishes.n_gpu_layers)
        imagined = budget.gpu is not None and not planner.devices
        chooser = _Chooser(planner, wishes, budget, imagined)
        settings = chooser.choose()
        plan = Plan(planner, settings, chooser.need(settings), budget, imagined)
        plan.notes = list(_notes(plan, wishes))
        if advise and not plan.fits:
            plan.notes.insert(1, what_fits(path, settings, vram=vram, ram=ram))
        if compare:
            plan.types = list(_compare(chooser, settings, wishes))
        return plan


def _compare(chooser: _Chooser, settings: Settings, wishes: Wishes) -> Iterable[dict[str, Any]]:
    configs = [KvConfig(name) for name in TABLE_TYPES]
    if wishes.config is not None:
        configs = [wishes.config if c.kv_type == wishes.config.kv_type else c for c in configs]
        if wishes.config.kv_type not in TABLE_TYPES:
            configs.append(wishes.config)
    planner = chooser.planner
    layers = planner.layers
    for config in configs:
        if reason := planner.unfit(config):
            yield {"kv_type": config.kv_type, "unfit": reason}
            continue
        need = chooser.need(replace(settings, config=config, windows=True))
        yield {
            "kv_type": config.kv_type,
            "bytes_per_token": bytes_per_token(layers, config, settings.n_ctx) if layers is not None else None,
            "kv_bytes": need.kv_bytes,
            "ratio": need.kv_bytes / need.f16_bytes if need.f16_bytes else 1.0,
            "total_bytes": need.total,
            "fits": chooser.budget.fits(need),
            "max_ctx": chooser.largest_context(config, settings.n_gpu_layers, settings.n_ubatch, windows=True),
        }


def _notes(plan: Plan, wishes: Wishes) -> Iterable[str]:
    p, s = plan.planner, plan.settings
    free = plan.headroom
    if free is not None and free < 0:
        yield f"this does not fit: {_missing(plan)} missing"
    elif free is not None and free < HEADROOM:
        yield f"only {100 * free:.1f} % of the memory stays free; {100 * HEADROOM:.0f} % is prudent"
    if s.n_ctx > p.trained_context:
        yield f"the model was trained with {p.trained_context} tokens; beyond that its answers get worse"
    share = f"an f16 cache of {count_text(s.n_ctx)} tokens is {100 * plan.f16_share:.0f} % of the weights"
    if plan.worth:
        yield f"{share}: a smaller cache pays (the rule: more than {100 * WORTH_SHARE:.0f} %)"
    else:
        yield f"{share}: a smaller cache saves little (the rule: more than {100 * WORTH_SHARE:.0f} % pays)"
    if wishes.n_gpu_layers is None and plan.budget.gpu is not None and s.n_gpu_layers < p.all_layers:
        yield f"not all layers fit on the GPU: {s.n_gpu_layers} of {p.all_layers}; the others run on the CPU"
    if plan.imagined_gpu:
        yield "this build has no GPU support: the split is computed, the compute buffer is that of a CPU dry run"
    if s.swa_full and p.layers is not None and any(y.window for y in p.layers):
        yield (
            f"with {s.config.kv_type} Llama keeps sliding-window layers at full length, which the comparison of "
            "types does not count; swa_full=False keeps their window only"
        )


def what_fits(
    path: str | os.PathLike[str], settings: Settings, *, vram: int | None = None, ram: int | None = None
) -> str:
    """One sentence: the settings nearest to ``settings`` that fit into the budget (default: what is free)."""
    for wishes in _fallbacks(settings):
        try:
            plan = make_plan(path, wishes, vram=vram, ram=ram, compare=False, advise=False)
        except ValueError:
            continue
        if plan.fits:
            s = plan.settings
            layers = f", n_gpu_layers={s.n_gpu_layers}" if plan.budget.gpu is not None else ""
            return f"What fits: n_ctx={s.n_ctx} ({count_text(s.n_ctx)}), kv_type={s.config.kv_type!r}{layers}"
    return "No context fits"


def _fallbacks(settings: Settings) -> Iterable[Wishes]:
    base = Wishes(n_gpu_layers=0 if settings.n_gpu_layers == 0 else None, n_seq=settings.n_seq)
    if not settings.config.folds:
        # The same context in a smaller type.
        yield replace(base, n_ctx=settings.n_ctx, config=KvConfig("fp4_csa2"), n_gpu_layers=settings.n_gpu_layers)
    yield replace(base, config=settings.config, n_gpu_layers=settings.n_gpu_layers)
    yield replace(base, config=settings.config)
    yield base


def _missing(plan: Plan) -> str:
    """Bytes that the budget lacks."""
    lacking = 0
    if plan.budget.gpu is not None:
        lacking = max(plan.need.gpu.total - plan.budget.gpu, 0)
    if plan.budget.host is not None:
        lacking = max(lacking, plan.need.host.total - plan.budget.host)
    return size_text(lacking)


def _report(plan: Plan) -> str:
    p, need = plan.planner, plan.need
    header = p.header
    lines = [
        f"{header.path.name}: {header.architecture}, {p.n_layer} layers, trained with {count_text(p.trained_context)} "
        f"tokens, weights {size_text(p.weights.total)} ({_layer_text(p.weights)})",
        "",
    ]
    places: list[tuple[str, Share, int | None]] = []
    if plan.budget.gpu is not None:
        places.append(("GPU", need.gpu, plan.budget.gpu))
    places.append(("machine", need.host, plan.budget.host))
    rows = [
        [
            name,
            *(size_text(v) for v in (share.model, share.kv, share.compute + share.state, share.total)),
            size_text(limit) if limit is not None else "?",
            f"{100 * (1 - share.total / limit):.0f} %" if limit else "",
        ]
        for name, share, limit in places
    ]
    lines += [table(["memory", "weights", "cache", "compute", "total", "budget", "free"], rows), ""]
    if plan.types:
        lines += [_type_table(plan), ""]
    settings = ", ".join(f"{k}={v!r}" for k, v in plan.arguments().items())
    lines += [f"{'recommended' if plan.fits else 'nearest'}: Llama({header.path.name!r}, {settings})"]
    lines += [f"- {note}" for note in plan.notes]
    return "\n".join(lines)


def _layer_text(weights: Weights) -> str:
    sizes = sorted(set(weights.layers))
    if not sizes:
        return "no layers"
    each = size_text(sizes[0]) if len(sizes) == 1 else f"{sizes[0] / MIB:.1f} to {size_text(sizes[-1])}"
    return f"{each} a layer, embedding {size_text(weights.embedding)}, output {size_text(weights.output)}"


def _type_table(plan: Plan) -> str:
    rows = []
    for row in plan.types:
        if "unfit" in row:
            rows.append([row["kv_type"], "", "", "", "", "no", ""])
            continue
        per_token = row["bytes_per_token"]
        rows.append(
            [
                row["kv_type"],
                f"{per_token:.0f} B" if per_token is not None else "?",
                size_text(row["kv_bytes"]),
                f"{100 * row['ratio']:.1f} %",
                size_text(row["total_bytes"]),
                "yes" if row["fits"] else "no",
                count_text(row["max_ctx"]),
            ]
        )
    at = f"cache at {count_text(plan.settings.n_ctx)}"
    return table(["kv type", "per token", at, "of f16", "total", "fits", "largest context"], rows)
