"""Which models kvfold's cache types fit, decided from the GGUF header alone, before any memory is allocated."""

from __future__ import annotations

from collections.abc import Iterable

from .gguf_header import GgufHeader

#: Head sizes (channels per attention head, keys and values alike) the folding types are written for.
HEAD_SIZES = (64, 128, 256)

# Architectures by the reason why a folded cache cannot serve them. Names as in ``general.architecture``.
_NO_CACHE = frozenset(
    {
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "gemma-embedding",
        "wavtokenizer-dec",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
        "t5encoder",
        "clip",
    }
)
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_OWN_CACHE = frozenset(
    {
        "minimax-m3",
        "deepseek32",
        "deepseek4",
        "glm-dsa",
        "hy_v4",
        "dots3note",
        "qwen4exp",
        "glm5-next",
        "kimi-linear",
        "kimi-k3",
        "bailingmoe3",
    }
)
_MLA = frozenset({"deepseek2", "deepseek2-ocr", "minicpm3", "plm", "mistral4"})
_ALIBI = frozenset({"bloom", "refact", "jina-bert-v2"})


def _largest(value: object) -> int:
    """Per-layer values may be one number or an array with zeros for layers without attention."""
    if isinstance(value, bool) or value is None:
        return 0
    if isinstance(value, int):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return max((int(v) for v in value), default=0)
    return 0


def head_sizes(header: GgufHeader) -> tuple[int, int]:
    """Key and value channels per head of the full-attention layers (0 where the header does not say)."""
    heads = _largest(header.arch("attention.head_count"))
    width = _largest(header.arch("embedding_length"))
    default = width // heads if heads else 0
    key = _largest(header.arch("attention.key_length")) or default
    value = _largest(header.arch("attention.value_length")) or default
    return key, value


def _uses_alibi(header: GgufHeader) -> bool:
    arch = header.architecture
    if arch in _ALIBI or float(header.arch("attention.max_alibi_bias") or 0.0) > 0.0:
        return True
    # Baichuan's 13B variant (40 layers) has no rotary embedding; the header does not say so.
    return arch == "baichuan" and _largest(header.arch("block_count")) == 40


def why_unfit(header: GgufHeader) -> str | None:
    """Why a folding kv type cannot serve this model, or ``None`` if it can. One sentence, without the model's name."""
    arch = header.architecture
    if arch in _RECURRENT:
        return f"architecture {arch!r} is recurrent and keeps no key/value cache"
    if arch in _NO_CACHE:
        return f"architecture {arch!r} keeps no key/value cache"
    if arch in _OWN_CACHE:
        return f"architecture {arch!r} has a compressed or sparse cache of its own"
    if _largest(header.arch("attention.kv_lora_rank")) > 0 or arch in _MLA:
        return f"architecture {arch!r} uses multi-head latent attention (MLA), whose cache is already compressed"
    if _uses_alibi(header):
        return f"architecture {arch!r} uses ALiBi position biases, which the folded attention does not handle"
    key, value = head_sizes(header)
    sizes = ", ".join(str(size) for size in HEAD_SIZES)
    if key != value:
        return f"its key heads have {key} channels and its value heads {value}; both must be equal, one of {sizes}"
    if key not in HEAD_SIZES:
        return f"its attention heads have {key} channels; possible: {sizes}"
    return None


def require_fit(header: GgufHeader, kv_type: str) -> None:
    """Refuse a model that ``kv_type`` (a folding type) cannot serve.

    Raises:
        ValueError: naming the type, the model and the reason, and what is possible instead.
    """
    reason = why_unfit(header)
    if reason is not None:
        raise ValueError(f"kv_type={kv_type!r} does not fit {header.path.name}: {reason}. Use kv_type='f16' there")
