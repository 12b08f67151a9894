// The Hadamard rotation of rows (why: see Rotation in kv_ops.h).
//
// Every n consecutive channels x of a row become H x / sqrt(n), with the n-point Hadamard matrix in natural order: H[i][j]
// is -1 where i and j have an odd number of one bits in common, else 1. H is symmetric and H / sqrt(n) orthogonal, so the
// rotation undoes itself, up to rounding.
//
// What is folded must not depend on where it was rotated, so the result is defined to the bit. In IEEE f32, round to
// nearest even, no flush to zero, nothing fused:
//   1. for h = 1, 2, 4 .. n/2 in this order, for every i with (i & h) == 0:
//          x[i], x[i + h]  become  x[i] + x[i + h], x[i] - x[i + h]
//   2. every x[i] is multiplied by rotation_scale(n)
// A caller must not fuse the multiplication with what it does next either (CUDA: __fmul_rn); on the CPU the function is in
// a translation unit of its own for that reason.
#pragma once

#include <cstdint>

#include "format/fp4_codec.h"

namespace kvfold {

constexpr int kRotationMax = 256;  // channels

// n^-1/2 rounded to f32, for a size of 64, 128 or 256.
KVFOLD_HOST_DEVICE constexpr float rotation_scale(int size) {
    return size == 64 ? 0x1p-3f : size == 128 ? 0x1.6a09e6p-4f : 0x1p-4f;
}

// Whether rows of heads of `head_dim` channels can be rotated by `size`; 0 is no rotation.
constexpr bool rotation_fits(int64_t size, int64_t head_dim) {
    return size == 0 || ((size == 64 || size == 128 || size == 256) && head_dim % size == 0);
}

// `n` channels, a multiple of `size`; `to` may be `from`. Size 0 copies.
void rotate_row(const float * from, float * to, int64_t n, int32_t size);

}  // namespace kvfold
