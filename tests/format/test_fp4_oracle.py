"""The oracle's FP4 codec against definitions that leave no room for a choice."""

import numpy as np
import pytest
from oracle import fp4


@pytest.mark.parametrize("seed", range(3))
def test_fused_multiply_add_rounds_once(seed: int) -> None:
    """Against exact rational arithmetic, on operands that make double rounding likely."""
    from fractions import Fraction

    rng = np.random.default_rng(seed)
    a = (rng.integers(1 << 23, 1 << 24, 300) * 2.0 ** rng.integers(-40, -20, 300)).astype(np.float32)
    c = (rng.integers(1 << 23, 1 << 24, 300) * 2.0 ** rng.integers(-60, -30, 300)).astype(np.float32)
    got = fp4.fused_multiply_add(a, a, c)
    for x, z, r in zip(a, c, got, strict=True):
        exact = Fraction(float(x)) ** 2 + Fraction(float(z))
        distance = abs(Fraction(float(r)) - exact)
        for neighbour in (np.nextafter(r, np.float32(0)), np.nextafter(r, np.float32(np.inf))):
            assert distance <= abs(Fraction(float(neighbour)) - exact)


def test_scale_table_is_half_precision_shifted() -> None:
    codes = np.arange(fp4.MAX_SCALE_CODE + 1, dtype=np.uint16)
    half = (codes << 7).view(np.float16).astype(np.float64)
    assert np.array_equal(fp4.SCALES[codes].astype(np.float64), half / 256)


def test_blocks_are_nvfp4_where_the_scale_formats_meet() -> None:
    """ggml's own reader agrees on blocks whose scale both formats can express."""
    quants = pytest.importorskip("gguf.quants", reason="NVFP4 is checked with the gguf package")
    if not hasattr(quants, "NVFP4"):
        pytest.skip("this gguf package cannot read NVFP4")
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (200, fp4.BLOCK_BYTES), dtype=np.uint8)
    e4m3 = rng.integers(0x08, 0x78, (200, 4), dtype=np.uint8)  # exponent fields 1..14: values up to 240
    blocks[:, :4] = e4m3
    theirs = quants.NVFP4.dequantize_blocks(blocks)
    blocks[:, :4] = e4m3 | 0x80
    assert np.array_equal(fp4.decode(blocks), theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale_group", fp4.SCALE_GROUPS)
def test_pack_and_unpack_are_inverse(scale_group: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (50, 3 * fp4.block_bytes(scale_group)), dtype=np.uint8)
    assert np.array_equal(fp4.pack(*fp4.unpack(rows, scale_group)), rows)


@pytest.mark.parametrize("scale_group", fp4.SCALE_GROUPS)
def test_every_channel_has_the_scale_of_its_group(scale_group: int) -> None:
    """Ones of groups with different scales, by the definition of a row's bytes."""
    n_scales = 128 // scale_group
    codes = 0x80 + 8 * np.arange(n_scales, dtype=np.uint8)  # each the double of the one before
    ones = np.full(64, 0x22, np.uint8)
    blocks = [codes[:4], ones[:32], codes[4:], ones[32:]]
    row = np.concatenate(blocks if scale_group == 16 else [ones, codes])
    expected = np.repeat(2.0 ** np.arange(n_scales), scale_group) * fp4.SCALES[0x80]
    assert np.array_equal(fp4.decode(row, scale_group), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("scale_group", "loss"), [(16, 0.002), (32, 0.002), (64, 0.003)])
def test_encode_is_nearly_the_best_possible(scale_group: int, loss: float, seed: int) -> None:
    """Eight candidates, chosen for groups of 16, lose next to nothing against all 247 scales, and never beat them."""
    x = np.random.default_rng(seed).standard_normal((400, 64)).astype(np.float32)
    error = fp4.squared_error(x, fp4.decode(fp4.encode(x, scale_group), scale_group), scale_group)
    best = fp4.best_possible_error(x, scale_group)
    assert (error >= best * (1 - 1e-6)).all()
    assert error.sum() <= (1 + loss) * best.sum()
