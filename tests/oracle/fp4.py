"""FP4 blocks: E2M1 values with one unsigned E4M3 scale per 16 channels (the byte layout of ggml's ``block_nvfp4``).

A block holds 64 channels in 36 bytes: four scale bytes, then 32 bytes of nibbles. Byte ``8 s + j`` of the nibbles holds
channel ``16 s + j`` (low nibble) and channel ``16 s + j + 8`` (high nibble).
"""

from __future__ import annotations

import numpy as np

BLOCK_VALUES = 64
BLOCK_BYTES = 36
SCALE_GROUP = 16
MAX_SCALE_CODE = 0x7E  # 448; 0x7F would be a NaN in E4M3 and decodes to zero in ggml

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _e4m3_table() -> np.ndarray:
    table = np.zeros(256, dtype=np.float32)
    for code in range(1, MAX_SCALE_CODE + 1):
        exponent, mantissa = code >> 3, code & 7
        table[code] = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return table


#: Value of each scale byte. Bytes that no encoder may write (0x7F and above) are zero here.
E4M3 = _e4m3_table()


def unpack(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split bytes ``[..., n, 36]`` into scale bytes ``[..., n, 4]`` and nibble codes ``[..., n, 4, 16]``."""
    blocks = np.asarray(blocks, dtype=np.uint8)
    scales = blocks[..., :4]
    packed = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    return scales, np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Inverse of :func:`unpack`."""
    packed = (codes[..., :8] | (codes[..., 8:] << 4)).astype(np.uint8)
    return np.concatenate([scales.astype(np.uint8), packed.reshape(*scales.shape[:-1], 32)], axis=-1)


def decode(data: np.ndarray) -> np.ndarray:
    """Decode bytes ``[..., 36 n]`` to float32 ``[..., 64 n]``. Exact: every product fits a float32."""
    data = np.asarray(data, dtype=np.uint8)
    scales, codes = unpack(data.reshape(*data.shape[:-1], -1, BLOCK_BYTES))
    values = E2M1[codes] * E4M3[scales][..., None]
    return values.reshape(*data.shape[:-1], -1)


def nearest_code(x: np.ndarray) -> np.ndarray:
    """The E2M1 code nearest to each value of ``x`` (already divided by the scale), found by trying all of them."""
    positive = E2M1[:8].astype(np.float64)
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    return np.argmin(np.abs(magnitude[..., None] - positive), axis=-1) | ((np.signbit(x)).astype(np.int64) << 3)


def best_possible_error(x: np.ndarray) -> np.ndarray:
    """Least squared error that any scale byte reaches, per 16 channels: float64 ``[..., n / 16]``."""
    groups = np.asarray(x, dtype=np.float64).reshape(*x.shape[:-1], -1, SCALE_GROUP)
    best = np.sum(groups**2, axis=-1)
    for code in range(1, MAX_SCALE_CODE + 1):
        scale = float(E4M3[code])
        rounded = E2M1[nearest_code(groups / scale)].astype(np.float64) * scale
        best = np.minimum(best, np.sum((groups - rounded) ** 2, axis=-1))
    return best


def amax_encode_error(x: np.ndarray) -> np.ndarray:
    """Squared error of the plain format, whose scale is the E4M3 value nearest to ``amax / 6``, per 16 channels."""
    groups = np.asarray(x, dtype=np.float64).reshape(*x.shape[:-1], -1, SCALE_GROUP)
    wanted = np.max(np.abs(groups), axis=-1) / 6
    table = E4M3[: MAX_SCALE_CODE + 1].astype(np.float64)
    scale = table[np.argmin(np.abs(wanted[..., None] - table), axis=-1)][..., None]
    rounded = np.where(scale > 0, E2M1[nearest_code(groups / np.where(scale > 0, scale, 1))] * scale, 0)
    return np.sum((groups - rounded) ** 2, axis=-1)


def squared_error(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Squared error per 16 channels of a decoded row, float64."""
    difference = np.asarray(x, dtype=np.float64) - np.asarray(decoded, dtype=np.float64)
    return np.sum(difference.reshape(*x.shape[:-1], -1, SCALE_GROUP) ** 2, axis=-1)
