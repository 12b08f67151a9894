"""The compiled FP4 codec against the oracle: equal bytes, equal values."""

import numpy as np
import pytest
from oracle import fp4


def gaussian(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal((n, 128))


def heavy_tailed(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_t(3, (n, 128))


def outlier_channels(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.standard_normal((n, 128))
    x[:, rng.integers(0, 128, 4)] *= 100
    return x


def every_magnitude(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows over the whole range of scales, far below and far above it included."""
    return rng.standard_normal((n, 128)) * 2.0 ** rng.integers(-40, 40, (n, 1))


def mixed_magnitudes(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal((n, 128)) * 2.0 ** rng.integers(-12, 6, (n, 128))


def few_values(rng: np.random.Generator, n: int) -> np.ndarray:
    """Exact halves and quarters: many ties, between values and between scales."""
    return rng.integers(-24, 25, (n, 128)) / 4


def mostly_zero(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random((n, 128)) < 0.95, 0.0, rng.standard_normal((n, 128)))


KINDS = [gaussian, heavy_tailed, outlier_channels, every_magnitude, mixed_magnitudes, few_values, mostly_zero]


@pytest.fixture(scope="module")
def encode(core):
    return lambda x: np.asarray(core.fp4_encode(np.ascontiguousarray(x, np.float32)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
def test_encode_equals_oracle(encode, kind, seed: int) -> None:
    x = kind(np.random.default_rng(seed), 400).astype(np.float32)
    got, expected = encode(x), fp4.encode(x)
    wrong = np.flatnonzero((got != expected).any(axis=-1))
    assert wrong.size == 0, f"{wrong.size} of {len(x)} rows differ, first: {wrong[0]}"


@pytest.mark.parametrize("width", [64, 128, 192, 256, 1024])
def test_encode_of_any_width(encode, width: int) -> None:
    x = np.random.default_rng(width).standard_normal((7, width)).astype(np.float32)
    got = encode(x)
    assert got.shape == (7, width // 64 * 36)
    assert np.array_equal(got, fp4.encode(x))


def test_special_rows(encode) -> None:
    """Zeros of both signs, denormals, one value, ties of the scale itself, the largest and beyond."""
    rows = np.zeros((10, 64), np.float32)
    rows[1] = -0.0
    rows[2, 5] = 1e-45
    rows[3, 63] = -1.0
    rows[4] = 6 * 240
    rows[5, ::2] = 1e5
    rows[6] = 2.0**-25 * np.arange(64) / 8
    rows[7] = 1.0
    rows[8, 0], rows[8, 1:] = 6.0, 0.25  # exactly half way between two values
    rows[9, :16] = fp4.SCALES[100:116] * 6
    assert np.array_equal(encode(rows), fp4.encode(rows))
    assert not encode(rows)[:2].any()


@pytest.mark.parametrize("seed", range(3))
def test_decode_equals_oracle(core, seed: int) -> None:
    """Every byte pattern that an encoder may write, negative zeros included."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (500, 2, fp4.BLOCK_BYTES), dtype=np.uint8)
    blocks[..., :4] = rng.integers(0, fp4.MAX_SCALE_CODE + 1, (500, 2, 4), dtype=np.uint8)
    data = blocks.reshape(500, -1)
    got = np.asarray(core.fp4_decode(data))
    assert got.dtype == np.float32 and got.shape == (500, 128)
    assert np.array_equal(got.view(np.uint32), fp4.decode(data).view(np.uint32))


@pytest.mark.parametrize("kind", [gaussian, heavy_tailed, outlier_channels], ids=lambda f: f.__name__)
def test_error_is_below_the_plain_format(core, encode, kind) -> None:
    """The scale search takes a tenth or more off the squared error of scale ``amax / 6``, and is never worse."""
    x = kind(np.random.default_rng(11), 500).astype(np.float32)
    error = fp4.squared_error(x, np.asarray(core.fp4_decode(encode(x))))
    plain = fp4.amax_encode_error(x)
    assert (error <= plain * (1 + 1e-5)).all()
    assert error.sum() <= plain.sum() * 0.9


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda f: f.__name__)
def test_encoding_is_idempotent_in_value(core, encode, kind) -> None:
    """A decoded row is represented exactly, so folding a row again costs nothing."""
    x = kind(np.random.default_rng(12), 300).astype(np.float32)
    once = np.asarray(core.fp4_decode(encode(x)))
    twice = np.asarray(core.fp4_decode(encode(once)))
    assert fp4.squared_error(once, twice).max() <= 1e-6 * fp4.squared_error(once, np.zeros_like(once)).max()


def test_wrong_shapes_are_refused(core) -> None:
    with pytest.raises(ValueError, match="64"):
        core.fp4_encode(np.zeros((2, 80), np.float32))
    with pytest.raises(ValueError, match="36"):
        core.fp4_decode(np.zeros((2, 35), np.uint8))
