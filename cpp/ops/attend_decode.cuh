// Attention of a few queries over many cells: one block works on one KV head, one share ("split") of the cells and all
// query heads of the group, on tensor cores, with the FP4 rows decoded in registers.
//
// Every warp walks over tiles of 32 cells with its own online softmax; the warps of a block, then the splits, are merged
// by their maxima and sums. Scores are computed transposed, keys in the 16-row dimension of the mma and the columns
// (query, head of the group) in its 8-column dimension, because there are few columns. Score tiles become the B operand of the
// value product by an 8x8 transpose.
//
// First come the far rows of a warp's tiles. Summaries are an extra score tile whose rows are handed to the keys of their groups
// by shuffles. Rows are copied to shared memory ahead of time: the keys of the next tile as soon as those of this one are
// done with, the values likewise. Then the warps of a block share its near and current rows, 16 cells at a time.
#pragma once

#include "ops/attend_merge.cuh"
#include "ops/attend_params.cuh"
#include "ops/decode_rows.cuh"

namespace kvfold {
namespace device {

#ifndef KVFOLD_DECODE_WARPS
#define KVFOLD_DECODE_WARPS 12
#endif
constexpr int kDecodeTile = 32;  // cells a warp handles at a time

// Warps a block, which fills a multiprocessor: as many as there are registers, or shared memory, for. `nb`: blocks of 8 columns;
// `small`: with 64 KiB of shared memory.
__host__ __device__ constexpr int decode_warps(int dim, int nb, bool small) {
    return dim == 64             ? (nb == 1 ? 16 : 12)
           : dim == 256          ? (small ? 4 : 8)
           : (nb == 1 && !small) ? KVFOLD_DECODE_WARPS
                                 : 8;
}

template <int D, int NB, int WARPS>
struct DecodeShape {
    static constexpr int key_words   = D / 32;  // of a key row, a thread
    static constexpr int value_words = D / 64;  // of a value row, a thread
    static constexpr int row_words   = D / kFp4BlockValues * kBlockWords;
    static constexpr int columns     = 8 * NB;
    static constexpr int warps       = WARPS;
    static constexpr int threads     = 32 * warps;
    // are there registers to load keys and values of near rows together?
    static constexpr bool early_values = warps <= 12;
    static constexpr int  q_stride =
        D + 8;  // halves of a query in shared memory; the padding spreads queries over banks
    static constexpr int acc_stride = 64 + 4;  // floats of a column in shared memory, likewise
    static constexpr int q_words    = columns * q_stride / 2;
    static constexpr int far_stride = FarRows<D>::stride;

    // Dynamic shared memory, words: the queries, then each warp's tile (keys, values, summaries), or what merging needs.
    static constexpr int tile_words(int group) { return (2 * kDecodeTile + kDecodeTile / group) * far_stride; }
    static constexpr int merge_words = warps * 8 * acc_stride;
    static constexpr int shared_bytes(int group) {
        return 4 * (q_words + (warps * tile_words(group) > merge_words ? warps * tile_words(group) : merge_words));
    }
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
    int      src;         // kSrcHidden also for a cell that no query sees
    uint32_t far, exact;  // bit of each cell whose row is far, and near or current
    bool     plain;       // every cell is far and seen by every query, with nothing added to its scores
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
    s.far   = __ballot_sync(~0u, s.src == kSrcFar);
    s.exact = __ballot_sync(~0u, s.src != kSrcFar && s.src != kSrcHidden);
    s.plain = __all_sync(~0u, plain && s.src == kSrcFar);
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
    const float m = __half2float(p.mask[column_query(p, column) * p.mask_stride + cell]);
    return m == -INFINITY ? m : score + m * kLog2E;
}

// --- near and current rows -------------------------------------------------------------------------------------------

// Those of the 16 cells from `cell0` on. `src` is the source of cell (cell0 & ~31) + lane.
template <int D, int NB, int WARPS>
__device__ __forceinline__ void attend_exact(const AttendParams & p, int head, int cell0, int src, int column0,
                                             const uint32_t (&q)[NB][D / 32][4], Softmax<NB> & sm,
                                             float (&o)[NB][D / 16][4]) {
    using S          = DecodeShape<D, NB, WARPS>;
    constexpr int KW = S::key_words, VW = S::value_words;
    const int     lane = threadIdx.x & 31, t = lane & 3, r = lane >> 2, first = cell0 & 16;
    const bool    exact = src != kSrcFar && src != kSrcHidden;
    if (!(__ballot_sync(~0u, exact) >> first & 0xFFFFu)) {
        return;
    }
    Octet key[2][KW], value[4][VW];
    bool  none[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const int x = __shfl_sync(~0u, src, first + r + 8 * u);
        none[u]     = x == kSrcFar || x == kSrcHidden;
        load_exact<D, KW>(key[u], {p.near_k, p.cur_k, p.cur_k_stride, p.n_head_kv, head}, x, t * KW, t & 1);
    }
    auto load_values = [&]() {
#pragma unroll
        for (int u = 0; u < 4; ++u) {  // keys 2t, 2t+1, 2t+8, 2t+9
            const int x = __shfl_sync(~0u, src, first + 2 * t + (u & 1) + 8 * (u >> 1));
            load_exact<D, VW>(value[u], {p.near_v, p.cur_v, p.cur_v_stride, p.n_head_kv, head}, x, r * VW, false);
        }
    };
    if constexpr (S::early_values) {
        load_values();
    }
    float s[NB][4] = {};
    exact_key_scores<KW, NB>(s, key[0], key[1], q);
    if constexpr (!S::early_values) {
        load_values();
    }
    finish_scores(p, p.score_scale * kFp4Inverse, s);
    float top[NB][2];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            s[nb][c] =
                mask_score(p, s[nb][c], cell0 + r + 8 * (c >> 1), none[c >> 1], column0 + 8 * nb + 2 * t + (c & 1));
        }
        top[nb][0] = fmaxf(s[nb][0], s[nb][2]);
        top[nb][1] = fmaxf(s[nb][1], s[nb][3]);
    }
    raise_max<NB, 4 * VW>(sm, o, top);
    uint32_t b[NB][2];
    weigh<NB>(sm, s, b);
    add_exact_values<VW, NB>(o, value, b);
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// grid: x KV head, y split, z block of 8 * NB columns. Column c of a KV head is query c / gqa, head c % gqa of the group.
template <int D, int NB, int WARPS>
__global__ void __launch_bounds__(DecodeShape<D, NB, WARPS>::threads, 1)
    attend_decode(const __grid_constant__ AttendParams p) {
    using S              = DecodeShape<D, NB, WARPS>;
    constexpr int     KW = S::key_words, VW = S::value_words, MT = 4 * VW;
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ float2                        shared_ml[S::warps][8];
    __shared__ uint64_t                      exact_rounds[S::warps];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int head = blockIdx.x, column0 = blockIdx.z * S::columns;
    const int n_columns = p.n_q * p.gqa;
    const int query0 = column_query(p, column0), query1 = column_query(p, min(column0 + S::columns, n_columns) - 1);

    // Tiles are dealt out from the last, where near and current rows are, to the first. After the first round the order of
    // the warps is reversed, so that those with these slow tiles are not the ones which get one more.
    const int n_tiles = (p.n_kv + kDecodeTile - 1) / kDecodeTile;
    const int step    = p.n_split * S::warps;
    auto      tile_of = [&](int w, int round) {
        const int me = w * p.n_split + int(blockIdx.y);
        return n_tiles - 1 - (round == 0 ? me : round * step + step - 1 - me);
    };

    // The warp's tile in shared memory, and how it gets there. The keys and summaries of a tile are one commit, its values
    // another; keys are requested before values, so there is always one younger commit than the one waited for.
    const int        row1 = p.n_head_kv * S::row_words, in_row = head * S::row_words;  // words
    const int        n_sums = kDecodeTile >> p.group_shift;
    uint32_t * const keys   = shared + S::q_words + warp * (2 * kDecodeTile + n_sums) * S::far_stride;
    uint32_t *const values = keys + kDecodeTile * S::far_stride, *const sums = values + kDecodeTile * S::far_stride;
    const FarCopy<D>   copy(lane);
    const RowPlace<KW> key_place(t, t & 1);
    const RowPlace<VW> value_place(r, false);
    auto               request_keys = [&](int tile) {
        if (tile >= 0) {
            const int64_t cell0 = int64_t(tile) * kDecodeTile;
            const int     n     = p.n_kv - int(cell0);
            copy.template copy<kDecodeTile>(keys, p.far_k + cell0 * row1 + in_row, row1, n);
            const int        n_used = min(n_sums, (n + (1 << p.group_shift) - 1) >> p.group_shift);
            const uint32_t * from   = p.summary + (cell0 >> p.group_shift) * row1 + in_row;
            copy.template copy<8>(sums, from, row1, n_used);
            if (n_sums > 8) {
                copy.template copy<8>(sums + 8 * S::far_stride, from + 8 * row1, row1, n_used - 8);
            }
        }
        copy_commit();
    };
    auto request_values = [&](int tile) {
        if (tile >= 0) {
            const int64_t cell0 = int64_t(tile) * kDecodeTile;
            copy.template copy<kDecodeTile>(values, p.far_v + cell0 * row1 + in_row, row1, p.n_kv - int(cell0));
        }
        copy_commit();
    };

    int         tile = tile_of(warp, 0), after = tile_of(warp, 1);
    CellRequest cell = request_cell(p, tile < 0 ? p.n_kv : tile * kDecodeTile + lane, query0);
    request_keys(tile);
    request_values(tile);

    // queries as halves, permuted like the keys: word w has its four pairs at 8 w
    half * q_rows = reinterpret_cast<half *>(shared);
#pragma unroll 1
    for (int j = warp; j < S::columns; j += S::warps) {
        const int     column = column0 + j, query = column_query(p, column), h = head * p.gqa + column - query * p.gqa;
        const float * from = p.q + query * p.q_stride_query + h * p.q_stride_head;
        float         x[D / 32];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            x[i] = column < n_columns ? from[lane + 32 * i] * p.q_scale : 0.0f;
        }
        const int e = lane & 15, word = 2 * (lane >> 4) + (e >> 2 & 1), pair = (e & 1 ? 0 : 2) + (e & 8 ? 0 : 1);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            q_rows[j * S::q_stride + 8 * (word + 4 * i) + 2 * pair + (e >> 1 & 1)] = __float2half_rn(x[i]);
        }
    }
    __syncthreads();
    uint32_t q[NB][KW][4];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int w = 0; w < KW; ++w) {
            const uint4 x = *reinterpret_cast<const uint4 *>(q_rows + (8 * nb + r) * S::q_stride +
                                                             8 * (t * KW + (KW > 1 ? w ^ (t & 1) * (KW / 2) : w)));
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

    // Far rows. Rounds that have others are noted (modulo 64).
    uint64_t exact = 0;
    for (int round = 0; tile >= 0; tile = after, after -= step, ++round) {
        const int       cell0 = tile * kDecodeTile;
        const TileSight sight = tile_sight(p, cell, cell0 + lane, query0, query1);
        if (after >= 0) {
            cell = request_cell(p, after * kDecodeTile + lane, query0);
        }
        exact |= uint64_t(sight.exact != 0) << (round & 63);
        const uint32_t others = ~sight.far;
        if (others == ~0u) {
            copy_wait<0>();  // or else a slow copy could meet the next
            request_keys(after);
            request_values(after);
            continue;
        }

        float s[2][NB][4] = {}, sg[NB][4] = {}, sg_upper[NB][4] = {};
        copy_wait<1>();
        tile_scores<D, NB>(s, sg, keys + r * S::far_stride, sums + min(r, n_sums - 1) * S::far_stride, key_place, q);
        if (n_sums > 8) {
            summary_scores<D, NB>(sg_upper, sums + (8 + r) * S::far_stride, key_place, q);
        }
        __syncwarp();
        request_keys(after);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int  from0 = (((16 * i + r) >> p.group_shift) & 7) << 2 | t;
            const int  from1 = (((16 * i + r + 8) >> p.group_shift) & 7) << 2 | t;
            const bool upper = i == 1 && p.group_shift == 1;  // groups 8..15
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const float g0 = upper ? sg_upper[nb][0] : sg[nb][0], g1 = upper ? sg_upper[nb][1] : sg[nb][1];
                s[i][nb][0] += __shfl_sync(~0u, g0, from0);
                s[i][nb][1] += __shfl_sync(~0u, g1, from0);
                s[i][nb][2] += __shfl_sync(~0u, g0, from1);
                s[i][nb][3] += __shfl_sync(~0u, g1, from1);
            }
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
                        s[i][nb][c] =
                            mask_score(p, s[i][nb][c], cell0 + j, others >> j & 1u, column0 + 8 * nb + 2 * t + (c & 1));
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
        uint32_t b[2][NB][2];
        weigh<NB>(sm, s[0], b[0]);
        weigh<NB>(sm, s[1], b[1]);
        copy_wait<1>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            add_values<D, NB>(o, values + 16 * i * S::far_stride, others >> (16 * i), t, value_place, b[i]);
        }
        __syncwarp();
        request_values(after);
    }
    copy_wait<0>();

    // Near and current rows: 16 cells are a unit of work, and units go to the warps in turn.
    if (lane == 0) {
        exact_rounds[warp] = exact;
    }
    __syncthreads();
    const uint64_t mine   = lane < S::warps ? exact_rounds[lane] : 0;
    int            before = __popcll(mine);  // rounds of the warps before this lane, and its own
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int x = __shfl_up_sync(~0u, before, d);
        before += lane >= d ? x : 0;
    }
    const int n_units = 2 * __shfl_sync(~0u, before, 31);
#pragma unroll 1
    for (int unit = warp; unit < n_units; unit += S::warps) {
        const int w    = __popc(__ballot_sync(~0u, before <= unit >> 1));
        uint64_t  left = exact_rounds[w];
        for (int skip = __popcll(left) - (__shfl_sync(~0u, before, w) - (unit >> 1)); skip > 0; --skip) {
            left &= left - 1;
        }
#pragma unroll 1
        for (int round = __ffsll(left) - 1, again; (again = tile_of(w, round)) >= 0; round += 64) {
            const int       first = again * kDecodeTile;
            const TileSight sight = tile_sight(p, request_cell(p, first + lane, query0), first + lane, query0, query1);
            attend_exact<D, NB, WARPS>(p, head, first + 16 * (unit & 1), sight.src, column0, q, sm, o);
        }
    }

    // Merge the warps: accumulators are brought to a common maximum, then added up, 64 channels at a time.
    const int n_own = min(S::columns, n_columns - column0);
    float *   acc   = reinterpret_cast<float *>(shared + S::q_words);  // [warp][column][64 channels: index, r]
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        float own[2], top[2] = {kNoScore, kNoScore}, l[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                sm.l[nb][c] += __shfl_xor_sync(~0u, sm.l[nb][c], d);
            }
        }
        if (r == 0) {
            shared_ml[warp][2 * t]     = make_float2(sm.m[nb][0], sm.l[nb][0]);
            shared_ml[warp][2 * t + 1] = make_float2(sm.m[nb][1], sm.l[nb][1]);
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int i = 0; i < S::warps; ++i) {
                top[c] = fmaxf(top[c], shared_ml[i][2 * t + c].x);
            }
#pragma unroll
            for (int i = 0; i < S::warps; ++i) {
                l[c] += exp2_fast(shared_ml[i][2 * t + c].x - top[c]) * shared_ml[i][2 * t + c].y;
            }
            own[c] = exp2_fast(sm.m[nb][c] - top[c]);
        }
        __syncthreads();
        if (warp == 0 && r == 0) {
            shared_ml[0][2 * t]     = make_float2(top[0], l[0]);
            shared_ml[0][2 * t + 1] = make_float2(top[1], l[1]);
        }
#pragma unroll
        for (int w = 0; w < VW; ++w) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (8 * nb + 2 * t + (c & 1) < n_own) {
                        acc[(warp * 8 + 2 * t + (c & 1)) * S::acc_stride + (2 * i + (c >> 1)) * 8 + r] =
                            o[nb][4 * w + i][c] * own[c & 1];
                    }
                }
            }
            __syncthreads();
            for (int e = threadIdx.x; e < min(8, n_own - 8 * nb) * 64; e += S::threads) {
                const int j = e / 64, place = e % 64, d = value_channel<D>(place % 8, 8 * w + place / 8);
                const int column = column0 + 8 * nb + j, query = column_query(p, column);
                const int h = head * p.gqa + column - query * p.gqa, row = query * p.n_head + h;
                float     total = 0.0f;
#pragma unroll
                for (int i = 0; i < S::warps; ++i) {
                    total += acc[(i * 8 + j) * S::acc_stride + place];
                }
                if (p.n_split == 1) {
                    p.out[size_t(row) * D + d] = finish_output(p, h, total, shared_ml[0][j]);
                } else {
                    const size_t at    = size_t(blockIdx.y) * p.n_q * p.n_head + row;
                    p.part[at * D + d] = total;
                    if (w == 0 && place == 0) {
                        p.part_ml[at] = shared_ml[0][j];
                    }
                }
            }
            __syncthreads();
        }
    }
    if (p.n_split == 1 || p.arrival_slot < 0) {
        return;
    }

    // The last block of these columns to get here merges the splits.
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        uint32_t * arrivals = &split_arrivals[p.arrival_slot][blockIdx.z * gridDim.x + head];
        last                = atomicInc(arrivals, p.n_split - 1) == p.n_split - 1;  // goes back to 0 by itself
    }
    __syncthreads();
    if (!last) {
        return;
    }
    __threadfence();
    const int    shares = max(1, S::warps / n_own);  // warps that share a column
    const size_t rows   = size_t(p.n_q) * p.n_head;
    for (int i = warp; i < shares * n_own; i += S::warps) {
        const int    column = column0 + i % n_own, query = column_query(p, column);
        const size_t row = size_t(query) * p.n_head + head * p.gqa + column - query * p.gqa;
        const float2 ml  = merge_splits<D>(p, row, rows, i / n_own, shares, acc + i * D, lane);
        if (lane == 0) {
            (&shared_ml[0][0])[i] = ml;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_own * D; e += S::threads) {
        const int j = e / D, d = e % D, column = column0 + j, query = column_query(p, column);
        const int h     = head * p.gqa + column - query * p.gqa;
        float     total = 0.0f, l = 0.0f;
        for (int i = j; i < shares * n_own; i += n_own) {
            total += acc[i * D + d];
            l += (&shared_ml[0][0])[i].y;
        }
        p.out[(size_t(query) * p.n_head + h) * D + d] =
            finish_output(p, h, total, make_float2((&shared_ml[0][0])[j].x, l));
    }
}

}  // namespace device
}  // namespace kvfold
