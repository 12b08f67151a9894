// What the prefill kernels have in common: tiles of cells on their way from memory to shared memory, decoded to halves, and
// the online softmax between the two matrix products.
//
// A decoded word is stored as it comes out of fp4_pairs(): position 8 w + 2 j, 2 j + 1 of a row holds pair j of word w, i.e.
// channels base + pair_channel(j) and two more. Queries are permuted to match, outputs on their way out.
#pragma once

#include "ops/attend_params.cuh"

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

__device__ __forceinline__ uint32_t add_half2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// A word's worth of a near or current row, times kFp4Unit; zeros for a hidden one.
__device__ __forceinline__ Pairs exact_word(const half * pool, const float * cur, int64_t cur_row, int src,
                                            int n_head_kv, int head, int dim, int word) {
    Pairs r{};
    if (src >= 0) {
        const half *   from = pool + (size_t(src) * n_head_kv + head) * dim + word_channel(word);
        const uint2    x = *reinterpret_cast<const uint2 *>(from), y = *reinterpret_cast<const uint2 *>(from + 8);
        const uint32_t unit = 0x24002400u;  // 2^-6
        r.p[0]              = mul_half2(__byte_perm(y.x, y.y, 0x7632), unit);
        r.p[1]              = mul_half2(__byte_perm(x.x, x.y, 0x7632), unit);
        r.p[2]              = mul_half2(__byte_perm(y.x, y.y, 0x5410), unit);
        r.p[3]              = mul_half2(__byte_perm(x.x, x.y, 0x5410), unit);
    } else if (src <= kSrcCurrentBase) {
        const float * from = cur + int64_t(kSrcCurrentBase - src) * cur_row + head * dim + word_channel(word);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            r.p[j] = pack_half2(from[pair_channel(j)] * kFp4Unit, from[pair_channel(j) + 2] * kFp4Unit);
        }
    }
    return r;
}

__device__ __forceinline__ void store_pairs(half * to, const Pairs & x) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(x.p[0], x.p[1], x.p[2], x.p[3]);
}

// What is known of a tile before it is attended.
enum TileFlag : int {
    kTileSeen   = 1,  // some query sees some cell of it
    kTileMasked = 2,  // not every query sees every cell
};

// One thread's part in bringing tiles of BC cells to shared memory: one word of CELLS neighbouring rows, keys and values.
// THREADS of them share a tile. The block has ROWS columns, from `row0` on, whose masks are looked through on the way.
template <int D, int BC, int ROWS, int THREADS>
struct TileLoader {
    static constexpr int words       = D / 8;                    // of a row
    static constexpr int cells       = BC * words / THREADS;     // of a thread
    static constexpr int mask_chunks = ROWS * BC / 8 / THREADS;  // of 8 mask values, a thread, with one head a group
    static constexpr int row_words   = D / kFp4BlockValues * kBlockWords;
    static_assert(cells >= 2 && cells % 2 == 0, "summaries are read for pairs of cells");

    const AttendParams & p;
    int                  thread;
    int                  head;
    int                  word;
    int                  cell_first;  // of the tile
    uint32_t             scale_select;
    int                  in_row;  // words from the row of KV head 0 to this head's block
    int                  value_at;
    int                  row_step;
    int                  query0;  // queries of this block
    int                  n_queries;
    bool                 wide_mask;
    int                  src[cells];
    uint32_t             key[cells], key_scale[cells], value[cells], value_scale[cells];
    uint32_t             sum[cells / 2], sum_scale[cells / 2];
    uint4                mask[mask_chunks];

    __device__ __forceinline__ TileLoader(const AttendParams & params, int kv_head, int row0, int thread_of_tile)
        : p(params), thread(thread_of_tile), head(kv_head), word(thread_of_tile % words),
          cell_first(thread_of_tile / words * cells), scale_select(0x4440u + uint32_t((word >> 1) & 3)),
          in_row(kv_head * row_words + (word >> 3) * kBlockWords), value_at(1 + (word & 7)),
          row_step(params.n_head_kv * row_words), query0(row0 / params.gqa),
          n_queries(min(row0 + ROWS - 1, params.n_q * params.gqa - 1) / params.gqa - query0 + 1),
          wide_mask(params.mask != nullptr && params.mask_stride % 8 == 0 &&
                    (reinterpret_cast<uintptr_t>(params.mask) & 15) == 0) {}

    // Starts loading a tile into this thread's registers.
    __device__ __forceinline__ void request(int tile) {
        const int cell0 = tile * BC + cell_first;
#pragma unroll
        for (int i = 0; i < cells; ++i) {
            const int        cell = min(cell0 + i, p.n_kv - 1);
            const uint32_t * k    = p.far_k + size_t(cell) * row_step + in_row;
            const uint32_t * v    = p.far_v + size_t(cell) * row_step + in_row;
            src[i]                = cell0 + i < p.n_kv ? p.cell_src[cell] : kSrcHidden;
            key_scale[i]          = load_word(k);
            key[i]                = load_word(k + value_at);
            value_scale[i]        = load_word(v);
            value[i]              = load_word(v + value_at);
            if (i % 2 == 0) {
                const uint32_t * g = p.summary + size_t(cell >> p.group_shift) * row_step + in_row;
                sum_scale[i / 2]   = load_word(g);
                sum[i / 2]         = load_word(g + value_at);
            }
        }
        if (wide_mask) {
#pragma unroll
            for (int i = 0; i < mask_chunks; ++i) {
                const int chunk = thread + i * THREADS, row = chunk / (BC / 8), at = tile * BC + chunk % (BC / 8) * 8;
                mask[i] = make_uint4(0, 0, 0, 0);
                if (row < n_queries && at + 8 <= p.n_kv) {
                    mask[i] = *reinterpret_cast<const uint4 *>(p.mask + (query0 + row) * p.mask_stride + at);
                }
            }
        }
    }

    // Decodes the tile that was requested: store(cell, word, keys, values) for each of this thread's cells, and the source of every
    // cell to tile_src. Returns what this thread knows of TileFlag.
    template <class Store>
    __device__ __forceinline__ int decode(int tile, int * tile_src, const Store & store) const {
        bool hidden = false, seen = false;
#pragma unroll
        for (int i = 0; i < cells; ++i) {
            Pairs k, v;
            if (src[i] == kSrcFar) {
                const Pairs s = decode_word(sum[i / 2], scale_pair(sum_scale[i / 2], scale_select));
                k             = decode_word(key[i], scale_pair(key_scale[i], scale_select));
                v             = decode_word(value[i], scale_pair(value_scale[i], scale_select));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    k.p[j] = add_half2(s.p[j], k.p[j]);
                }
            } else {
                k = exact_word(p.near_k, p.cur_k, p.cur_k_stride, src[i], p.n_head_kv, head, D, word);
                v = exact_word(p.near_v, p.cur_v, p.cur_v_stride, src[i], p.n_head_kv, head, D, word);
            }
            store(cell_first + i, word, k, v);
            hidden |= src[i] == kSrcHidden;
            seen |= src[i] != kSrcHidden;
            if (word == 0) {
                tile_src[cell_first + i] = src[i];
            }
        }
        int flag = hidden ? kTileMasked : 0;
        if (!wide_mask || (tile + 1) * BC > p.n_kv) {
            return flag | (p.mask ? kTileMasked : 0) | (seen ? kTileSeen : 0);
        }
#pragma unroll
        for (int i = 0; i < mask_chunks; ++i) {
            const int      row  = (thread + i * THREADS) / (BC / 8);
            const uint32_t x[4] = {mask[i].x, mask[i].y, mask[i].z, mask[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                flag |= (x[j] & 0x7FFF7FFFu) != 0 ? kTileMasked : 0;
                flag |= row < n_queries && x[j] != 0xFC00FC00u ? kTileSeen : 0;
            }
        }
        return flag;
    }
};

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

    // Hides what the mask hides in scores of the cells from `cell0` on, and adds what it adds. Scores are in fragments of 8 cells.
    template <int NS>
    __device__ __forceinline__ void mask_scores(const AttendParams & p, int lane, int cell0, const int * tile_src,
                                                float (&s)[NS][4]) const {
#pragma unroll
        for (int n = 0; n < NS; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int cell = 8 * n + 2 * (lane & 3) + (c & 1);
                if (tile_src[cell] == kSrcHidden) {
                    s[n][c] = -INFINITY;
                } else if (p.mask) {
                    const float x = __half2float(p.mask[query[c >> 1] * p.mask_stride + cell0 + cell]);
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
                float x       = fmaxf(top[i], m[i]);
                x             = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x             = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
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
            l[i] += __shfl_xor_sync(~0u, l[i], 1);
            l[i] += __shfl_xor_sync(~0u, l[i], 2);
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
