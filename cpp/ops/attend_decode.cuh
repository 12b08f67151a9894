// Attention of a few queries over many cells: one block works on one KV head, one share ("split") of the cells and all
// query heads of the group, on tensor cores, with the FP4 rows decoded in registers.
//
// Every warp walks over tiles of 32 cells with its own online softmax; the warps of a block, then the splits, are merged
// by their maxima and sums. Scores are computed transposed, keys in the 16-row dimension of the mma and the columns
// (query, head of the group) in its 8-column dimension, because there are few columns. Score tiles become the B operand of the
// value product by an 8x8 transpose.
//
// A tile without near or current rows takes the fast path: its summaries are an extra score tile whose rows are handed to the
// keys of their groups by shuffles, and the words of the next tile are on their way while this one is worked on, keys from
// the moment their registers are free, values likewise. The few other tiles come last and load every row for themselves.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/decode_rows.cuh"

namespace kvfold {
namespace device {

#ifndef KVFOLD_DECODE_WARPS
#define KVFOLD_DECODE_WARPS 12
#endif
constexpr int kDecodeTile = 32;  // cells a warp handles at a time

// Warps a block, which fills a multiprocessor: as many as have registers for two tiles in flight. `nb`: blocks of 8 columns.
__host__ __device__ constexpr int decode_warps(int dim, int nb) {
    return dim == 64 ? (nb == 1 ? 16 : 12) : dim == 128 && nb == 1 ? KVFOLD_DECODE_WARPS : 8;
}

template <int D, int NB>
struct DecodeShape {
    static constexpr int key_words   = D / 32;  // of a key row, a thread
    static constexpr int value_words = D / 64;  // of a value row, a thread
    static constexpr int row_words   = D / kFp4BlockValues * kBlockWords;
    static constexpr int columns     = 8 * NB;
    static constexpr int warps       = decode_warps(D, NB);
    static constexpr int threads     = 32 * warps;
    static constexpr int q_stride    = D + 8;   // halves of a query in shared memory; the padding spreads queries over banks
    static constexpr int acc_stride  = 64 + 4;  // floats of a column in shared memory, likewise
    static constexpr int q_bytes     = columns * q_stride * 2;
    static constexpr int merge_bytes = warps * 8 * acc_stride * 4;
    static constexpr int shared      = q_bytes > merge_bytes ? q_bytes : merge_bytes;
};

// --- softmax ---------------------------------------------------------------------------------------------------------

// Running maximum and sum of the two columns a thread sees in each block of 8; the sum is of its own rows only.
template <int NB>
struct Softmax {
    float m[NB][2];
    float l[NB][2];
};

// Raising the maximum costs shuffles and a pass over the accumulators, so it waits until a score exceeds it by this much;
// weights then reach 2^8, which neither f16 nor the f32 sums mind.
constexpr float kLazyMax = 8.0f;

template <int NB, int MT>
__device__ __forceinline__ void raise_max(Softmax<NB> & sm, float (&o)[NB][MT][4], const float (&top)[NB][2]) {
    bool over = false;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        over |= top[nb][0] > sm.m[nb][0] + kLazyMax || top[nb][1] > sm.m[nb][1] + kLazyMax;
    }
    if (!__any_sync(~0u, over)) {
        return;
    }
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float x = fmaxf(top[nb][c], sm.m[nb][c]);
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
            }
            const float f = exp2_fast(sm.m[nb][c] - x);
            sm.m[nb][c]   = x;
            sm.l[nb][c] *= f;
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                o[nb][mt][c] *= f;
                o[nb][mt][c + 2] *= f;
            }
        }
    }
}

// Scores of 16 keys -> weights as the B operand of the value product.
template <int NB>
__device__ __forceinline__ void weigh(Softmax<NB> & sm, const float (&s)[NB][4], uint32_t (&b)[NB][2]) {
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        const float p0 = exp2_fast(s[nb][0] - sm.m[nb][0]), p1 = exp2_fast(s[nb][1] - sm.m[nb][1]);
        const float p2 = exp2_fast(s[nb][2] - sm.m[nb][0]), p3 = exp2_fast(s[nb][3] - sm.m[nb][1]);
        sm.l[nb][0] += p0 + p2;
        sm.l[nb][1] += p1 + p3;
        b[nb][0] = transpose_8x8(pack_half2(p0, p1));
        b[nb][1] = transpose_8x8(pack_half2(p2, p3));
    }
}

// --- masks -----------------------------------------------------------------------------------------------------------

// Source of cell `cell` and what the first query says about it, on their way.
struct CellRequest {
    int      src;
    uint16_t mask;
};

__device__ __forceinline__ CellRequest request_cell(const AttendParams & p, int cell, int query0) {
    CellRequest c{kSrcHidden, 0};
    if (cell < p.n_kv) {
        c.src = __ldg(p.cell_src + cell);
        if (p.mask) {
            c.mask = __half_as_ushort(__ldg(p.mask + query0 * p.mask_stride + cell));
        }
    }
    return c;
}

// What the queries of a block say about the cells of a tile; cell `lane` of it belongs to this lane.
struct TileSight {
    int      src;     // kSrcHidden also for a cell that no query sees
    uint32_t hidden;  // bit of each such cell
    bool     plain;   // every cell is seen by every query, with nothing added to its scores
};

__device__ __forceinline__ TileSight tile_sight(const AttendParams & p, const CellRequest & c, int cell, int query0,
                                                int query1) {
    TileSight s;
    s.src      = c.src;
    bool plain = c.src != kSrcHidden;
    if (p.mask && plain) {
        bool seen = c.mask != 0xFC00u;
        plain     = (c.mask & 0x7FFFu) == 0;
        for (int i = query0 + 1; i <= query1; ++i) {
            const uint16_t m = __half_as_ushort(p.mask[i * p.mask_stride + cell]);
            plain &= (m & 0x7FFFu) == 0;
            seen |= m != 0xFC00u;
        }
        s.src = seen ? s.src : kSrcHidden;
    }
    s.hidden = __ballot_sync(~0u, s.src == kSrcHidden);
    s.plain  = __all_sync(~0u, plain);
    return s;
}

// A score after the mask, for a column (query, head of the group) of the KV head.
__device__ __forceinline__ float mask_score(const AttendParams & p, float score, int cell, bool hidden, int column) {
    if (hidden || column >= p.n_q * p.gqa) {
        return -INFINITY;
    }
    if (!p.mask) {
        return score;
    }
    const float m = __half2float(p.mask[(column / p.gqa) * p.mask_stride + cell]);
    return m == -INFINITY ? m : score + m * kLog2E;
}

// --- tiles of mixed rows ---------------------------------------------------------------------------------------------

// 16 cells of any kind from `cell0` on. `src` is the source of cell (cell0 & ~31) + lane, hidden beyond the end.
template <int D, int NB>
__device__ __forceinline__ void attend_mixed(const AttendParams & p, int head, int cell0, int src, int column0,
                                             const uint32_t (&q)[NB][D / 32][4], Softmax<NB> & sm,
                                             float (&o)[NB][D / 16][4]) {
    using S          = DecodeShape<D, NB>;
    constexpr int KW = S::key_words, VW = S::value_words;
    const int     lane = threadIdx.x & 31, t = lane & 3, r = lane >> 2, first = cell0 & 16;
    const bool    any_far   = __ballot_sync(~0u, src == kSrcFar) >> first & 0xFFFFu;
    const bool    any_exact = __ballot_sync(~0u, src != kSrcFar && src != kSrcHidden) >> first & 0xFFFFu;
    if (!any_far && !any_exact) {
        return;
    }
    const int row1 = p.n_head_kv * S::row_words, in_row = head * S::row_words;

    float s[NB][4] = {};
    int   key_src[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        key_src[u] = __shfl_sync(~0u, src, first + r + 8 * u);
    }
    {
        Octet exact[2][KW];
        if (any_exact) {
            const ExactRows rows{p.near_k, p.cur_k, p.cur_k_stride, p.n_head_kv, head};
            load_exact<D, KW>(exact[0], rows, key_src[0], t * KW);
            load_exact<D, KW>(exact[1], rows, key_src[1], t * KW);
        }
        if (any_far) {
            const RowPlace<KW> place(t);
            RowWords<KW>       key[2], sum[2];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const int  cell = cell0 + r + 8 * u;
                const bool far  = key_src[u] == kSrcFar;
                key[u] = load_row_if(far, p.far_k + size_t(cell) * row1 + in_row + place.scales, place);
                sum[u] = load_row_if(
                    far, p.summary + size_t(cell >> p.group_shift) * row1 + in_row + place.scales, place);
            }
            key_scores<KW, NB, true>(s, sum[0], sum[1], place, q);
            key_scores<KW, NB, true>(s, key[0], key[1], place, q);
        }
        if (any_exact) {
            exact_key_scores<KW, NB>(s, exact[0], exact[1], q);
        }
    }

    int          value_src[4];
    RowWords<VW> value[4];
    Octet        exact[4][VW];
    const RowPlace<VW> place(r);
#pragma unroll
    for (int u = 0; u < 4; ++u) {  // keys 2t, 2t+1, 2t+8, 2t+9
        const int in_half = 2 * t + (u & 1) + 8 * (u >> 1);
        value_src[u]      = __shfl_sync(~0u, src, first + in_half);
        if (any_far) {
            value[u] = load_row_if(value_src[u] == kSrcFar,
                                   p.far_v + size_t(cell0 + in_half) * row1 + in_row + place.scales, place);
        }
    }
    if (any_exact) {
        const ExactRows rows{p.near_v, p.cur_v, p.cur_v_stride, p.n_head_kv, head};
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            load_exact<D, VW>(exact[u], rows, value_src[u], r * VW);
        }
    }

    finish_scores(p, p.score_scale * kFp4Inverse, s);
    float top[NB][2];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            s[nb][c] = mask_score(p, s[nb][c], cell0 + r + 8 * (c >> 1), key_src[c >> 1] == kSrcHidden,
                                  column0 + 8 * nb + 2 * t + (c & 1));
        }
        top[nb][0] = fmaxf(s[nb][0], s[nb][2]);
        top[nb][1] = fmaxf(s[nb][1], s[nb][3]);
    }
    raise_max<NB, 4 * VW>(sm, o, top);
    uint32_t b[NB][2];
    weigh<NB>(sm, s, b);
    if (any_far) {
        add_values<VW, NB>(o, value, place, b);
    }
    if (any_exact) {
        add_exact_values<VW, NB>(o, exact, b);
    }
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// grid: x KV head, y split, z block of 8 * NB columns. Column c of a KV head is query c / gqa, head c % gqa of the group.
template <int D, int NB>
__global__ void __launch_bounds__(DecodeShape<D, NB>::threads, 1) attend_decode(const __grid_constant__ AttendParams p) {
    using S          = DecodeShape<D, NB>;
    constexpr int KW = S::key_words, VW = S::value_words, MT = 4 * VW;
    __shared__ __align__(16) uint8_t shared[S::shared];
    __shared__ float2                shared_ml[S::warps][8];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int head = blockIdx.x, column0 = blockIdx.z * S::columns;
    const int n_columns = p.n_q * p.gqa;
    const int query0 = column0 / p.gqa, query1 = min(column0 + S::columns - 1, n_columns - 1) / p.gqa;

    // Tiles are dealt out from the last, where near and current rows are, to the first. After the first round the order of
    // the warps is reversed, so that those with these slow tiles are not the ones which get one more.
    const int n_tiles = (p.n_kv + kDecodeTile - 1) / kDecodeTile, n_whole = p.n_kv / kDecodeTile;
    const int step = p.n_split * S::warps, me = blockIdx.y * S::warps + warp;

    const RowPlace<KW> key_place(t);
    const RowPlace<VW> value_place(r);
    const int          row1 = p.n_head_kv * S::row_words, row8 = 8 * row1;  // words
    const int          tile_words = kDecodeTile * row1, tile_sums = tile_words >> p.group_shift;
    const uint32_t *   key_base   = p.far_k + r * row1 + head * S::row_words + key_place.scales;
    const uint32_t *   value_base = p.far_v + 2 * t * row1 + head * S::row_words + value_place.scales;
    const uint32_t *   sum_base   = p.summary + min(r, (kDecodeTile >> p.group_shift) - 1) * row1 + head * S::row_words +
                                    key_place.scales;

    RowWords<KW> key[4], sum[2];
    RowWords<VW> value[2][4];
    auto         request_keys = [&](int tile) {
        const uint32_t * at_sum = sum_base + int64_t(tile) * tile_sums, *at = key_base + int64_t(tile) * tile_words;
        sum[0] = load_row<KW>(at_sum, key_place);
        if (p.group_shift == 1) {
            sum[1] = load_row<KW>(at_sum + row8, key_place);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            key[i] = load_row<KW>(at + i * row8, key_place);
        }
    };
    auto request_values = [&](int tile) {  // keys 2t, 2t+1, 2t+8, 2t+9 of each 16
        const uint32_t * at = value_base + int64_t(tile) * tile_words;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            value[i / 2][i % 2 * 2]     = load_row<VW>(at + i * row8, value_place);
            value[i / 2][i % 2 * 2 + 1] = load_row<VW>(at + i * row8 + row1, value_place);
        }
    };

    int         tile = n_tiles - 1 - me, after = tile - (2 * (step - me) - 1);
    CellRequest cell = request_cell(p, tile < 0 ? p.n_kv : tile * kDecodeTile + lane, query0);
    if (tile >= 0 && tile < n_whole) {
        request_keys(tile);
        request_values(tile);
    }

    // queries as halves, permuted like the keys: word w has its four pairs at 8 w
    half * q_rows = reinterpret_cast<half *>(shared);
    for (int i = threadIdx.x; i < S::columns * D; i += S::threads) {
        const int   j = i / D, d = i % D, column = column0 + j, e = d & 15;
        const int   word = 2 * (d >> 4) + (e >> 2 & 1), pair = (e & 1 ? 0 : 2) + (e & 8 ? 0 : 1);
        float       x = 0.0f;
        if (column < n_columns) {
            const int query = column / p.gqa, h = head * p.gqa + column - query * p.gqa;
            x = p.q[query * p.q_stride_query + h * p.q_stride_head + d] * p.q_scale;
        }
        q_rows[j * S::q_stride + 8 * word + 2 * pair + (e >> 1 & 1)] = __float2half_rn(x);
    }
    __syncthreads();
    uint32_t q[NB][KW][4];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int w = 0; w < KW; ++w) {
            const uint4 x = *reinterpret_cast<const uint4 *>(q_rows + (8 * nb + r) * S::q_stride + 8 * (t * KW + w));
            q[nb][w][0] = x.x, q[nb][w][1] = x.y, q[nb][w][2] = x.z, q[nb][w][3] = x.w;
        }
    }

    float       o[NB][MT][4] = {};
    Softmax<NB> sm;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        sm.m[nb][0] = sm.m[nb][1] = kNoScore;
        sm.l[nb][0] = sm.l[nb][1] = 0.0f;
    }

    // Tiles of far rows; the others are noted in `rest` by the number of the round (modulo 64) and come afterwards.
    const int second = after;
    uint64_t  rest   = 0;
    for (int round = 0; tile >= 0; tile = after, after -= step, ++round) {
        const int       cell0 = tile * kDecodeTile;
        const TileSight sight = tile_sight(p, cell, cell0 + lane, query0, query1);
        if (after >= 0) {
            cell = request_cell(p, after * kDecodeTile + lane, query0);
        }
        const bool mixed = tile >= n_whole || __any_sync(~0u, sight.src != kSrcFar && sight.src != kSrcHidden);
        if (mixed || sight.hidden == ~0u) {
            rest |= mixed ? uint64_t(1) << (round & 63) : 0;
            if (after >= 0) {
                request_keys(after);
                request_values(after);
            }
            continue;
        }

        float sg[NB][4] = {}, s[2][NB][4];
        if (p.group_shift == 1) {
            key_scores<KW, NB, true>(sg, sum[0], sum[1], key_place, q);
        } else {
            key_scores<KW, NB, false>(sg, sum[0], sum[0], key_place, q);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int  from0 = (((16 * i + r) >> p.group_shift) & 7) << 2 | t;
            const int  from1 = (((16 * i + r + 8) >> p.group_shift) & 7) << 2 | t;
            const bool upper = i == 1 && p.group_shift == 1;  // groups 8..15
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const float g0 = upper ? sg[nb][2] : sg[nb][0], g1 = upper ? sg[nb][3] : sg[nb][1];
                s[i][nb][0] = __shfl_sync(~0u, g0, from0);
                s[i][nb][1] = __shfl_sync(~0u, g1, from0);
                s[i][nb][2] = __shfl_sync(~0u, g0, from1);
                s[i][nb][3] = __shfl_sync(~0u, g1, from1);
            }
            key_scores<KW, NB, true>(s[i], key[2 * i], key[2 * i + 1], key_place, q);
        }
        if (after >= 0) {
            request_keys(after);
        }
        finish_scores(p, p.score_scale * kFp4Inverse, s[0]);
        finish_scores(p, p.score_scale * kFp4Inverse, s[1]);
        if (!sight.plain) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int j = 16 * i + r + 8 * (c >> 1);
                        s[i][nb][c] = mask_score(p, s[i][nb][c], cell0 + j, sight.hidden >> j & 1u,
                                                 column0 + 8 * nb + 2 * t + (c & 1));
                    }
                }
            }
        }
        float top[NB][2];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            top[nb][0] = fmaxf(fmaxf(s[0][nb][0], s[0][nb][2]), fmaxf(s[1][nb][0], s[1][nb][2]));
            top[nb][1] = fmaxf(fmaxf(s[0][nb][1], s[0][nb][3]), fmaxf(s[1][nb][1], s[1][nb][3]));
        }
        raise_max<NB, MT>(sm, o, top);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t b[NB][2];
            weigh<NB>(sm, s[i], b);
            if (sight.hidden) {  // a hidden row may decode to NaN, which a weight of zero would not silence
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    if (sight.hidden >> (16 * i + 2 * t + (u & 1) + 8 * (u >> 1)) & 1u) {
                        value[i][u].scales = 0;
                    }
                }
            }
            add_values<VW, NB>(o, value[i], value_place, b);
        }
        if (after >= 0) {
            request_values(after);
        }
    }
#pragma unroll 1
    for (int round = 0; rest != 0; ++round) {
        const int tile_again = round == 0 ? n_tiles - 1 - me : second - (round - 1) * step;
        if (tile_again < 0) {
            break;
        }
        if (!(rest >> (round & 63) & 1u)) {
            continue;
        }
        const int       cell0 = tile_again * kDecodeTile;
        const TileSight sight = tile_sight(p, request_cell(p, cell0 + lane, query0), cell0 + lane, query0, query1);
        if (tile_again < n_whole && !__any_sync(~0u, sight.src != kSrcFar && sight.src != kSrcHidden)) {
            continue;  // it shares its bit with the one that is meant
        }
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            attend_mixed<D, NB>(p, head, cell0 + 16 * i, sight.src, column0, q, sm, o);
        }
    }

    // merge the warps
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                sm.l[nb][c] += __shfl_xor_sync(~0u, sm.l[nb][c], d);
            }
        }
        float * acc = reinterpret_cast<float *>(shared);  // [warp][column][64 channels: index, r]
#pragma unroll
        for (int w = 0; w < VW; ++w) {
            __syncthreads();  // the queries, or the previous 64 channels, are done with the shared memory
            if (r == 0) {
                shared_ml[warp][2 * t]     = make_float2(sm.m[nb][0], sm.l[nb][0]);
                shared_ml[warp][2 * t + 1] = make_float2(sm.m[nb][1], sm.l[nb][1]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    acc[(warp * 8 + 2 * t + (c & 1)) * S::acc_stride + (2 * i + (c >> 1)) * 8 + r] = o[nb][4 * w + i][c];
                }
            }
            __syncthreads();
            for (int e = threadIdx.x; e < 8 * 64; e += S::threads) {
                const int j = e / 64, place = e % 64, d = value_channel<D>(place % 8, 8 * w + place / 8);
                const int column = column0 + 8 * nb + j;
                if (column >= n_columns) {
                    break;
                }
                float m = kNoScore;
#pragma unroll
                for (int i = 0; i < S::warps; ++i) {
                    m = fmaxf(m, shared_ml[i][j].x);
                }
                float total = 0.0f, l = 0.0f;
#pragma unroll
                for (int i = 0; i < S::warps; ++i) {
                    const float f = exp2_fast(shared_ml[i][j].x - m);
                    total += f * acc[(i * 8 + j) * S::acc_stride + place];
                    l += f * shared_ml[i][j].y;
                }
                const int query = column / p.gqa, h = head * p.gqa + column % p.gqa;
                const int row = query * p.n_head + h;
                if (p.n_split == 1) {
                    if (p.sinks) {
                        const float sink = p.sinks[h] * kLog2E, top = fmaxf(m, sink);
                        const float f = exp2_fast(m - top);
                        total *= f;
                        l = l * f + exp2_fast(sink - top);
                    }
                    p.out[size_t(row) * D + d] = l > 0.0f ? total * kFp4Inverse / l : 0.0f;
                } else {
                    const size_t at    = size_t(blockIdx.y) * p.n_q * p.n_head + row;
                    p.part[at * D + d] = total;
                    if (w == 0 && place == 0) {
                        p.part_ml[at] = make_float2(m, l);
                    }
                }
            }
        }
    }
}

}  // namespace device
}  // namespace kvfold
