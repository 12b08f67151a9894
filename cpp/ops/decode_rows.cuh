// Rows of the cache as mma operands in registers, for the decode kernel: far rows by way of shared memory, near and current
// rows by plain loads. Everything an operand holds is times kFp4Unit.
//
// The order of the channels in a dot product is free, so each thread takes one contiguous piece of a key row (words
// t * W .. t * W + W - 1, t = lane % 4, of D / 8 words) and the queries are permuted to match. Value rows are shared out the
// same way over the 8 values of r = lane / 4, and pairs run along keys.
#pragma once

#include "ops/fp4_device.cuh"
#include "ops/kv_ops.h"
#include "ops/rotate_device.cuh"

namespace kvfold {
namespace device {

// --- far rows --------------------------------------------------------------------------------------------------------

// Far rows are 72 bytes long (head size 128) and lie far apart from one another. Read word by word by the threads that want
// them, every load would touch 8 rows and the first-level cache would be busy with tags; so a warp copies the rows of a tile to
// shared memory, in chunks of a ninth of a row, 3 rows at a time, without waiting. There, words that are read together are in
// different banks: the row stride sees to that, and odd t read the two halves of their piece in the other order.
template <int D>
struct FarRows {
    static constexpr int words  = D / kFp4BlockValues * kBlockWords;  // of a row
    static constexpr int stride = D == 128 ? 20 : words;              // in shared memory, words
    static constexpr int chunk  = words / 9;                          // words
};

// The far bits of group `g` of `p`, in the low bits, and which of them exist.
template <typename Params>
__device__ __forceinline__ uint32_t group_bits(const Params & p, int g, uint32_t & full) {
    const int m = 1 << p.group_shift, cell = g << p.group_shift;
    full = m == 32 ? ~0u : (1u << m) - 1;
    // n_kv may cut the last group off; the bits behind it are zero
    return cell < p.n_kv ? __ldg(p.far_bits + cell / 32) >> (cell % 32) & full : 0;
}

// This lane's part in copying rows.
template <int D>
struct FarCopy {
    int row;   // of three; 3: no part
    int word;  // in the row

    __device__ __forceinline__ explicit FarCopy(int lane) : row(lane / 9), word(lane % 9 * FarRows<D>::chunk) {}

    // Up to ROWS rows, the first at `from`, `step` words apart, to `to`; rows from n on are left out. The whole warp calls.
    template <int ROWS>
    __device__ __forceinline__ void copy(uint32_t * to, const uint32_t * from, int step, int n) const {
        to += row * FarRows<D>::stride + word;
        from += row * step + word;
        const ptrdiff_t step3 = 3 * ptrdiff_t(step);
        if (n >= ROWS) {  // as good as always, and then cheaper
            if (row < 3) {
#pragma unroll
                for (int i = 0; i + 2 < ROWS; i += 3, from += step3) {
                    copy_async<FarRows<D>::chunk>(to + i * FarRows<D>::stride, from);
                }
                if (row < ROWS % 3) {
                    copy_async<FarRows<D>::chunk>(to + ROWS / 3 * 3 * FarRows<D>::stride, from);
                }
            }
        } else if (row < 3) {
#pragma unroll 1
            for (int i = row; i < n; i += 3, from += step3) {
                copy_async<FarRows<D>::chunk>(to + (i - row) * FarRows<D>::stride, from);
            }
        }
    }
};

// The rows of a tile that are not next to each other: those of the cells of a few groups. `entry`: in lane i the number of group i.
template <int D>
struct GatheredRows {
    int group_shift;
    int entry;
    int n;  // rows; the rest of the tile is left out

    // The cell of row j, for a different j in every lane; the whole warp calls.
    __device__ __forceinline__ int cell(int j) const {
        const int group = __shfl_sync(~0u, entry, j >> group_shift & 31);
        return (group << group_shift) | (j & ((1 << group_shift) - 1));
    }

    // Rows of cells to `to`, of ROWS at most. `base`: the row of cell 0, `step` words apart.
    template <int ROWS>
    __device__ __forceinline__ void copy(const FarCopy<D> & copy, uint32_t * to, const uint32_t * base,
                                         int step) const {
        to += copy.row * FarRows<D>::stride + copy.word;
        base += copy.word;
        // Not unrolled: a warp has few tiles, so that fetching instructions takes longer than executing them.
#pragma unroll 1
        for (int i = 0; i < ROWS; i += 3) {
            const int j = i + copy.row, from = cell(j);
            if (copy.row < 3 && j < n && j < ROWS) {
                copy_async<FarRows<D>::chunk>(to + i * FarRows<D>::stride, base + int64_t(from) * step);
            }
        }
    }

    // Summaries of the tile's groups, likewise; `base`: that of group 0.
    __device__ __forceinline__ void copy_summaries(const FarCopy<D> & copy, uint32_t * to, const uint32_t * base,
                                                   int step, int n_sums) const {
        to += copy.row * FarRows<D>::stride + copy.word;
        base += copy.word;
#pragma unroll 1
        for (int i = 0; i < n_sums; i += 3) {
            const int j = i + copy.row, group = __shfl_sync(~0u, entry, j & 31);
            if (copy.row < 3 && j << group_shift < n) {
                copy_async<FarRows<D>::chunk>(to + i * FarRows<D>::stride, base + int64_t(group) * step);
            }
        }
    }
};

// Far rows with a scale for 32 or 64 channels lie in two places, values and scales (LayerMemory::far_k). In shared memory they get
// the form of all others: a warp copies the words of values one by one to where a row of blocks has them, and a word with a row's
// scales to the first block (where there are eight scales, two words to the first two); when they have arrived, spread() gives each
// block its four. Rows are what cell_of(row) says, -1 being none; every lane asks for another one, and all lanes ask.
template <int D>
struct CoarseCopy {
    static constexpr int words = D / 8;       // of the values of a row
    static constexpr int rows  = 32 / words;  // at a time

    int lane;
    int n_head_kv;
    int head;
    int scale_shift;  // log2 of the channels a scale

    __device__ __forceinline__ int n_scales() const { return D >> scale_shift; }
    // Of the row's scales in the word that begins with them or holds them.
    __device__ __forceinline__ uint32_t first_byte(int cell) const {
        return (uint32_t(cell) * n_head_kv + head) * n_scales() & 3u;
    }

    // ROWS rows at most.
    template <int ROWS, class CellOf>
    __device__ __forceinline__ void copy(uint32_t * to, const uint32_t * values, const uint8_t * scales,
                                         const CellOf & cell_of) const {
        constexpr int stride = FarRows<D>::stride;
        const int     row = lane / words, word = lane % words;
        uint32_t *    at = to + row * stride + word / 8 * kBlockWords + 1 + word % 8;
#pragma unroll 4
        for (int i = 0; i < ROWS; i += rows) {
            const int cell = cell_of(i + row);
            if (cell >= 0) {
                copy_async<1>(at + i * stride, values + (int64_t(cell) * n_head_kv + head) * words + word);
            }
        }
        const int cell = cell_of(lane % ROWS);
        if (lane < ROWS && cell >= 0) {
            const int64_t    first = (int64_t(cell) * n_head_kv + head) * n_scales();
            const uint32_t * from  = reinterpret_cast<const uint32_t *>(scales) + first / 4;
            copy_async<1>(to + lane * stride, from);
            if (D == 256 && n_scales() > 4) {
                copy_async<1>(to + lane * stride + kBlockWords, from + 1);
            }
        }
    }

    // Of ROWS rows whose copies have arrived.
    template <int ROWS, class CellOf>
    __device__ __forceinline__ void spread(uint32_t * to, const CellOf & cell_of) const {
        const int cell = cell_of(lane % ROWS);
        if (lane < ROWS) {
            uint32_t *     row = to + lane * FarRows<D>::stride;
            const uint32_t x = row[0], y = D == 256 ? row[kBlockWords] : x;
            const bool     half = scale_shift == 5;  // two scales a block
#pragma unroll
            for (int block = 0; block < D / kFp4BlockValues; ++block) {
                const uint32_t byte      = first_byte(cell) + (half ? 2 * block : block);
                row[block * kBlockWords] = __byte_perm(x, y, 0x1111u * byte + (half ? 0x1100u : 0u));
            }
        }
        __syncwarp();
    }
};

// Where a thread's share of a row is, for a thread that is the `part`-th of those which share it: two halves.
template <int W>
struct RowPlace {
    static constexpr int half = W == 1 ? 1 : W / 2;

    int      scales;     // word of scales
    int      values[2];  // first word of each half
    uint32_t select[2];  // byte_perm() selector for each half: [s, 0, 0, 0] with its first scale s

    // `swapped`: the second half comes first
    __device__ __forceinline__ RowPlace(int part, bool swapped) : scales(part * W / 8 * kBlockWords) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int word = (part * W & 7) + (swapped != (i == 1) ? half : 0);
            values[i]      = scales + 1 + word;
            select[i]      = scale_selector(word >> 1 & 3);
        }
    }
    // The w-th word of the share: where it is, and the selector of its scale.
    __device__ __forceinline__ int      at(int w) const { return values[w / half] + w % half; }
    __device__ __forceinline__ uint32_t scale(int w) const { return select[w / half] + w % half / 2; }
};

// Scores of a tile of 32 far rows and of 8 summaries, not yet added to each other: three sums that do not wait for each
// other's mma. `keys` and `sums`: the thread's row r in shared memory; it has rows r + 8 i.
template <int D, int NB>
__device__ __forceinline__ void tile_scores(float (&s)[2][NB][4], float (&sg)[NB][4], const uint32_t * keys,
                                            const uint32_t * sums, const RowPlace<D / 32> & place,
                                            const uint32_t (&q)[NB][D / 32][4]) {
    constexpr int row8 = 8 * FarRows<D>::stride;
    uint32_t      key_scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        key_scales[i] = keys[i * row8 + place.scales];
    }
    const uint32_t sum_scales = sums[place.scales];
#pragma unroll
    for (int w = 0; w < D / 32; ++w) {
        const uint32_t scale = scale_pair(sum_scales, place.scale(w));
        const Pairs    g     = fp4_pairs(sums[place.at(w)]);
        uint32_t       scales[4];
        Pairs          k[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scales[i] = scale_pair(key_scales[i], place.scale(w));
            k[i]      = fp4_pairs(keys[i * row8 + place.at(w)]);
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const uint32_t g0 = mul_half2(g.p[j], scale), g2 = mul_half2(g.p[j + 1], scale);
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(sg[nb], g0, 0u, g2, 0u, q[nb][w][j], q[nb][w][j + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t a0 = mul_half2(k[2 * i].p[j], scales[2 * i]),
                               a1 = mul_half2(k[2 * i + 1].p[j], scales[2 * i + 1]),
                               a2 = mul_half2(k[2 * i].p[j + 1], scales[2 * i]),
                               a3 = mul_half2(k[2 * i + 1].p[j + 1], scales[2 * i + 1]);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    mma_16x8x16(s[i][nb], a0, a1, a2, a3, q[nb][w][j], q[nb][w][j + 1]);
                }
            }
        }
    }
}

// Scores of 8 more summaries.
template <int D, int NB>
__device__ __forceinline__ void summary_scores(float (&sg)[NB][4], const uint32_t * sums,
                                               const RowPlace<D / 32> & place, const uint32_t (&q)[NB][D / 32][4]) {
    const uint32_t scales = sums[place.scales];
#pragma unroll
    for (int w = 0; w < D / 32; ++w) {
        const uint32_t scale = scale_pair(scales, place.scale(w));
        const Pairs    g     = fp4_pairs(sums[place.at(w)]);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(sg[nb], mul_half2(g.p[j], scale), 0u, mul_half2(g.p[j + 1], scale), 0u, q[nb][w][j],
                            q[nb][w][j + 1]);
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

// O^T += V^T W^T for 16 keys. `rows`: the first in shared memory; the thread has words of keys 2t, 2t+1, 2t+8, 2t+9. `b` are the
// weights; those of `silent` keys (bits) are zero, but their rows may decode to NaN.
template <int D, int NB>
__device__ __forceinline__ void add_values(float (&o)[NB][D / 16][4], const uint32_t * rows, uint32_t silent, int t,
                                           const RowPlace<D / 64> & place, const uint32_t (&b)[NB][2]) {
    constexpr int    stride = FarRows<D>::stride;
    const uint32_t * row[4] = {rows + 2 * t * stride, rows + (2 * t + 1) * stride, rows + (2 * t + 8) * stride,
                               rows + (2 * t + 9) * stride};
    uint32_t         scales[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        scales[u] = row[u][place.scales];
    }
    if (silent) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            scales[u] = silent >> (2 * t + (u & 1) + 8 * (u >> 1)) & 1u ? 0 : scales[u];
        }
    }
#pragma unroll
    for (int w = 0; w < D / 64; ++w) {
        uint32_t scale[2];  // of keys 2t, 2t+1 and 2t+8, 2t+9
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            // the word's scale of one row into byte 0, of the other into byte 2
            const uint32_t select = 0x4400u + 0x1111u * (place.scale(w) & 3u);
            scale[u]              = (__byte_perm(scales[2 * u], scales[2 * u + 1], select) & 0x00FF00FFu) * 128u;
        }
        uint32_t word[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            word[u] = row[u][place.at(w)];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // bytes 2h and 2h + 1 of the words
            const uint32_t select = h ? 0x7632 : 0x5410;
            const Pairs    x      = fp4_pairs(__byte_perm(word[0], word[1], select)),
                           y      = fp4_pairs(__byte_perm(word[2], word[3], select));
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

// --- queries ---------------------------------------------------------------------------------------------------------

// A query (channel lane + 32 i) to shared memory as halves, permuted like the keys: word w has its four pairs at 8 w. The whole
// warp calls.
template <int D>
__device__ __forceinline__ void store_query(half * row, const float (&x)[D / 32], int lane) {
    const int e = lane & 15, word = 2 * (lane >> 4) + (e >> 2 & 1), pair = (e & 1 ? 0 : 2) + (e & 8 ? 0 : 1);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        row[8 * (word + 4 * i) + 2 * pair + (e >> 1 & 1)] = __float2half_rn(x[i]);
    }
}

// The thread's operands of 8 * NB such queries, `stride` halves apart.
template <int KW, int NB>
__device__ __forceinline__ void load_queries(uint32_t (&q)[NB][KW][4], const half * rows, int stride, int lane) {
    const int t = lane & 3, r = lane >> 2;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int w = 0; w < KW; ++w) {
            const uint4 x = *reinterpret_cast<const uint4 *>(rows + (8 * nb + r) * stride +
                                                             8 * (t * KW + (KW > 1 ? w ^ (t & 1) * (KW / 2) : w)));
            q[nb][w][0] = x.x, q[nb][w][1] = x.y, q[nb][w][2] = x.z, q[nb][w][3] = x.w;
        }
    }
}

// --- near and current rows -------------------------------------------------------------------------------------------

// What a word of a far row would hold, of an exact row: halves of channels base .. base+3 (a, b) and base+8 .. base+11 (c, d).
struct Octet {
    uint32_t a, b, c, d;
};

// Where near and current rows (keys or values) of one head are, as halves and rotated.
template <int D>
struct ExactRows {
    const half * pool;
    const half * current;
    int64_t      pool_step;  // halves from one row to the next
    int64_t      current_step;

    __device__ __forceinline__ const half * row(int src) const {
        return src >= 0 ? pool + src * pool_step : current + (kSrcCurrentBase - src) * current_step;
    }
};

// The thread's words of the row, whose first is `first`; zeros if `src` is kSrcHidden. `swapped`: as in RowPlace.
template <int D, int W>
__device__ __forceinline__ void load_exact(Octet (&x)[W], const ExactRows<D> & rows, int src, int first, bool swapped) {
    const int swap = W > 1 && swapped ? W / 2 : 0;
#pragma unroll
    for (int w = 0; w < W; ++w) {
        x[w] = {0, 0, 0, 0};
    }
    if (src != kSrcHidden) {
        const half * row = rows.row(src);
#pragma unroll
        for (int w = 0; w < W; ++w) {
            const uint2 * from = reinterpret_cast<const uint2 *>(row + word_channel(first + (w ^ swap)));
            x[w]               = {from[0].x, from[0].y, from[2].x, from[2].y};
        }
    }
}

// The rows of the micro-batch, f32, one head's [n][D], rotated and as halves to `to` in shared memory. The whole warp calls.
template <int D>
__device__ __forceinline__ void rotate_current(half * to, const float * from, int64_t stride, int n, int rotation,
                                               int lane) {
#pragma unroll 1
    for (int row = 0; row < n; ++row, from += stride, to += D) {
        float x[D / 32];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            x[i] = from[lane + 32 * i];
        }
        rotate_row(x, rotation, lane);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            to[lane + 32 * i] = __float2half_rn(x[i]);
        }
    }
}

constexpr uint32_t kHalfUnit2 = 0x24002400u;  // kFp4Unit twice

// s[nb] += 16 exact rows, the thread's r and r + 8, times the queries.
template <int W, int NB>
__device__ __forceinline__ void exact_key_scores(float (&s)[NB][4], const Octet (&lo)[W], const Octet (&hi)[W],
                                                 const uint32_t (&q)[NB][W][4]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const uint32_t select = j ? 0x5410 : 0x7632;
            const uint32_t a0     = mul_half2(__byte_perm(lo[w].c, lo[w].d, select), kHalfUnit2),
                           a1     = mul_half2(__byte_perm(hi[w].c, hi[w].d, select), kHalfUnit2),
                           a2     = mul_half2(__byte_perm(lo[w].a, lo[w].b, select), kHalfUnit2),
                           a3     = mul_half2(__byte_perm(hi[w].a, hi[w].b, select), kHalfUnit2);
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(s[nb], a0, a1, a2, a3, q[nb][w][j], q[nb][w][j + 1]);
            }
        }
    }
}

// As add_values(), of exact rows.
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
