"""FP4 rows: E2M1 values with one unsigned 8-bit scale for a *scale group* of 16, 32 or 64 channels.

64 channels are 32 bytes of nibbles and four, two or one scale bytes: 36, 34 or 33 bytes. Byte ``8 s + j`` of the
nibbles holds channel ``16 s + j`` (low nibble) and channel ``16 s + j + 8`` (high nibble). With groups of 16 a row is
made of blocks of 64 channels, scales first (the byte layout of ggml's ``block_nvfp4``). With 32 and 64 all its nibbles
come first, then all its scales.

A scale byte has five exponent and three mantissa bits: ``t`` stands for the half-precision number of bits ``t << 7``,
divided by 256. Exponent 31 is not used, so the largest scale is 240.
"""

from __future__ import annotations

import numpy as np

BLOCK_VALUES = 64
BLOCK_BYTES = 36  # with groups of 16, which summaries have
SCALE_GROUP = 16
SCALE_GROUPS = (16, 32, 64)
MAX_SCALE_CODE = 0xF7
SCALE_OFFSETS = (0, 5, -1, 4, 1, 6, 3, -2)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], dtype=np.float32)


def _scale_table() -> np.ndarray:
    table = np.zeros(256, dtype=np.float32)
    for code in range(MAX_SCALE_CODE + 1):
        exponent, mantissa = code >> 3, code & 7
        table[code] = mantissa * 2.0**-25 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 23)
    return table


#: Value of each scale byte. Bytes that no encoder may write (above 0xF7) are zero here.
SCALES = _scale_table()


def block_bytes(scale_group: int) -> int:
    """Bytes of 64 channels."""
    return BLOCK_VALUES // scale_group + BLOCK_VALUES // 2


def scale_group_of(row_bytes: int, channels: int) -> int:
    """The scale group of rows of so many bytes."""
    return next(g for g in SCALE_GROUPS if block_bytes(g) * channels == BLOCK_VALUES * row_bytes)


def unpack(rows: np.ndarray, scale_group: int = SCALE_GROUP) -> tuple[np.ndarray, np.ndarray]:
    """Split bytes ``[..., b n]`` into scale bytes ``[..., 64 n / group]`` and nibble codes ``[..., 4 n, 16]``."""
    rows = np.asarray(rows, dtype=np.uint8)
    head, n_blocks = rows.shape[:-1], rows.shape[-1] // block_bytes(scale_group)
    if scale_group == SCALE_GROUP:
        blocks = rows.reshape(*head, n_blocks, BLOCK_BYTES)
        scales, packed = blocks[..., :4], blocks[..., 4:]
    else:
        scales, packed = rows[..., 32 * n_blocks :], rows[..., : 32 * n_blocks]
    packed = packed.reshape(*head, 4 * n_blocks, 8)
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return scales.reshape(*head, n_blocks * BLOCK_VALUES // scale_group), codes


def pack(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Inverse of :func:`unpack`."""
    head, n_blocks = scales.shape[:-1], codes.shape[-2] // 4
    packed = (codes[..., :8] | (codes[..., 8:] << 4)).astype(np.uint8).reshape(*head, n_blocks, 32)
    scales = scales.astype(np.uint8)
    if scales.shape[-1] == 4 * n_blocks:
        parts = [scales.reshape(*head, n_blocks, 4), packed]
        return np.concatenate(parts, axis=-1).reshape(*head, n_blocks * BLOCK_BYTES)
    return np.concatenate([packed.reshape(*head, 32 * n_blocks), scales], axis=-1)


def decode(data: np.ndarray, scale_group: int = SCALE_GROUP) -> np.ndarray:
    """Decode bytes ``[..., b n]`` to float32 ``[..., 64 n]``. Exact: every product fits a float32."""
    scales, codes = unpack(data, scale_group)
    values = E2M1[codes] * np.repeat(SCALES[scales], scale_group // 16, axis=-1)[..., None]
    return values.reshape(*codes.shape[:-2], 16 * codes.shape[-2])


def encode(x: np.ndarray, scale_group: int = SCALE_GROUP) -> np.ndarray:
    """Encode float32 ``[..., 64 n]`` to bytes ``[..., b n]``, by the rule of ``cpp/format/fp4_codec.h``.

    Per scale group eight scales around ``amax / 6`` are tried and the one of least squared error is kept, the first of
    equals. The error is summed in float32 in a fixed order, so that the choice is the same on every machine.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    groups = x.reshape(-1, scale_group)
    magnitude = np.abs(groups)
    amax = magnitude.max(axis=1)
    nearest = nearest_scale_code(amax * (np.float32(1) / np.float32(6)))
    errors, indices, codes = [], [], []
    with np.errstate(over="ignore"):
        for offset in SCALE_OFFSETS:
            code = np.clip(nearest + offset, 1, MAX_SCALE_CODE)
            scale = SCALES[code][:, None]
            scaled = magnitude * (np.float32(1) / scale)
            index = np.sum(scaled[..., None] > THRESHOLDS, axis=-1)
            errors.append(error_in_order(magnitude - E2M1[index] * scale))
            indices.append(index)
            codes.append(code)
    best = np.argmin(np.array(errors), axis=0)
    rows = np.arange(len(groups))
    scale_bytes = np.where(amax == 0, 0, np.array(codes)[best, rows])
    nibbles = np.array(indices)[best, rows] | (np.signbit(groups).astype(np.int64) << 3)
    nibbles = np.where(amax[:, None] == 0, 0, nibbles)
    width = x.shape[-1]
    return pack(
        scale_bytes.reshape(*x.shape[:-1], width // scale_group), nibbles.reshape(*x.shape[:-1], width // 16, 16)
    )


def error_in_order(d: np.ndarray) -> np.ndarray:
    """Sum of squares of float32 ``[n, 16 k]`` in the order of the rule: by 16 channels, and these one after another."""
    total = np.zeros(len(d), np.float32)
    for first in range(0, d.shape[1], 16):
        part = d[:, first : first + 16]
        a = fused_multiply_add(part[:, 8:], part[:, 8:], part[:, :8] * part[:, :8])
        b = a[:, :4] + a[:, 4:]
        total = total + ((b[:, 0] + b[:, 2]) + (b[:, 1] + b[:, 3]))
    return total


def nearest_scale_code(t: np.ndarray) -> np.ndarray:
    """The code whose value is nearest to ``t``, ties to the even code."""
    table = SCALES[: MAX_SCALE_CODE + 1].astype(np.float64)
    t = np.minimum(np.asarray(t, np.float64), table[-1])
    above = np.clip(np.searchsorted(table, t), 1, MAX_SCALE_CODE)
    below = above - 1
    to_above, to_below = table[above] - t, t - table[below]
    tie = np.where(above % 2 == 0, above, below)
    return np.where(to_above < to_below, above, np.where(to_above > to_below, below, tie))


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32 arrays with one rounding.

    The product is exact in float64; the sum is rounded to odd there, which makes the second rounding harmless.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    with np.errstate(invalid="ignore"):
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (error != 0) & even, odd, total).astype(np.float32)


def nearest_code(x: np.ndarray) -> np.ndarray:
    """The E2M1 code nearest to each value of ``x`` (already divided by the scale), found by trying all of them."""
    positive = E2M1[:8].astype(np.float64)
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    return np.argmin(np.abs(magnitude[..., None] - positive), axis=-1) | ((np.signbit(x)).astype(np.int64) << 3)


def best_possible_error(x: np.ndarray, scale_group: int = SCALE_GROUP) -> np.ndarray:
    """Least squared error that any scale byte reaches, per scale: float64 ``[..., n / scale_group]``."""
    groups = np.asarray(x, dtype=np.float64).reshape(*x.shape[:-1], -1, scale_group)
    best = np.sum(groups**2, axis=-1)
    for code in range(1, MAX_SCALE_CODE + 1):
        scale = float(SCALES[code])
        rounded = E2M1[nearest_code(groups / scale)].astype(np.float64) * scale
        best = np.minimum(best, np.sum((groups - rounded) ** 2, axis=-1))
    return best


def amax_encode_error(x: np.ndarray, scale_group: int = SCALE_GROUP) -> np.ndarray:
    """Squared error of the plain format, whose scale is the scale nearest to ``amax / 6``, per scale."""
    groups = np.asarray(x, dtype=np.float64).reshape(*x.shape[:-1], -1, scale_group)
    wanted = np.max(np.abs(groups), axis=-1) / 6
    table = SCALES[: MAX_SCALE_CODE + 1].astype(np.float64)
    scale = table[np.argmin(np.abs(wanted[..., None] - table), axis=-1)][..., None]
    rounded = np.where(scale > 0, E2M1[nearest_code(groups / np.where(scale > 0, scale, 1))] * scale, 0)
    return np.sum((groups - rounded) ** 2, axis=-1)


def squared_error(x: np.ndarray, decoded: np.ndarray, scale_group: int = SCALE_GROUP) -> np.ndarray:
    """Squared error per scale of a decoded row, float64."""
    difference = np.asarray(x, dtype=np.float64) - np.asarray(decoded, dtype=np.float64)
    return np.sum(difference.reshape(*x.shape[:-1], -1, scale_group) ** 2, axis=-1)
