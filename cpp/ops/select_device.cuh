// Look-up on the device, in three launches.
//
// select_score: one block works on one KV head and one share ("split") of the groups and scores their summaries against all
// columns (query, head of the group) on tensor cores, 32 groups a warp and step, copied to shared memory ahead of time. It
// leaves the scores, and for every column the maximum and the sum of exponentials of its share.
//
// select_mass: probabilities, summed over the heads of a group, from these; their logarithm takes the place of the first head's
// score.
//
// select_pick: one block works on one KV head of one query. It counts bins, finds the one where the budget ends, and writes the
// numbers of the groups up to there in ascending order: every warp has neighbouring groups, and a sum over the warps before
// it says where its output begins.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/decode_rows.cuh"
#include "ops/kv_select.h"
#include "ops/launch.cuh"

namespace kvfold {
namespace device {

struct SelectParams {
    const uint32_t * summary;
    const half *     spread;  // [n_groups][n_head_kv]
    const uint32_t * far_bits;
    const half *     mask;  // null: nothing masked
    const float *    q;
    float *          score;     // [n_head_kv][n_q * gqa][score_stride], base 2; kNoScore: no candidate
    float2 *         part_ml;   // [n_split][n_head_kv][n_q * gqa]
    float *          part_max;  // [n_head_kv][n_q][n_chunks]: maximum of select_mass
    int32_t *        selected;
    uint64_t *       counters;  // [2] or null
    int64_t          mask_stride;
    int64_t          q_stride_query;
    int64_t          q_stride_head;
    LookupBudget     budget;
    int32_t          n_head_kv;
    int32_t          gqa;
    int32_t          n_q;
    int32_t          n_kv;
    int32_t          n_groups;
    int32_t          score_stride;
    int32_t          n_split;
    int32_t          n_chunks;
    int32_t          capacity;
    int32_t          list_stride;
    int32_t          group_shift;
    int32_t          rot_k;
    float            scale;
    float            softcap;
};

constexpr float kLargestScore = 1e29f;  // scores are clamped to +- this; below it in size is only kNoScore

// The bits of group `g`, in the low bits, and which of them exist.
__device__ __forceinline__ uint32_t group_bits(const SelectParams & p, int g, uint32_t & full) {
    const int m = 1 << p.group_shift, cell = g << p.group_shift;
    full = m == 32 ? ~0u : (1u << m) - 1;
    // n_kv may cut the last group off; the bits behind it are zero
    return cell < p.n_kv ? __ldg(p.far_bits + cell / 32) >> (cell % 32) & full : 0;
}

// --- scores ----------------------------------------------------------------------------------------------------------

constexpr int kScoreTile = 32;  // groups a warp handles at a time

template <int D, int NB>
struct ScoreShape {
    static constexpr int warps        = D == 256 ? 8 : 16;
    static constexpr int threads      = 32 * warps;
    static constexpr int columns      = 8 * NB;
    static constexpr int q_stride     = D + 8;
    static constexpr int q_words      = columns * q_stride / 2;
    static constexpr int tile_words   = kScoreTile * FarRows<D>::stride;
    static constexpr int shared_bytes = 4 * (q_words + 2 * warps * tile_words);
};

// Products of the 32 rows of a tile and the queries.
template <int D, int NB>
__device__ __forceinline__ void row_scores(float (&s)[2][NB][4], const uint32_t * rows, const RowPlace<D / 32> & place,
                                           const uint32_t (&q)[NB][D / 32][4]) {
    constexpr int row8 = 8 * FarRows<D>::stride;
    uint32_t      all[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        all[i] = rows[i * row8 + place.scales];
    }
#pragma unroll
    for (int w = 0; w < D / 32; ++w) {
        uint32_t scale[4];
        Pairs    k[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scale[i] = scale_pair(all[i], place.scale(w));
            k[i]     = fp4_pairs(rows[i * row8 + place.at(w)]);
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t a0 = mul_half2(k[2 * i].p[j], scale[2 * i]),
                               a1 = mul_half2(k[2 * i + 1].p[j], scale[2 * i + 1]),
                               a2 = mul_half2(k[2 * i].p[j + 1], scale[2 * i]),
                               a3 = mul_half2(k[2 * i + 1].p[j + 1], scale[2 * i + 1]);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    mma_16x8x16(s[i][nb], a0, a1, a2, a3, q[nb][w][j], q[nb][w][j + 1]);
                }
            }
        }
    }
}

// grid: x KV head, y split. Columns of all queries: n_q * gqa <= 8 * NB.
template <int D, int NB>
__global__ void __launch_bounds__(ScoreShape<D, NB>::threads, 1) select_score(const __grid_constant__ SelectParams p) {
    using S              = ScoreShape<D, NB>;
    constexpr int     KW = D / 32, row_words = FarRows<D>::words;
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ float                         spread_weight[S::columns];
    __shared__ float2                        shared_ml[S::warps][S::columns];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int head = blockIdx.x, n_columns = p.n_q * p.gqa, row1 = p.n_head_kv * row_words, in_row = head * row_words;
    const int n_tiles = (p.n_groups + kScoreTile - 1) / kScoreTile, step = p.n_split * S::warps;

    const FarCopy<D>   copy(lane);
    const RowPlace<KW> place(t, t & 1);
    uint32_t * const   stage   = shared + S::q_words + warp * 2 * S::tile_words;
    auto               request = [&](int tile, int at) {
        if (tile < n_tiles) {
            const int g0 = tile * kScoreTile;
            copy.template copy<kScoreTile>(stage + at * S::tile_words, p.summary + int64_t(g0) * row1 + in_row, row1,
                                           p.n_groups - g0);
        }
        copy_commit();
    };
    int tile = warp * p.n_split + int(blockIdx.y);
    request(tile, 0);  // summaries are older than the kernels that may still be running
    wait_for_earlier();
    let_next_begin();

    half * q_rows = reinterpret_cast<half *>(shared);
    for (int j = warp; j < S::columns; j += S::warps) {
        const int     query = p.n_q == 1 ? 0 : j / p.gqa, h = head * p.gqa + j - query * p.gqa;
        const float * from = p.q + query * p.q_stride_query + h * p.q_stride_head;
        float         x[D / 32], square = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            x[i] = j < n_columns ? from[lane + 32 * i] * p.scale : 0.0f;
        }
        rotate_row(x, p.rot_k, lane);
        store_query<D>(q_rows + j * S::q_stride, x, lane);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            square += x[i] * x[i];
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            square += __shfl_xor_sync(~0u, square, d);
        }
        if (lane == 0) {
            spread_weight[j] = kSpreadWeight * square;
        }
    }
    __syncthreads();
    uint32_t q[NB][KW][4];
    float    add[NB][2], m[NB][2], l[NB][2];
    load_queries<KW>(q, q_rows, S::q_stride, lane);
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            add[nb][c] = spread_weight[8 * nb + 2 * t + c] * kLog2E;
            m[nb][c]   = kNoScore;
            l[nb][c]   = 0.0f;
        }
    }

    for (int at = 0; tile < n_tiles; tile += step, at ^= 1) {
        request(tile + step, at ^ 1);
        const int      g0 = tile * kScoreTile;
        uint32_t       all;
        const uint32_t complete = __ballot_sync(~0u, g0 + lane < p.n_groups && group_bits(p, g0 + lane, all) == all);
        float          spread[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int g = g0 + r + 8 * i;
            spread[i]   = g < p.n_groups ? __half2float(__ldg(p.spread + int64_t(g) * p.n_head_kv + head)) : 0.0f;
        }
        float s[2][NB][4] = {};
        copy_wait<1>();
        __syncwarp();
        row_scores<D, NB>(s, stage + at * S::tile_words + r * FarRows<D>::stride, place, q);
        __syncwarp();  // the next request overwrites what others may still read
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // base 2
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int row = 16 * i + r + 8 * (c >> 1), g = g0 + row, column = 8 * nb + 2 * t + (c & 1);
                    float     x = s[i][nb][c] * kFp4Inverse;
                    if (p.softcap != 0.0f) {
                        x = p.softcap * (1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.0f * kLog2E / p.softcap * x)));
                    }
                    x              = x * kLog2E + add[nb][c & 1] * spread[2 * i + (c >> 1)];
                    x              = x >= -kLargestScore ? fminf(x, kLargestScore) : -kLargestScore;  // NaN: last
                    bool candidate = complete >> row & 1u;
                    if (p.mask && candidate && column < n_columns) {
                        const int query = column / p.gqa;
                        candidate =
                            __half_as_ushort(p.mask[query * p.mask_stride + (int64_t(g) << p.group_shift)]) != 0xFC00u;
                    }
                    x           = candidate ? x : kNoScore;
                    s[i][nb][c] = x;
                    if (column < n_columns) {  // the row's padding too
                        p.score[(int64_t(head) * n_columns + column) * p.score_stride + g] = x;
                    }
                }
            }
        }
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float a = s[0][nb][c], b = s[0][nb][c + 2], d = s[1][nb][c], e = s[1][nb][c + 2];
                const float top = fmaxf(fmaxf(fmaxf(a, b), fmaxf(d, e)), m[nb][c]);
                if (top > kNoScore) {
                    l[nb][c] = l[nb][c] * exp2_fast(m[nb][c] - top) + exp2_fast(a - top) + exp2_fast(b - top) +
                               exp2_fast(d - top) + exp2_fast(e - top);
                    m[nb][c] = top;
                }
            }
        }
    }
    copy_wait<0>();

    // maxima and sums: over the rows of a warp, then over the warps
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float top = m[nb][c];
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            }
            float sum = l[nb][c] * exp2_fast(m[nb][c] - top);
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                sum += __shfl_xor_sync(~0u, sum, d);
            }
            if (r == 0) {
                shared_ml[warp][8 * nb + 2 * t + c] = make_float2(top, sum);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < n_columns) {
        float2 total = shared_ml[0][threadIdx.x];
#pragma unroll 1
        for (int w = 1; w < S::warps; ++w) {
            const float2 x   = shared_ml[w][threadIdx.x];
            const float  top = fmaxf(total.x, x.x);
            total            = make_float2(top, total.y * exp2_fast(total.x - top) + x.y * exp2_fast(x.x - top));
        }
        p.part_ml[(int64_t(blockIdx.y) * p.n_head_kv + head) * n_columns + threadIdx.x] = total;
    }
}

// --- masses ----------------------------------------------------------------------------------------------------------

constexpr int kMassThreads = 256;
constexpr int kMassGroups  = 4 * kMassThreads;  // a block handles
constexpr int kMaxGqa      = 16;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    }
    return x;
}

// grid: x KV head, y chunk of kMassGroups, z query
__global__ void __launch_bounds__(kMassThreads) select_mass(const __grid_constant__ SelectParams p) {
    __shared__ float log_sum[kMaxGqa];
    __shared__ float tops[kMassThreads / 32];
    const int        lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x, query = blockIdx.z;
    const int        n_columns = p.n_q * p.gqa, column0 = query * p.gqa;
    wait_for_earlier();
    let_next_begin();
    // log of the sum of exponentials of every head of the group
    for (int j = warp; j < p.gqa; j += kMassThreads / 32) {
        float top = kNoScore, sum = 0.0f;
        for (int i = lane; i < p.n_split; i += 32) {
            const float2 x = p.part_ml[(int64_t(i) * p.n_head_kv + head) * n_columns + column0 + j];
            const float  m = fmaxf(top, x.x);
            sum            = sum * exp2_fast(top - m) + x.y * exp2_fast(x.x - m);
            top            = m;
        }
        const float m = warp_max(top);
        sum *= exp2_fast(top - m);
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            sum += __shfl_xor_sync(~0u, sum, d);
        }
        if (lane == 0) {
            log_sum[j] = sum > 0.0f ? m + __log2f(sum) : 0.0f;
        }
    }
    __syncthreads();
    // rows are padded to a multiple of 4 with kNoScore
    const int g   = blockIdx.y * kMassGroups + 4 * threadIdx.x;
    float     top = kNoScore;
    if (g < p.score_stride) {
        float * const first = p.score + (int64_t(head) * n_columns + column0) * p.score_stride + g;
        float4        sum   = make_float4(0.0f, 0.0f, 0.0f, 0.0f), x{};
        for (int j = p.gqa - 1; j >= 0; --j) {
            x             = *reinterpret_cast<const float4 *>(first + int64_t(j) * p.score_stride);
            const float l = log_sum[j];
            sum.x += exp2_fast(x.x - l);
            sum.y += exp2_fast(x.y - l);
            sum.z += exp2_fast(x.z - l);
            sum.w += exp2_fast(x.w - l);
        }
        auto log_mass = [&](float score, float mass) {
            const float y = score > kNoScore ? __log2f(fmaxf(mass, 1.17549435e-38f)) : kNoScore;
            top           = fmaxf(top, y);
            return y;
        };
        *reinterpret_cast<float4 *>(first) =
            make_float4(log_mass(x.x, sum.x), log_mass(x.y, sum.y), log_mass(x.z, sum.z), log_mass(x.w, sum.w));
    }
    top = warp_max(top);
    if (lane == 0) {
        tops[warp] = top;
    }
    __syncthreads();
    if (warp == 0) {
        top = warp_max(lane < kMassThreads / 32 ? tops[lane] : kNoScore);
        if (lane == 0) {
            p.part_max[(int64_t(head) * p.n_q + query) * p.n_chunks + blockIdx.y] = top;
        }
    }
}

// --- the choice ------------------------------------------------------------------------------------------------------

constexpr int kPickThreads  = 1024;
constexpr int kPickWarps    = kPickThreads / 32;
constexpr int kAlwaysListed = -1, kNeverListed = -2;  // in place of a bin

// Sum of `x` over the threads before this one; `total` over all. The whole block calls; `space` [kPickWarps].
template <typename T>
__device__ __forceinline__ T sum_before(T x, T * space, T & total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T         until = x;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const T other = __shfl_up_sync(~0u, until, d);
        until += lane >= d ? other : T(0);
    }
    __syncthreads();  // `space` may still be read from the time before
    if (lane == 31) {
        space[warp] = until;
    }
    __syncthreads();
    T mine = space[lane], sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const T other = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? other : T(0);
    }
    total          = __shfl_sync(~0u, sum, 31);
    const T before = __shfl_sync(~0u, sum - mine, warp);
    return before + until - x;
}

__device__ __forceinline__ int bin_of(float p, float top) {
    const float distance = (top - p) * (float(kBinsPerNat) * 0.69314718055994531f);
    return distance < float(kSelectBins - 1) ? int(distance) : kSelectBins - 1;
}

// grid: x KV head, y query
__global__ void __launch_bounds__(kPickThreads, 1) select_pick(const __grid_constant__ SelectParams p) {
    __shared__ int   count[kSelectBins];
    __shared__ float float_space[kPickWarps];
    __shared__ int   int_space[kPickWarps];
    __shared__ int   cut_bin, cut_take, n_taken;

    const int     lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x, query = blockIdx.y;
    float * const mass = p.score + (int64_t(head) * p.n_q + query) * p.gqa * p.score_stride;
    for (int b = threadIdx.x; b < kSelectBins; b += kPickThreads) {
        count[b] = 0;
    }
    wait_for_earlier();
    let_next_begin();  // attention of the same layer has work that needs no list

    float top = kNoScore;
    for (int i = lane; i < p.n_chunks; i += 32) {
        top = fmaxf(top, p.part_max[(int64_t(head) * p.n_q + query) * p.n_chunks + i]);
    }
    top = warp_max(top);
    __syncthreads();
    // bins take the place of the masses
    int * const bins = reinterpret_cast<int *>(mass);
#pragma unroll 4
    for (int g = 4 * threadIdx.x; g < p.score_stride; g += 4 * kPickThreads) {
        const float4 x    = *reinterpret_cast<const float4 *>(mass + g);
        const float  y[4] = {x.x, x.y, x.z, x.w};
        int          b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (y[i] > kNoScore) {
                b[i] = bin_of(y[i], top);
                atomicAdd(&count[b[i]], 1);
            } else {
                uint32_t       full;
                const uint32_t bits = group_bits(p, g + i, full);
                b[i]                = bits != 0 && bits != full ? kAlwaysListed : kNeverListed;
            }
        }
        *reinterpret_cast<int4 *>(bins + g) = make_int4(b[0], b[1], b[2], b[3]);
    }
    __syncthreads();

    int n_candidates;
    // where the budget ends: each thread has two neighbouring bins
    {
        const int   b = 2 * threadIdx.x, n0 = count[b], n1 = count[b + 1];
        const float w0 = float(n0) * exp2_fast(-float(b) * (kLog2E / kBinsPerNat)),
                    w1 = float(n1) * exp2_fast(-float(b + 1) * (kLog2E / kBinsPerNat));
        int         n_all;
        float       mass_all;
        const int   n_before    = sum_before(n0 + n1, int_space, n_all);
        n_candidates            = n_all;
        const float mass_before = sum_before(w0 + w1, float_space, mass_all);
        // whole bins that leave at most `threshold` of the mass: the first one for which that is so
        const float rest   = p.budget.threshold * mass_all;
        int         enough = p.n_groups;
        if (p.budget.threshold > 0.0f) {
            if (mass_all - mass_before - w0 <= rest) {
                enough = n_before + n0;
            } else if (mass_all - mass_before - w0 - w1 <= rest) {
                enough = n_before + n0 + n1;
            }
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            enough = min(enough, __shfl_xor_sync(~0u, enough, d));
        }
        __syncthreads();
        if (lane == 0) {
            int_space[warp] = enough;
        }
        __syncthreads();
        enough = int_space[lane];
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            enough = min(enough, __shfl_xor_sync(~0u, enough, d));
        }
        const int floor_groups = (p.budget.min_tokens + (1 << p.group_shift) - 1) >> p.group_shift;
        const int most  = min(n_all, max(int(ceilf(__fmul_rn(p.budget.lookup_max, float(n_all)))), floor_groups));
        const int least = min(n_all, max(int(ceilf(__fmul_rn(p.budget.lookup_min, float(n_all)))), floor_groups));
        const int take  = max(least, min(most, enough));
        if (threadIdx.x == 0) {
            n_taken = take;
            if (take == 0) {
                cut_bin = cut_take = 0;
            }
        }
        if (take > n_before && take <= n_before + n0 + n1) {
            const bool second = take > n_before + n0;
            cut_bin           = b + second;
            cut_take          = take - n_before - (second ? n0 : 0);
        }
    }
    __syncthreads();

    // the list: warps have neighbouring pieces, a multiple of 32 groups
    const int piece = ((p.n_groups + kPickWarps - 1) / kPickWarps + 31) / 32 * 32;
    const int first = warp * piece, last = min(p.n_groups, first + piece), bin = cut_bin;
    auto      kind = [&](int g) {  // 2: on the list, 1: in the bin of the cut, 0: not
        const int b = g < last ? bins[g] : kNeverListed;
        return b == kAlwaysListed || (b >= 0 && b < bin) ? 2 : b == bin ? 1 : 0;
    };
    int n_sure = 0, n_ties = 0;
#pragma unroll 4
    for (int g = first; g < last; g += 32) {
        const int k = kind(g + lane);
        n_sure += __popc(__ballot_sync(~0u, k == 2));
        n_ties += __popc(__ballot_sync(~0u, k == 1));
    }
    int            all_ties, n_all;
    const int      ties_before = sum_before(lane == 0 ? n_ties : 0, int_space, all_ties);  // right in lane 0
    const int      skip        = all_ties - cut_take;  // the lowest numbers of the bin
    int            tie         = __shfl_sync(~0u, ties_before, 0);
    const int      own_ties    = n_ties - min(n_ties, max(0, skip - tie));
    int            at          = __shfl_sync(~0u, sum_before(lane == 0 ? n_sure + own_ties : 0, int_space, n_all), 0);
    int32_t *      list        = p.selected + (int64_t(query) * p.n_head_kv + head) * p.list_stride;
    const uint32_t before      = (1u << lane) - 1;
#pragma unroll 4
    for (int g = first; g < last; g += 32) {
        const int      k    = kind(g + lane);
        const uint32_t ties = __ballot_sync(~0u, k == 1);
        const bool     on   = k == 2 || (k == 1 && tie + __popc(ties & before) >= skip);
        const uint32_t all  = __ballot_sync(~0u, on);
        const int      to   = at + __popc(all & before);
        if (on && to < p.capacity) {
            list[1 + to] = g + lane;
        }
        tie += __popc(ties);
        at += __popc(all);
    }
    if (threadIdx.x == 0) {
        list[0] = min(n_all, p.capacity);
        if (p.counters) {
            atomicAdd(reinterpret_cast<unsigned long long *>(p.counters),
                      static_cast<unsigned long long>(n_candidates));
            atomicAdd(reinterpret_cast<unsigned long long *>(p.counters) + 1, static_cast<unsigned long long>(n_taken));
        }
    }
}

}  // namespace device
}  // namespace kvfold
