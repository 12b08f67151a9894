// Rows of the cache as mma operands in registers, for the decode kernel: far rows by bit operations, near and current rows
// by plain loads. Everything an operand holds is times kFp4Unit.
//
// The order of the channels in a dot product is free, so each thread takes one contiguous piece of a key row (words
// t * W .. t * W + W - 1, t = lane % 4, of D / 8 words) and the queries are permuted to match. Value rows are shared out the
// same way over the 8 values of r = lane / 4, and pairs run along keys.
#pragma once

#include "ops/fp4_device.cuh"
#include "ops/kv_ops.h"

namespace kvfold {
namespace device {

// --- far rows --------------------------------------------------------------------------------------------------------

// A thread's share of a row: its words and the block's word of scales.
template <int W>
struct RowWords {
    uint32_t w[W];
    uint32_t scales;
};

// Where that share is in any row, for a thread that is the `t`-th of those which share a row.
template <int W>
struct RowPlace {
    int      scales;  // word of scales
    int      values;  // first word of values, from there
    uint32_t select;  // byte_perm() selector: [0, s, 0, s] with the share's first scale s

    __device__ __forceinline__ explicit RowPlace(int t)
        : scales(t * W / 8 * kBlockWords), values(1 + (t * W & 7)),
          select(0x0404u + 0x1010u * uint32_t((t * W / 2) & 3)) {}
};

// `scales`: that word of the row.
template <int W>
__device__ __forceinline__ RowWords<W> load_row(const uint32_t * scales, const RowPlace<W> & place) {
    const uint32_t * values = scales + place.values;
    RowWords<W>      k;
    k.scales = load_word(scales);
#pragma unroll
    for (int i = 0; i < W; ++i) {
        k.w[i] = load_word(values + i);
    }
    return k;
}

// A row of zeros when not `wanted`, and then nothing is read.
template <int W>
__device__ __forceinline__ RowWords<W> load_row_if(bool wanted, const uint32_t * scales, const RowPlace<W> & place) {
    RowWords<W> k{};
    if (wanted) {
        k = load_row<W>(scales, place);
    }
    return k;
}

// s[nb] += rows `lo` (mma rows 0..7) and `hi` (8..15; taken as zero without HI) times the queries.
template <int W, int NB, bool HI>
__device__ __forceinline__ void key_scores(float (&s)[NB][4], const RowWords<W> & lo, const RowWords<W> & hi,
                                           const RowPlace<W> & place, const uint32_t (&q)[NB][W][4]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
        const uint32_t select = place.select + 0x1010u * (w / 2);
        const uint32_t sl = scale_pair(lo.scales, select), sh = HI ? scale_pair(hi.scales, select) : 0u;
        const Pairs    l = fp4_pairs(lo.w[w]), h = HI ? fp4_pairs(hi.w[w]) : Pairs{};
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const uint32_t a0 = mul_half2(l.p[j], sl), a2 = mul_half2(l.p[j + 1], sl);
            const uint32_t a1 = HI ? mul_half2(h.p[j], sh) : 0u, a3 = HI ? mul_half2(h.p[j + 1], sh) : 0u;
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(s[nb], a0, a1, a2, a3, q[nb][w][j], q[nb][w][j + 1]);
            }
        }
    }
}

// Channel of the `index`-th (0 .. D/8 - 1) value accumulated by threads of quad r.
template <int D>
__device__ __forceinline__ int value_channel(int r, int index) {
    const int word = r * (D / 64) + index / 8, nibble = index % 8;
    return (word >> 1) * 16 + 4 * (word & 1) + (nibble >> 1) + 8 * (nibble & 1);
}

// O^T += V^T W^T for 16 keys: `value` are the thread's words of keys 2t, 2t+1, 2t+8, 2t+9, `b` the weights.
template <int W, int NB>
__device__ __forceinline__ void add_values(float (&o)[NB][4 * W][4], const RowWords<W> (&value)[4],
                                           const RowPlace<W> & place, const uint32_t (&b)[NB][2]) {
    // puts the share's first scale of one row into byte 1, of another into byte 3
    const uint32_t first = 0x4400u + 0x1111u * (place.select >> 4 & 3u);
#pragma unroll
    for (int w = 0; w < W; ++w) {
        uint32_t scale[2];  // of keys 2t, 2t+1 and 2t+8, 2t+9
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const uint32_t s = __byte_perm(value[2 * u].scales, value[2 * u + 1].scales, first + 0x1111u * (w / 2));
            scale[u]         = (s >> 1) & 0x7F807F80u;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // bytes 2h and 2h + 1 of the words
            const uint32_t select = h ? 0x7632 : 0x5410;
            const Pairs    x = fp4_pairs(__byte_perm(value[0].w[w], value[1].w[w], select)),
                        y    = fp4_pairs(__byte_perm(value[2].w[w], value[3].w[w], select));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int      lo = e ? 1 : 3, hi = e ? 0 : 2;
                const uint32_t a0 = mul_half2(x.p[lo], scale[0]), a1 = mul_half2(x.p[hi], scale[0]);
                const uint32_t a2 = mul_half2(y.p[lo], scale[1]), a3 = mul_half2(y.p[hi], scale[1]);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    mma_16x8x16(o[nb][4 * w + 2 * h + e], a0, a1, a2, a3, b[nb][0], b[nb][1]);
                }
            }
        }
    }
}

// --- near and current rows -------------------------------------------------------------------------------------------

// What a word of a far row would hold, of an exact row: halves of channels base .. base+3 (a, b) and base+8 .. base+11 (c, d).
struct Octet {
    uint32_t a, b, c, d;
};

// Where near and current rows (keys or values) are.
struct ExactRows {
    const half *  pool;
    const float * current;
    int64_t       current_stride;
    int           n_head_kv;
    int           head;
};

// Words first .. first + W - 1 of the row; zeros if `src` is neither near nor current.
template <int D, int W>
__device__ __forceinline__ void load_exact(Octet (&x)[W], const ExactRows & rows, int src, int first) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
        x[w] = {0, 0, 0, 0};
    }
    if (src >= 0) {
        const half * row = rows.pool + (size_t(src) * rows.n_head_kv + rows.head) * D;
#pragma unroll
        for (int w = 0; w < W; ++w) {
            const half * from = row + word_channel(first + w);
            const uint2  lo   = __ldg(reinterpret_cast<const uint2 *>(from)),
                        hi    = __ldg(reinterpret_cast<const uint2 *>(from + 8));
            x[w]              = {lo.x, lo.y, hi.x, hi.y};
        }
    } else if (src <= kSrcCurrentBase) {
        const float * row = rows.current + int64_t(kSrcCurrentBase - src) * rows.current_stride + rows.head * D;
#pragma unroll
        for (int w = 0; w < W; ++w) {
            const float * from = row + word_channel(first + w);
            x[w]               = {pack_half2(__ldg(from), __ldg(from + 1)), pack_half2(__ldg(from + 2), __ldg(from + 3)),
                                  pack_half2(__ldg(from + 8), __ldg(from + 9)), pack_half2(__ldg(from + 10), __ldg(from + 11))};
        }
    }
}

constexpr uint32_t kHalfUnit2 = 0x24002400u;  // kFp4Unit twice

// As key_scores().
template <int W, int NB>
__device__ __forceinline__ void exact_key_scores(float (&s)[NB][4], const Octet (&lo)[W], const Octet (&hi)[W],
                                                 const uint32_t (&q)[NB][W][4]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const uint32_t select = j ? 0x5410 : 0x7632;
            const uint32_t a0 = mul_half2(__byte_perm(lo[w].c, lo[w].d, select), kHalfUnit2),
                           a1 = mul_half2(__byte_perm(hi[w].c, hi[w].d, select), kHalfUnit2),
                           a2 = mul_half2(__byte_perm(lo[w].a, lo[w].b, select), kHalfUnit2),
                           a3 = mul_half2(__byte_perm(hi[w].a, hi[w].b, select), kHalfUnit2);
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(s[nb], a0, a1, a2, a3, q[nb][w][j], q[nb][w][j + 1]);
            }
        }
    }
}

// As add_values().
template <int W, int NB>
__device__ __forceinline__ void add_exact_values(float (&o)[NB][4 * W][4], const Octet (&k)[4][W],
                                                 const uint32_t (&b)[NB][2]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // channels base + i and base + 8 + i
            const uint32_t select = i & 1 ? 0x7632 : 0x5410;
            auto           pair   = [&](int u, bool high) {
                const Octet &  x = k[u][w], &y = k[u + 1][w];
                const uint32_t from = high ? (i < 2 ? x.c : x.d) : (i < 2 ? x.a : x.b);
                const uint32_t with = high ? (i < 2 ? y.c : y.d) : (i < 2 ? y.a : y.b);
                return mul_half2(__byte_perm(from, with, select), kHalfUnit2);
            };
            const uint32_t a0 = pair(0, false), a1 = pair(0, true), a2 = pair(2, false), a3 = pair(2, true);
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(o[nb][4 * w + i], a0, a1, a2, a3, b[nb][0], b[nb][1]);
            }
        }
    }
}

}  // namespace device
}  // namespace kvfold
