// Attention of many queries: the usual online-softmax kernel on tensor cores, whose key and value tiles are decoded from FP4
// on the way to shared memory. Nothing of the cache is ever written out as f16.
//
// One block has 16 * WARPS columns (query, head of the group) of one KV head and walks over tiles of BC cells. While a tile is
// worked on, the words of the next are on their way to registers; they are decoded into the other shared buffer afterwards.
// Near and current rows take the same road without the prefetch, since there are few. Where there are few columns the cells
// are split over blocks and merged as in decoding.
//
// A decoded word is stored as it comes out of fp4_pairs(): position 8 w + 2 j, 2 j + 1 of a row holds pair j of word w, i.e.
// channels base + pair_channel(j) and two more. Queries are permuted to match, outputs on their way out.
#pragma once

#include "ops/attend_params.cuh"

namespace kvfold {
namespace device {

template <int D_, int BC_, int WARPS_>
struct PrefillShape {
    static constexpr int  D = D_, BC = BC_, WARPS = WARPS_;
    static constexpr int  rows = 16 * WARPS, threads = 32 * WARPS;
    static constexpr int  words        = D / 8;                 // of a row
    static constexpr int  cells        = BC * words / threads;  // neighbouring cells a thread decodes its word of
    static constexpr int  stride       = D + 8;  // halves of a shared row; the padding spreads rows over banks
    static constexpr int  stages       = D == 256 ? 1 : 2;
    static constexpr bool q_shared     = D == 256;  // queries in shared memory instead of registers
    static constexpr int  tile_halves  = BC * stride;
    static constexpr int  mask_chunks  = rows * BC / 8 / threads;  // of 8 mask values, a thread, with one head a group
    static constexpr int  shared_bytes = (stages * 2 * tile_halves + (q_shared ? rows * stride : 0)) * 2;
    static_assert(cells >= 2 && cells % 2 == 0, "summaries are read for pairs of cells");
};

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

// Four 8x8 matrices of halves; `row` is the address of this lane's row (lanes 8 i .. 8 i + 7 give matrix i).
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const half * row) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at));
    }
}

enum TileFlag : int { kTileSeen = 1, kTileMasked = 2 };

// grid: x block of columns, y KV head, z split of the cells. Dynamic shared memory: S::shared_bytes.
template <class S>
__global__ void __launch_bounds__(S::threads, 1) attend_prefill(const __grid_constant__ AttendParams p) {
    constexpr int     D = S::D, BC = S::BC, C = S::cells, NS = BC / 8, NO = D / 8, KS = D / 16;
    constexpr int     row_words = D / kFp4BlockValues * kBlockWords;
    extern __shared__ __align__(16) half shared_rows[];
    __shared__ int                       shared_src[2][BC];
    __shared__ int                       flags[3];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int head = blockIdx.y, row0 = blockIdx.x * S::rows, n_columns = p.n_q * p.gqa;
    const int n_tiles = (p.n_kv + BC - 1) / BC, per = (n_tiles + p.n_split - 1) / p.n_split;
    const int tile0 = blockIdx.z * per, tile1 = min(n_tiles, tile0 + per);

    // columns of this thread's two score rows
    int  query[2], q_head[2];
    bool exists[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = row0 + warp * 16 + r + 8 * i;
        exists[i]        = column < n_columns;
        query[i]         = exists[i] ? column / p.gqa : 0;
        q_head[i]        = head * p.gqa + (exists[i] ? column % p.gqa : 0);
    }
    half *   q_rows = shared_rows + S::stages * 2 * S::tile_halves;
    uint32_t q[S::q_shared ? 1 : KS][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float * from = p.q + query[i] * p.q_stride_query + q_head[i] * p.q_stride_head + pair_channel(t);
        const float   f    = exists[i] ? p.q_scale : 0.0f;
#pragma unroll
        for (int w = 0; w < S::words; ++w) {
            const float *  x    = from + word_channel(w);
            const uint32_t pair = pack_half2(x[0] * f, x[2] * f);
            if constexpr (S::q_shared) {
                *reinterpret_cast<uint32_t *>(q_rows + (warp * 16 + r + 8 * i) * S::stride + 8 * w + 2 * t) = pair;
            } else {
                q[w / 2][2 * (w & 1) + i] = pair;
            }
        }
    }

    // --- the next tile: from memory to registers, from there to shared memory ---
    const int      word = threadIdx.x % S::words, cell_first = threadIdx.x / S::words * C;
    const uint32_t scale_select = 0x4440u + uint32_t((word >> 1) & 3);
    const int      in_row = head * row_words + (word >> 3) * kBlockWords, value_at = 1 + (word & 7);
    const int      row_step = p.n_head_kv * row_words;
    int            src[C];
    uint32_t       key[C], key_scale[C], value[C], value_scale[C], sum[C / 2], sum_scale[C / 2];
    uint4          mask[S::mask_chunks];
    const int      query0 = row0 / p.gqa, n_queries = min(row0 + S::rows - 1, n_columns - 1) / p.gqa - query0 + 1;
    const bool     wide_mask =
        p.mask != nullptr && p.mask_stride % 8 == 0 && (reinterpret_cast<uintptr_t>(p.mask) & 15) == 0;

    auto request = [&](int tile) {
        const int cell0 = tile * BC + cell_first;
#pragma unroll
        for (int i = 0; i < C; ++i) {
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
            for (int i = 0; i < S::mask_chunks; ++i) {
                const int chunk = threadIdx.x + i * S::threads, row = chunk / (BC / 8),
                          at = tile * BC + chunk % (BC / 8) * 8;
                mask[i]      = make_uint4(0, 0, 0, 0);
                if (row < n_queries && at + 8 <= p.n_kv) {
                    mask[i] = *reinterpret_cast<const uint4 *>(p.mask + (query0 + row) * p.mask_stride + at);
                }
            }
        }
    };

    auto decode = [&](int tile, int stage, int flag_slot) {
        half * keys   = shared_rows + stage * 2 * S::tile_halves + cell_first * S::stride + 8 * word;
        half * values = keys + S::tile_halves;
        bool   hidden = false, seen = false;
#pragma unroll
        for (int i = 0; i < C; ++i) {
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
            store_pairs(keys + i * S::stride, k);
            store_pairs(values + i * S::stride, v);
            hidden |= src[i] == kSrcHidden;
            seen |= src[i] != kSrcHidden;
            if (word == 0) {
                shared_src[stage][cell_first + i] = src[i];
            }
        }
        int flag = hidden ? kTileMasked : 0;
        if (!wide_mask || (tile + 1) * BC > p.n_kv) {
            flag |= (p.mask ? kTileMasked : 0) | (seen ? kTileSeen : 0);
        } else {
#pragma unroll
            for (int i = 0; i < S::mask_chunks; ++i) {
                const int      row  = (threadIdx.x + i * S::threads) / (BC / 8);
                const uint32_t x[4] = {mask[i].x, mask[i].y, mask[i].z, mask[i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    flag |= (x[j] & 0x7FFF7FFFu) != 0 ? kTileMasked : 0;
                    flag |= row < n_queries && x[j] != 0xFC00FC00u ? kTileSeen : 0;
                }
            }
        }
        const bool any_masked = __any_sync(~0u, flag & kTileMasked), any_seen = __any_sync(~0u, flag & kTileSeen);
        if (lane == 0) {
            atomicOr(&flags[flag_slot], (any_masked ? kTileMasked : 0) | (any_seen ? kTileSeen : 0));
        }
    };

    float o[NO][4] = {}, m[2] = {kNoScore, kNoScore}, l[2] = {0.0f, 0.0f};

    auto attend = [&](int tile, int stage, bool masked) {
        const half * keys = shared_rows + stage * 2 * S::tile_halves, *values = keys + S::tile_halves;
        float        s[NS][4] = {};
        const half * key_row  = keys + ((lane >> 4) * 8 + (lane & 7)) * S::stride + ((lane >> 3) & 1) * 8;
#pragma unroll
        for (int ks = 0; ks < KS; ++ks) {
            uint32_t a[4];
            if constexpr (S::q_shared) {
                load_matrices<false>(a, q_rows + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * S::stride +
                                            16 * ks + (lane >> 4) * 8);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i] = q[ks][i];
                }
            }
#pragma unroll
            for (int n = 0; n < NS / 2; ++n) {
                uint32_t b[4];
                load_matrices<false>(b, key_row + 16 * n * S::stride + 16 * ks);
                mma_16x8x16(s[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16x8x16(s[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
        finish_scores(p, p.score_scale * kFp4Inverse, s);
        if (masked) {
#pragma unroll
            for (int n = 0; n < NS; ++n) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int cell = 8 * n + 2 * t + (c & 1);
                    if (shared_src[stage][cell] == kSrcHidden) {
                        s[n][c] = -INFINITY;
                    } else if (p.mask) {
                        const float x = __half2float(p.mask[query[c >> 1] * p.mask_stride + tile * BC + cell]);
                        s[n][c]       = x == -INFINITY ? x : s[n][c] + x * kLog2E;
                    }
                }
            }
        }
        float top[2] = {s[0][0], s[0][2]};
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            top[0] = fmaxf(top[0], fmaxf(s[n][0], s[n][1]));
            top[1] = fmaxf(top[1], fmaxf(s[n][2], s[n][3]));
        }
        // the maximum is raised only when a score exceeds it by 8: weights up to 2^8 do no harm
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
        const half * value_row = values + (((lane >> 3) & 1) * 8 + (lane & 7)) * S::stride + (lane >> 4) * 8;
#pragma unroll
        for (int k = 0; k < BC / 16; ++k) {
            const uint32_t a0 = pack_half2(s[2 * k][0], s[2 * k][1]), a1 = pack_half2(s[2 * k][2], s[2 * k][3]);
            const uint32_t a2 = pack_half2(s[2 * k + 1][0], s[2 * k + 1][1]),
                           a3 = pack_half2(s[2 * k + 1][2], s[2 * k + 1][3]);
#pragma unroll
            for (int n = 0; n < NO / 2; ++n) {
                uint32_t b[4];
                load_matrices<true>(b, value_row + 16 * k * S::stride + 16 * n);
                mma_16x8x16(o[2 * n], a0, a1, a2, a3, b[0], b[1]);
                mma_16x8x16(o[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
    };

    if (threadIdx.x < 3) {
        flags[threadIdx.x] = 0;
    }
    if (tile0 < tile1) {
        request(tile0);
    }
    __syncthreads();
    if (tile0 < tile1) {
        decode(tile0, 0, 0);
        request(min(tile0 + 1, tile1 - 1));
    }
    __syncthreads();
    // Between two barriers every warp attends one tile and decodes the next. Half of the warps, two of them on every scheduler
    // of the multiprocessor, decode first, so that the tensor cores and the other pipelines are busy at the same time.
    // Flags rotate over three slots: the one of this tile is read, the next is being set, the one after is cleared.
    const bool decode_first = S::stages == 2 && (warp & 4) != 0;
    for (int tile = tile0, slot = 0; tile < tile1; ++tile) {
        const int stage = S::stages == 2 ? (tile - tile0) & 1 : 0, next_slot = slot == 2 ? 0 : slot + 1;
        const int flag = flags[slot];
        if (threadIdx.x == 0) {
            flags[next_slot == 2 ? 0 : next_slot + 1] = 0;
        }
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            if ((turn == 0) != decode_first) {
                if (flag & kTileSeen) {
                    attend(tile, stage, flag & kTileMasked);
                }
            } else {
                if (S::stages == 1) {
                    __syncthreads();
                }
                if (tile + 1 < tile1) {
                    decode(tile + 1, S::stages == 2 ? stage ^ 1 : 0, next_slot);
                    request(min(tile + 2, tile1 - 1));
                }
            }
        }
        __syncthreads();
        slot = next_slot;
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        if (!exists[i]) {
            continue;
        }
        const size_t row = size_t(query[i]) * p.n_head + q_head[i];
        float *      to;
        float        f = 1.0f;
        if (p.n_split == 1) {
            to = p.out + row * D;
            if (p.sinks) {
                const float sink = p.sinks[q_head[i]] * kLog2E, top = fmaxf(m[i], sink);
                f    = exp2_fast(m[i] - top);
                l[i] = l[i] * f + exp2_fast(sink - top);
            }
            f = l[i] > 0.0f ? f * kFp4Inverse / l[i] : 0.0f;
        } else {
            const size_t at = size_t(blockIdx.z) * p.n_q * p.n_head + row;
            to              = p.part + at * D;
            if (t == 0) {
                p.part_ml[at] = make_float2(m[i], l[i]);
            }
        }
        to += pair_channel(t);
#pragma unroll
        for (int n = 0; n < NO; ++n) {
            to[word_channel(n)]     = o[n][2 * i] * f;
            to[word_channel(n) + 2] = o[n][2 * i + 1] * f;
        }
    }
}

}  // namespace device
}  // namespace kvfold
