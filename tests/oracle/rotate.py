"""Reference of the Hadamard rotation: by its definition, and to the bit as the operations do it."""

from __future__ import annotations

import numpy as np

#: Sizes for keys (and queries) and for values; 0 means no rotation.
Rotation = tuple[int, int]


def hadamard(n: int) -> np.ndarray:
    """The orthogonal Hadamard matrix of ``n`` points in natural (Sylvester) order, float64."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    if len(h) != n:
        raise ValueError(f"{n} is no power of two")
    return h / np.sqrt(n)


def rotate(x: np.ndarray, n: int) -> np.ndarray:
    """Every ``n`` consecutive channels of the last axis times the matrix, float64."""
    x = np.asarray(x, np.float64)
    if n == 0:
        return x
    with np.errstate(invalid="ignore"):
        return (x.reshape(*x.shape[:-1], -1, n) @ hadamard(n)).reshape(x.shape)


def rotate_f32(x: np.ndarray, n: int) -> np.ndarray:
    """The same in float32, in the order of operations that ``cpp/ops/rotate.h`` defines: equal to the bit."""
    x = np.asarray(x, np.float32)
    if n == 0:
        return x
    y = x.reshape(-1, n)
    distance = 1
    with np.errstate(invalid="ignore", over="ignore"):
        while distance < n:
            pairs = y.reshape(-1, n // (2 * distance), 2, distance)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([a + b, a - b], axis=2).reshape(-1, n)
            distance *= 2
        y = y * np.float32(1 / np.sqrt(n))
    return y.reshape(x.shape)
