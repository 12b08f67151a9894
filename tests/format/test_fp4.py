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


SCALE_GROUPS = pytest.mark.parametrize("scale_group", fp4.SCALE_GROUPS)


@pytest.fixture(scope="module")
def encode(core):
    return lambda x, n=16: np.asarray(core.fp4_encode(np.ascontiguousarray(x, np.float32), scale_group=n))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
@SCALE_GROUPS
def test_encode_equals_oracle(encode, kind, scale_group: int, seed: int) -> None:
    x = kind(np.random.default_rng(seed), 400).astype(np.float32)
    got, expected = encode(x, scale_group), fp4.encode(x, scale_group)
    wrong = np.flatnonzero((got != expected).any(axis=-1))
    assert wrong.size == 0, f"{wrong.size} of {len(x)} rows differ, first: {wrong[0]}"


@pytest.mark.parametrize("width", [64, 128, 192, 256, 1024])
@pytest.mark.parametrize(("scale_group", "block"), [(16, 36), (32, 34), (64, 33)])
def test_encode_of_any_width(encode, width: int, scale_group: int, block: int) -> None:
    x = np.random.default_rng(width).standard_normal((7, width)).astype(np.float32)
    got = encode(x, scale_group)
    assert got.shape == (7, width // 64 * block)
    assert np.array_equal(got, fp4.encode(x, scale_group))


def test_the_scale_group_is_16_unless_said(core) -> None:
    x = np.random.default_rng(9).standard_normal((3, 64)).astype(np.float32)
    assert np.array_equal(core.fp4_encode(x), fp4.encode(x, 16))


@SCALE_GROUPS
def test_special_rows(encode, scale_group: int) -> None:
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
    assert np.array_equal(encode(rows, scale_group), fp4.encode(rows, scale_group))
    assert not encode(rows, scale_group)[:2].any()


@pytest.mark.parametrize("seed", range(3))
@SCALE_GROUPS
def test_decode_equals_oracle(core, scale_group: int, seed: int) -> None:
    """Every byte pattern that an encoder may write, negative zeros included."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (500, 8, 16))
    data = fp4.pack(rng.integers(0, fp4.MAX_SCALE_CODE + 1, (500, 128 // scale_group)), codes)
    got = np.asarray(core.fp4_decode(data, scale_group=scale_group))
    assert got.dtype == np.float32 and got.shape == (500, 128)
    assert np.array_equal(got.view(np.uint32), fp4.decode(data, scale_group).view(np.uint32))


@pytest.mark.parametrize("kind", [gaussian, heavy_tailed, outlier_channels], ids=lambda f: f.__name__)
@SCALE_GROUPS
def test_error_is_below_the_plain_format(core, encode, kind, scale_group: int) -> None:
    """The scale search is never worse than scale ``amax / 6``, and takes a tenth or more off its squared error.

    With 64 channels the largest value stands further out, so that less is left to gain: a twentieth.
    """
    x = kind(np.random.default_rng(11), 500).astype(np.float32)
    decoded = core.fp4_decode(encode(x, scale_group), scale_group=scale_group)
    error = fp4.squared_error(x, np.asarray(decoded), scale_group)
    plain = fp4.amax_encode_error(x, scale_group)
    assert (error <= plain * (1 + 1e-5)).all()
    assert error.sum() <= plain.sum() * (0.95 if scale_group == 64 else 0.9)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda f: f.__name__)
@SCALE_GROUPS
def test_encoding_is_idempotent_in_value(core, encode, kind, scale_group: int) -> None:
    """A decoded row is represented exactly, so folding a row again costs nothing."""
    x = kind(np.random.default_rng(12), 300).astype(np.float32)
    once = np.asarray(core.fp4_decode(encode(x, scale_group), scale_group=scale_group))
    twice = np.asarray(core.fp4_decode(encode(once, scale_group), scale_group=scale_group))
    assert fp4.squared_error(once, twice).max() <= 1e-6 * fp4.squared_error(once, np.zeros_like(once)).max()


def test_wrong_shapes_are_refused(core) -> None:
    with pytest.raises(ValueError, match="64"):
        core.fp4_encode(np.zeros((2, 80), np.float32))
    for scale_group, block in ((16, "36"), (32, "34"), (64, "33")):
        with pytest.raises(ValueError, match=block):
            core.fp4_decode(np.zeros((2, 35), np.uint8), scale_group=scale_group)
    for scale_group in (0, 8, 48, -16):
        with pytest.raises(ValueError, match=f"scale_group: {scale_group} is not one of 16, 32, 64"):
            core.fp4_encode(np.zeros((2, 64), np.float32), scale_group=scale_group)
