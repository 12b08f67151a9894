// What the prefill kernels have in common: which tiles of cells there are to attend, words of rows as halves, and the online
// softmax between the two matrix products.
//
// A decoded word is stored as it comes out of fp4_pairs(): position 8 w + 2 j, 2 j + 1 of a row holds pair j of word w, i.e.
// channels base + pair_channel(j) and two more. Queries are permuted to match, outputs on their way out.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/warp.cuh"

namespace kvfold {
namespace device {

__device__ __forceinline__ Pairs decode_word(uint32_t word, uint32_t scale) {
    Pairs r = fp4_pairs(word);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        r.p[j] = mul_half2(r.p[j], scale);
    }
    return r;
}

__device__ __forceinline__ Pairs add_pairs(const Pairs & a, const Pairs & b) {
    Pairs r;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        asm("add.f16x2 %0, %1, %2;" : "=r"(r.p[j]) : "r"(a.p[j]), "r"(b.p[j]));
    }
    return r;
}

// A word's worth of a near or current row, as it lies there.
struct ExactWord {
    uint2 x, y;  // channels base .. base + 3, base + 8 .. base + 11

    // Zeros for a hidden row. Current rows have been made halves (AttendParams::cur_half_k).
    __device__ __forceinline__ void load(const AttendParams & p, const half * pool, const half * current, int src,
                                         int head, int dim, int word) {
        const bool   near = src >= 0;
        const size_t row =
            near ? size_t(src) * p.n_head_kv + head : size_t(kSrcCurrentBase - src) * p.n_heads + (head - p.head0);
        const half * from = (near ? pool : current) + row * dim + word_channel(word);
        const bool   seen = near || src <= kSrcCurrentBase;
        x                 = seen ? *reinterpret_cast<const uint2 *>(from) : make_uint2(0, 0);
        y                 = seen ? *reinterpret_cast<const uint2 *>(from + 8) : make_uint2(0, 0);
    }

    // Times kFp4Unit, as decoded words are.
    __device__ __forceinline__ Pairs pairs() const {
        const uint32_t unit = 0x24002400u;  // 2^-6
        return {{mul_half2(__byte_perm(y.x, y.y, 0x7632), unit), mul_half2(__byte_perm(x.x, x.y, 0x7632), unit),
                 mul_half2(__byte_perm(y.x, y.y, 0x5410), unit), mul_half2(__byte_perm(x.x, x.y, 0x5410), unit)}};
    }
};

__device__ __forceinline__ void store_pairs(half * to, const Pairs & x) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(x.p[0], x.p[1], x.p[2], x.p[3]);
}

// What is known of a tile before it is attended.
enum TileFlag : uint8_t {
    kTileSeen   = 1,  // some query sees some cell of it
    kTileMasked = 2,  // not every query sees every cell alike
    kTileExact  = 4,  // not all of its rows are far
};

// The first tile from `tile` on that is seen, or `end`. `flags`: of a block of columns.
__device__ __forceinline__ int next_seen(const uint8_t * flags, int tile, int end) {
    while (tile < end && !(flags[tile] & kTileSeen)) {
        ++tile;
    }
    return tile;
}

constexpr int kFlagWarps = 8;

// Flags of all tiles for every block of ROWS columns. grid: x tiles by kFlagWarps, y block of columns.
template <int BC, int ROWS>
__global__ void __launch_bounds__(32 * kFlagWarps)
    flag_tiles(const __grid_constant__ AttendParams p, uint8_t * tile_flags, int n_tiles) {
    const int lane = threadIdx.x & 31, tile = blockIdx.x * kFlagWarps + (threadIdx.x >> 5), cell0 = tile * BC;
    if (tile >= n_tiles) {
        return;
    }
    bool hidden = false, seen = false, exact = false;
    for (int i = lane; i < BC; i += 32) {
        const int src = cell0 + i < p.n_kv ? p.cell_src[cell0 + i] : kSrcHidden;
        hidden |= src == kSrcHidden;
        seen |= src != kSrcHidden;
        exact |= src != kSrcFar;
    }
    bool masked = p.mask != nullptr;
    if (masked && cell0 + BC <= p.n_kv && p.mask_stride % 8 == 0 && (reinterpret_cast<uintptr_t>(p.mask) & 15) == 0) {
        const int    row0 = blockIdx.y * ROWS, query0 = row0 / p.gqa;
        const int    n_queries = min(row0 + ROWS - 1, p.n_q * p.gqa - 1) / p.gqa - query0 + 1;
        const half * from      = p.mask + query0 * p.mask_stride + cell0;
        masked = seen = false;
        for (int i = lane; i < n_queries * (BC / 8); i += 32) {
            const uint4    m = *reinterpret_cast<const uint4 *>(from + i / (BC / 8) * p.mask_stride + i % (BC / 8) * 8);
            const uint32_t x[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                masked |= (x[j] & 0x7FFF7FFFu) != 0;
                seen |= x[j] != 0xFC00FC00u;  // not both minus infinity
            }
        }
    }
    const int flags = (__any_sync(~0u, hidden || masked) ? kTileMasked : 0) | (__any_sync(~0u, seen) ? kTileSeen : 0) |
                      (__any_sync(~0u, exact) ? kTileExact : 0);
    if (lane == 0) {
        tile_flags[blockIdx.y * n_tiles + tile] = flags;
    }
}

// The columns (query, head of the group) of a thread's two score rows: rows r and r + 8 of a fragment, r = lane / 4.
struct ScoreRows {
    int  query[2];
    int  q_head[2];
    bool exists[2];

    // `first`: the column of row 0 of the fragment.
    __device__ __forceinline__ ScoreRows(const AttendParams & p, int head, int first, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = first + (lane >> 2) + 8 * i;
            exists[i]        = column < p.n_q * p.gqa;
            query[i]         = exists[i] ? column / p.gqa : 0;
            q_head[i]        = head * p.gqa + (exists[i] ? column % p.gqa : 0);
        }
    }

    // put(row of two, word, pair): this lane's pair of every word of its queries, scaled.
    template <int D, class Put>
    __device__ __forceinline__ void load_queries(const AttendParams & p, int lane, const Put & put) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float * from =
                p.q + query[i] * p.q_stride_query + q_head[i] * p.q_stride_head + pair_channel(lane & 3);
            const float f = exists[i] ? p.q_scale : 0.0f;
#pragma unroll
            for (int w = 0; w < D / 8; ++w) {
                const float * x = from + word_channel(w);
                put(i, w, pack_half2(x[0] * f, x[2] * f));
            }
        }
    }

    // Hides what is hidden in scores of the cells from `cell0` on, and adds what the mask adds. Scores are in fragments of 8 cells.
    template <int NS>
    __device__ __forceinline__ void mask_scores(const AttendParams & p, int lane, int cell0, float (&s)[NS][4]) const {
#pragma unroll
        for (int n = 0; n < NS; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int cell = cell0 + 8 * n + 2 * (lane & 3) + (c & 1);
                if (cell >= p.n_kv || p.cell_src[cell] == kSrcHidden) {
                    s[n][c] = -INFINITY;
                } else if (p.mask) {
                    const float x = __half2float(p.mask[query[c >> 1] * p.mask_stride + cell]);
                    s[n][c]       = x == -INFINITY ? x : s[n][c] + x * kLog2E;
                }
            }
        }
    }
};

// Online softmax over a thread's two score rows: the sums of weighted values `o` (fragments of 8 channels), the maximum
// (base 2) and the sum of the weights, this lane's share of it.
template <int D>
struct OnlineSoftmax {
    static constexpr int NO = D / 8;

    float o[NO][4] = {};
    float m[2]     = {kNoScore, kNoScore};
    float l[2]     = {0.0f, 0.0f};

    // Scores become weights. The maximum is raised only when a score exceeds it by 8: weights up to 2^8 do no harm.
    template <int NS>
    __device__ __forceinline__ void weigh(float (&s)[NS][4]) {
        float top[2] = {s[0][0], s[0][2]};
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            top[0] = fmaxf(top[0], fmaxf(s[n][0], s[n][1]));
            top[1] = fmaxf(top[1], fmaxf(s[n][2], s[n][3]));
        }
        if (__any_sync(~0u, top[0] > m[0] + 8.0f || top[1] > m[1] + 8.0f)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float x = warp_reduce<1, 4>(fmaxf(top[i], m[i]), Max{});
                const float f = exp2_fast(m[i] - x);
                m[i]          = x;
                l[i] *= f;
#pragma unroll
                for (int n = 0; n < NO; ++n) {
                    o[n][2 * i] *= f;
                    o[n][2 * i + 1] *= f;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NS; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                s[n][c] = exp2_fast(s[n][c] - m[c >> 1]);
                l[c >> 1] += s[n][c];
            }
        }
    }

    // The result, or this split's part of it.
    __device__ __forceinline__ void write(const AttendParams & p, const ScoreRows & rows, int lane, int split) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            l[i] = warp_reduce<1, 4>(l[i], Sum{});
            if (!rows.exists[i]) {
                continue;
            }
            const size_t row = size_t(rows.query[i]) * p.n_head + rows.q_head[i];
            float *      to;
            float        f = 1.0f;
            if (p.n_split == 1) {
                to = p.out + row * D;
                if (p.sinks) {
                    const float sink = p.sinks[rows.q_head[i]] * kLog2E, top = fmaxf(m[i], sink);
                    f    = exp2_fast(m[i] - top);
                    l[i] = l[i] * f + exp2_fast(sink - top);
                }
                f = l[i] > 0.0f ? f * kFp4Inverse / l[i] : 0.0f;
            } else {
                const size_t at = size_t(split) * p.n_q * p.n_head + row;
                to              = p.part + at * D;
                if ((lane & 3) == 0) {
                    p.part_ml[at] = make_float2(m[i], l[i]);
                }
            }
            to += pair_channel(lane & 3);
#pragma unroll
            for (int n = 0; n < NO; ++n) {
                to[word_channel(n)]     = o[n][2 * i] * f;
                to[word_channel(n) + 2] = o[n][2 * i + 1] * f;
            }
        }
    }
};

}  // namespace device
}  // namespace kvfold
