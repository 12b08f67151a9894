// Look-up on the device: which groups the queries of a decode step read.
//
// The blocks of one KV head and query (a "party") divide its groups among themselves and meet twice, by a counter in global
// memory, so that one launch does everything; a kernel that attends what was chosen can go on from there (attend_decode.cuh).
//
// 1. Every block scores the summaries of its share against the query's heads on tensor cores, 32 groups a warp and step, copied
//    to shared memory ahead of time. Scores stay where the same warp finds them again; every head's maximum and sum of
//    exponentials of the share are told to the others.
//        First meeting.
// 2. Probabilities from these, summed over the heads, become bins. Everybody's bins and a count of them are told.
//        Second meeting.
// 3. Every block finds the bin where the budget ends, walks over the bins of all groups, and so knows which place on the list
//    each has: it writes down those of its own piece of the list, in ascending order. Pieces are equal in length however the
//    chosen groups are clustered.
//
// Bins are counted on a grid that does not depend on the best group (kv_select.h), or else there would be a third meeting.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/decode_rows.cuh"
#include "ops/kv_select.h"
#include "ops/launch.cuh"
#include "ops/warp.cuh"

namespace kvfold {
namespace device {

struct SelectParams {
    const uint32_t * summary;
    const half *     spread;  // [n_groups][n_head_kv]
    const uint32_t * far_bits;
    const half *     mask;  // null: nothing masked
    const float *    q;
    float *    score;    // [party][gqa][stride], base 2; kNoScore: no candidate. party = query * n_head_kv + KV head
    uint16_t * code;     // [party][stride], see below
    int32_t *  count;    // [party][kGridBins] groups in a bin
    float2 *   part_ml;  // [n_split][party][gqa]
    int32_t *  selected;
    uint64_t * counters;  // [2] or null
    float *
        unread;  // [n_q][n_head], SelectArgs::unread; null: not wanted, or wanted by the attention of the same launch only
    float *
        part_read;  // [n_split][party][gqa] estimated probability of what is on the split's piece of the list; for `unread`
    int64_t      mask_stride;
    int64_t      q_stride_query;
    int64_t      q_stride_head;
    LookupBudget budget;
    int32_t      n_head_kv;
    int32_t      gqa;
    int32_t      n_q;
    int32_t      n_kv;
    int32_t      n_groups;
    int32_t      stride;  // n_groups, rounded up to whole tiles
    int32_t      n_split;
    int32_t      capacity;
    int32_t      list_stride;
    int32_t      group_shift;
    int32_t      meeting_slot;  // of the counters of those who meet; not used with one split
    int32_t      rot_k;
    float        scale;
    float        softcap;
};

constexpr int   kScoreTile    = 32;     // groups a warp handles at a time
constexpr int   kMaxGqa       = 16;     // query heads a KV head
constexpr float kLargestScore = 1e29f;  // scores are clamped to +- this; below it in size is only kNoScore

// Bins of -log p, numbered from before -log kMaxGqa (p is a sum over heads). The best group's p is at least 1 / n_groups, so the
// kSelectBins from the best one on are always there; what is beyond all of them counts as the last.
constexpr int   kGridBins   = 4096;
constexpr float kGridOrigin = 192.0f;  // number of the bin where p = 1 begins, more than kBinsPerNat * log(kMaxGqa)

// What is kept of a group: 0 for one that is listed anyway (partial), else 1 + bin, else this:
constexpr uint32_t kNeverListed = 0xFFFF;

// --- meetings --------------------------------------------------------------------------------------------------------

// How many arrivals there were in the running launch; all zero between launches. Launches that may overlap use different slots.
static __device__ uint32_t meeting_arrivals[kArrivalSlots][kArrivals];

// The whole block calls. What any of its threads wrote before can be read by every block that wait_for() lets through.
__device__ __forceinline__ void arrive(uint32_t * arrivals) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrivals, 1u);
    }
}

// Until so many have arrived. The whole block calls.
__device__ __forceinline__ void wait_for(const uint32_t * arrivals, uint32_t n) {
    if (threadIdx.x == 0) {
        uint32_t now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
        } while (now < n);
    }
    __syncthreads();
}

// For the next launch. One thread of a party's last block to need the counter.
__device__ __forceinline__ void leave_meetings(const SelectParams & p, int party) {
    meeting_arrivals[p.meeting_slot][party] = 0;
}

// --- scores ----------------------------------------------------------------------------------------------------------

template <int D, int NB, int WARPS>
struct LookupShape {
    static constexpr int warps      = WARPS;
    static constexpr int threads    = 32 * warps;
    static constexpr int columns    = 8 * NB;
    static constexpr int q_stride   = D + 8;
    static constexpr int q_words    = columns * q_stride / 2;
    static constexpr int tile_words = kScoreTile * FarRows<D>::stride;
    // dynamic shared memory: the queries, then two tiles a warp, later a count of bins
    static constexpr int shared_bytes = 4 * (q_words + 2 * warps * tile_words);
    static_assert(2 * warps * tile_words >= kGridBins, "bins take the place of tiles");
};

// What else a block keeps in shared memory.
template <int WARPS>
struct LookupShared {
    float2 ml[WARPS][kMaxGqa];  // (.x later: probabilities)
    float  spread_weight[kMaxGqa];
    float  log_sum[kMaxGqa];
    int    ints[WARPS], more_ints[WARPS];
    float  floats[WARPS];
    int    enough, limit, n_ties;
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

// What decides about a lane's group of a tile, on its way.
struct GroupRequest {
    uint32_t bits, full;
    half     spread;
    uint16_t mask;
};

__device__ __forceinline__ GroupRequest request_group(const SelectParams & p, int g, int head, int query) {
    GroupRequest r;
    r.bits   = group_bits(p, g, r.full);
    r.spread = __ushort_as_half(0);
    r.mask   = 0;
    if (g < p.n_groups) {
        r.spread = __ldg(p.spread + int64_t(g) * p.n_head_kv + head);
        if (p.mask) {
            r.mask = __half_as_ushort(__ldg(p.mask + query * p.mask_stride + (int64_t(g) << p.group_shift)));
        }
    }
    return r;
}

// The queries' operands, rotated and scaled, by way of shared memory; what a unit of spread adds to each column's score.
template <int D, int NB, int WARPS>
__device__ __forceinline__ void prepare_columns(const SelectParams & p, int head, int query, uint32_t * shared,
                                                LookupShared<WARPS> & s, uint32_t (&q)[NB][D / 32][4]) {
    using S        = LookupShape<D, NB, WARPS>;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    half *    q_rows = reinterpret_cast<half *>(shared);
#pragma unroll 1
    for (int j = warp; j < S::columns; j += S::warps) {
        const float * from = p.q + query * p.q_stride_query + (head * p.gqa + j) * p.q_stride_head;
        float         x[D / 32], square = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            x[i] = j < p.gqa ? from[lane + 32 * i] * p.scale : 0.0f;
        }
        rotate_row(x, p.rot_k, lane);
        store_query<D>(q_rows + j * S::q_stride, x, lane);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            square += x[i] * x[i];
        }
        square = warp_reduce(square, Sum{});
        if (lane == 0) {
            s.spread_weight[j] = kSpreadWeight * kLog2E * square;
        }
    }
    __syncthreads();
    load_queries<D / 32>(q, q_rows, S::q_stride, lane);
}

// Scores of the block's share: tiles split, split + n_split, ... in turn to its warps. `score`: the party's.
template <int D, int NB, int WARPS>
__device__ __forceinline__ void score_groups(const SelectParams & p, int head, int query, float * score,
                                             float2 * ml_out, uint32_t * shared, LookupShared<WARPS> & s,
                                             uint32_t (&q)[NB][D / 32][4]) {
    using S          = LookupShape<D, NB, WARPS>;
    constexpr int KW = D / 32, row_words = FarRows<D>::words;
    const int     lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int     row1 = p.n_head_kv * row_words, in_row = head * row_words;
    const int     n_tiles = p.stride / kScoreTile, step = p.n_split * S::warps;

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
    request(tile,
            0);  // summaries are older than the kernels that may still be running, and so are the plan and the mask
    GroupRequest next = request_group(p, tile * kScoreTile + lane, head, query);
    wait_for_earlier();
    if (blockIdx.y == 0) {  // others count after the first meeting
        int4 * count = reinterpret_cast<int4 *>(p.count + int64_t(query * p.n_head_kv + head) * kGridBins);
        for (int i = threadIdx.x; i < kGridBins / 4; i += S::threads) {
            count[i] = make_int4(0, 0, 0, 0);
        }
    }
    prepare_columns<D, NB, WARPS>(p, head, query, shared, s, q);

    float * const to = score + int64_t(2 * t) * p.stride + r;
    float         add[NB][2], m[NB][2], l[NB][2];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            add[nb][c] = s.spread_weight[8 * nb + 2 * t + c];
            m[nb][c]   = kNoScore;
            l[nb][c]   = 0.0f;
        }
    }
#pragma unroll 1
    for (int at = 0; tile < n_tiles; tile += step, at ^= 1) {
        request(tile + step, at ^ 1);
        const GroupRequest now = next;
        next                   = request_group(p, (tile + step) * kScoreTile + lane, head, query);
        const int      g0      = tile * kScoreTile;
        const uint32_t candidates =
            __ballot_sync(~0u, g0 + lane < p.n_groups && now.bits == now.full && now.mask != 0xFC00u);
        const float own_spread  = __half2float(now.spread);
        float       x[2][NB][4] = {};
        copy_wait<1>();
        row_scores<D, NB>(x, stage + at * S::tile_words + r * FarRows<D>::stride, place, q);
        __syncwarp();  // the next request overwrites what others may still read
        const float unit = p.softcap == 0.0f ? kLog2E * kFp4Inverse : kLog2E;
        if (p.softcap != 0.0f) {
#pragma unroll
            for (int i = 0; i < 8 * NB; ++i) {
                float & y = x[i / (4 * NB)][i / 4 % NB][i % 4];
                y         = 1.0f + exp2_fast(2.0f * kLog2E * kFp4Inverse / p.softcap * y);
                y         = p.softcap * (1.0f - __fdividef(2.0f, y));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int   row    = r + 8 * i;
            const float spread = __shfl_sync(~0u, own_spread, row);
            const bool  is_one = candidates >> row & 1u;
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float & y = x[i / 2][nb][2 * (i % 2) + c];
                    y         = y * unit + add[nb][c] * spread;
                    y         = fminf(fmaxf(y, -kLargestScore), kLargestScore);  // NaN: last
                    y         = is_one ? y : kNoScore;
                    if (8 * nb + 2 * t + c < p.gqa) {
                        (to + int64_t(8 * nb + c) * p.stride + g0)[8 * i] = y;
                    }
                }
            }
        }
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float a = x[0][nb][c], b = x[0][nb][c + 2], d = x[1][nb][c], e = x[1][nb][c + 2];
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
            const float top = warp_reduce<4>(m[nb][c], Max{});
            const float sum = warp_reduce<4>(l[nb][c] * exp2_fast(m[nb][c] - top), Sum{});
            if (r == 0) {
                s.ml[warp][8 * nb + 2 * t + c] = make_float2(top, sum);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < p.gqa) {
        float2 total = s.ml[0][threadIdx.x];
#pragma unroll 1
        for (int w = 1; w < S::warps; ++w) {
            const float2 x   = s.ml[w][threadIdx.x];
            const float  top = fmaxf(total.x, x.x);
            total            = make_float2(top, total.y * exp2_fast(total.x - top) + x.y * exp2_fast(x.x - top));
        }
        ml_out[threadIdx.x] = total;
    }
}

// --- bins ------------------------------------------------------------------------------------------------------------

// Sum over this lane and those before it.
template <typename T>
__device__ __forceinline__ T sum_until(T x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const T other = __shfl_up_sync(~0u, x, d);
        x += lane >= d ? other : T(0);
    }
    return x;
}

// The codes of the block's share, and their count, added to the party's. `count`: shared memory, zero.
template <int WARPS>
__device__ __forceinline__ void make_codes(const SelectParams & p, int party, const float * score, int * count,
                                           LookupShared<WARPS> & s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, parties = p.n_head_kv * p.n_q;
    // log of the sum of exponentials of every head
    for (int j = warp; j < p.gqa; j += WARPS) {
        float top = kNoScore, sum = 0.0f;
        for (int i = lane; i < p.n_split; i += 32) {
            const float2 x = __ldcg(p.part_ml + (int64_t(i) * parties + party) * p.gqa + j);
            const float  m = fmaxf(top, x.x);
            sum            = sum * exp2_fast(top - m) + x.y * exp2_fast(x.x - m);
            top            = m;
        }
        const float m = warp_reduce(top, Max{});
        sum           = warp_reduce(sum * exp2_fast(top - m), Sum{});
        if (lane == 0) {
            s.log_sum[j] = sum > 0.0f ? m + __log2f(sum) : 0.0f;
        }
    }
    __syncthreads();
    uint16_t * const code    = p.code + int64_t(party) * p.stride;
    const int        n_tiles = p.stride / kScoreTile;
    constexpr int    kAtOnce = 2;  // tiles, so that their scores are on the way together
    const int        step    = p.n_split * WARPS;
#pragma unroll 1
    for (int tile = warp * p.n_split + int(blockIdx.y); tile < n_tiles; tile += kAtOnce * step) {
        float x[kAtOnce], mass[kAtOnce] = {};
#pragma unroll 4
        for (int j = 0; j < p.gqa; ++j) {
            const float * from    = score + int64_t(j) * p.stride + lane;
            const float   log_sum = s.log_sum[j];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                x[i] = tile + i * step < n_tiles ? from[(tile + i * step) * kScoreTile] : kNoScore;
                mass[i] += exp2_fast(x[i] - log_sum);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (tile + i * step >= n_tiles) {
                break;
            }
            const int g = (tile + i * step) * kScoreTile + lane;
            uint32_t  c;
            if (x[i] > kNoScore) {
                constexpr float kBinsPerBit = float(kBinsPerNat) * 0.69314718055994531f;
                const float     at          = kGridOrigin - kBinsPerBit * __log2f(fmaxf(mass[i], 1.17549435e-38f));
                const int       bin         = min(int(at), kGridBins - 1);
                atomicAdd(count + bin, 1);
                c = bin + 1;
            } else {
                uint32_t       full;
                const uint32_t bits = group_bits(p, g, full);
                c                   = bits != 0 && bits != full ? 0 : kNeverListed;
            }
            code[g] = uint16_t(c);
        }
    }
    __syncthreads();
    int32_t * const all = p.count + int64_t(party) * kGridBins;
    for (int b = threadIdx.x; b < kGridBins; b += 32 * WARPS) {
        if (count[b] != 0) {
            atomicAdd(all + b, count[b]);
        }
    }
}

// --- the choice ------------------------------------------------------------------------------------------------------

// Codes below `limit` are on the list; of those from there to before `end`, the `n_ties` with the highest numbers.
struct Cut {
    int limit, end;
    int n_ties;
    int n_candidates, n_taken;
};

// Where the budget ends. `all`: the count of the party; `count`: shared memory for a copy. The whole block calls.
template <int WARPS>
__device__ __forceinline__ Cut find_cut(const SelectParams & p, const int32_t * all, int * count,
                                        LookupShared<WARPS> & s) {
    constexpr int threads = 32 * WARPS, per = (kSelectBins + threads - 1) / threads;
    const int     lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        s.enough = 0x7FFFFFFF;
        s.limit  = 1;
        s.n_ties = 0;
    }
    int total = 0, best = kGridBins;
#pragma unroll
    for (int i = threadIdx.x; i < kGridBins / 4; i += threads) {
        const int4 x                       = __ldcg(reinterpret_cast<const int4 *>(all) + i);
        reinterpret_cast<int4 *>(count)[i] = x;
        const int n                        = x.x + x.y + x.z + x.w;
        total += n;
        if (n != 0) {
            best = min(best, 4 * i + (x.x != 0 ? 0 : x.y != 0 ? 1 : x.z != 0 ? 2 : 3));
        }
    }
    total = warp_reduce(total, Sum{});
    best  = warp_reduce(best, Min{});
    if (lane == 0) {
        s.ints[warp]      = total;
        s.more_ints[warp] = best;
    }
    __syncthreads();
    total = warp_reduce(lane < WARPS ? s.ints[lane] : 0, Sum{});
    best  = warp_reduce(lane < WARPS ? s.more_ints[lane] : kGridBins, Min{});

    // Each thread has a few neighbouring bins, counted from the best. The last bin holds everything that is further away.
    const int first = threadIdx.x * per;
    int       n[per], own         = 0;
    float     mass[per], own_mass = 0.0f;
#pragma unroll
    for (int i = 0; i < per; ++i) {
        const int b = first + i;
        n[i]        = b < kSelectBins - 1 && best + b < kGridBins ? count[best + b] : 0;
        mass[i]     = float(n[i]) * exp2_fast(-float(b) * (kLog2E / kBinsPerNat));
        own += n[i];
        own_mass += mass[i];
    }
    const int   until      = sum_until(own, lane);
    const float mass_until = sum_until(own_mass, lane);
    __syncthreads();  // everybody has read `ints`
    if (lane == 31) {
        s.ints[warp]   = until;
        s.floats[warp] = mass_until;
    }
    __syncthreads();
    const int   warp_n = lane < WARPS ? s.ints[lane] : 0, warps_until = sum_until(warp_n, lane);
    const float warp_mass = lane < WARPS ? s.floats[lane] : 0.0f, masses_until = sum_until(warp_mass, lane);
    const int   n_before    = __shfl_sync(~0u, warps_until - warp_n, warp) + until - own;
    const float mass_before = __shfl_sync(~0u, masses_until - warp_mass, warp) + mass_until - own_mass;
    const float mass_all    = __shfl_sync(~0u, masses_until, 31);
    int         sum         = n_before;
#pragma unroll
    for (int i = 0; i < per; ++i) {
        if (first + i == kSelectBins - 1) {
            n[i] = total - sum;
        }
        sum += n[i];
    }
    // as many whole bins as leave at most `threshold` of the mass
    int enough = total;
    if (p.budget.threshold > 0.0f) {
        const float rest = p.budget.threshold * mass_all;
        float       read = mass_before;
        sum              = n_before;
        enough           = 0x7FFFFFFF;
#pragma unroll
        for (int i = 0; i < per; ++i) {
            read += mass[i];
            sum += n[i];
            if (first + i < kSelectBins && mass_all - read <= rest) {
                enough = min(enough, sum);
            }
        }
        enough = warp_reduce(enough, Min{});
        if (lane == 0) {
            atomicMin(&s.enough, enough);
        }
        __syncthreads();
        enough = s.enough;
    }
    const int floor_groups = (p.budget.min_tokens + (1 << p.group_shift) - 1) >> p.group_shift;
    const int bound        = p.budget.max_tokens > 0 ? min(total, p.budget.max_tokens >> p.group_shift) : total;
    const int most         = min(bound, max(int(ceilf(__fmul_rn(p.budget.lookup_max, float(total)))), floor_groups));
    const int least        = min(bound, max(int(ceilf(__fmul_rn(p.budget.lookup_min, float(total)))), floor_groups));
    const int take         = max(least, min(most, enough));
    sum                    = n_before;
#pragma unroll
    for (int i = 0; i < per; ++i) {
        if (take > sum && take <= sum + n[i]) {  // of one thread only; of none where nothing is taken
            s.limit  = best + first + i + 1;
            s.n_ties = take - sum;
        }
        sum += n[i];
    }
    __syncthreads();
    Cut cut;
    cut.limit        = s.limit;
    cut.end          = cut.limit == best + kSelectBins ? int(kNeverListed) : cut.limit + 1;
    cut.n_ties       = s.n_ties;
    cut.n_candidates = total;
    cut.n_taken      = take;
    return cut;
}

// The block's piece of a list.
struct ListPiece {
    const int32_t * list;
    int             n;          // entries
    int             n_tiles;    // of kPieceCells cells
    bool            all_taken;  // all candidates of the party
};
constexpr int kPieceCells = 32;  // pieces are multiples of so many cells

// Bit i of `sure` and `ties`: what code i of the eight is.
__device__ __forceinline__ void classify(const uint4 & codes, const Cut & cut, uint32_t & sure, uint32_t & ties) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    sure = ties = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int c = int(words[i / 2] >> (16 * (i % 2)) & 0xFFFFu);
        sure |= uint32_t(c < cut.limit) << i;
        ties |= uint32_t(c >= cut.limit && c < cut.end) << i;
    }
}

// Writes the block's piece of the list, and returns it. The whole block calls.
template <int WARPS>
__device__ __forceinline__ ListPiece list_piece(const SelectParams & p, int party, const Cut & cut,
                                                LookupShared<WARPS> & s) {
    constexpr int    kStep = 8 * 32;  // groups a warp looks at together
    const int        lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint16_t * code  = p.code + int64_t(party) * p.stride;
    const int        each  = (p.stride + kStep * WARPS - 1) / (kStep * WARPS) * kStep;
    const int        first = warp * each + 8 * lane, last = min(p.stride, (warp + 1) * each);
    // Read twice, so let the first-level cache have them: nothing of it is older than the meeting.
    auto load = [&](int g) {
        return g < last ? *reinterpret_cast<const uint4 *>(code + g) : make_uint4(~0u, ~0u, ~0u, ~0u);
    };
    int n_sure = 0, n_ties = 0;
#pragma unroll 4
    for (int i = 0; i < each; i += kStep) {
        uint32_t sure, ties;
        classify(load(first + i), cut, sure, ties);
        n_sure += __popc(sure);
        n_ties += __popc(ties);
    }
    n_sure = warp_reduce(n_sure, Sum{});
    n_ties = warp_reduce(n_ties, Sum{});
    if (lane == 0) {
        s.ints[warp]      = n_sure;
        s.more_ints[warp] = n_ties;
    }
    __syncthreads();
    const int warp_sure = lane < WARPS ? s.ints[lane] : 0, warp_ties = lane < WARPS ? s.more_ints[lane] : 0;
    const int sure_until = sum_until(warp_sure, lane), ties_until = sum_until(warp_ties, lane);
    int       sure_before = __shfl_sync(~0u, sure_until - warp_sure, warp);
    int       ties_before = __shfl_sync(~0u, ties_until - warp_ties, warp);
    const int skip        = __shfl_sync(~0u, ties_until, 31) - cut.n_ties;  // ties with the lowest numbers
    const int n_listed    = min(__shfl_sync(~0u, sure_until, 31) + cut.n_ties, p.capacity);

    const int per_tile = kPieceCells >> p.group_shift, n_tiles = (n_listed + per_tile - 1) / per_tile;
    const int tile0 = int(int64_t(n_tiles) * int(blockIdx.y) / p.n_split),
              tile1 = int(int64_t(n_tiles) * (int(blockIdx.y) + 1) / p.n_split);
    const int begin = tile0 * per_tile, end = min(tile1 * per_tile, n_listed);
    int32_t * list = p.selected + int64_t(party) * p.list_stride;
    if (blockIdx.y == 0 && threadIdx.x == 0) {
        list[0] = n_listed;
        if (p.counters) {
            auto * counters = reinterpret_cast<unsigned long long *>(p.counters);
            atomicAdd(counters, static_cast<unsigned long long>(cut.n_candidates));
            atomicAdd(counters + 1, static_cast<unsigned long long>(cut.n_taken));
        }
    }
    ++list;
    // where the warp's groups are on the list
    auto      place    = [&](int n_sures, int n_tie) { return n_sures + max(0, n_tie - skip); };
    const int warp_end = place(sure_before + n_sure, ties_before + n_ties);
    if (place(sure_before, ties_before) < end && warp_end > begin) {
#pragma unroll 1
        for (int i = 0; i < each; i += kStep) {
            uint32_t sure, ties;
            classify(load(first + i), cut, sure, ties);
            const int both = __popc(sure) | __popc(ties) << 16, both_until = sum_until(both, lane);
            const int sures = sure_before + ((both_until - both) & 0xFFFF);
            int       tie   = ties_before + ((both_until - both) >> 16);
            int       to    = place(sures, tie);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const bool is_tie = ties >> k & 1u;
                if ((sure >> k & 1u) || (is_tie && tie >= skip)) {
                    if (to >= begin && to < end) {
                        list[to] = first + i + k;
                    }
                    ++to;
                }
                tie += is_tie;
            }
            const int step_total = __shfl_sync(~0u, both_until, 31);
            sure_before += step_total & 0xFFFF;
            ties_before += step_total >> 16;
        }
    }
    __syncthreads();
    return {list + begin, end - begin, tile1 - tile0, cut.n_taken == cut.n_candidates};
}

// --- what is left unread ---------------------------------------------------------------------------------------------

// The share of every head's estimated probability that the block's piece of the list has, to part_read. The whole block calls.
template <int WARPS>
__device__ __forceinline__ void tell_read(const SelectParams & p, int party, const ListPiece & piece,
                                          LookupShared<WARPS> & s) {
    constexpr int kHeads = 4;  // at a time, so that their scores are on the way together
    const int     lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float * score = p.score + int64_t(party) * p.gqa * p.stride;
#pragma unroll 1
    for (int j0 = 0; j0 < p.gqa; j0 += kHeads) {
        float sum[kHeads] = {};
        for (int i = threadIdx.x; i < piece.n; i += 32 * WARPS) {
            const int g = piece.list[i];
#pragma unroll
            for (int k = 0; k < kHeads; ++k) {
                const int j = min(j0 + k, p.gqa - 1);
                sum[k] += exp2_fast(__ldcg(score + int64_t(j) * p.stride + g) - s.log_sum[j]);
            }
        }
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            sum[k] = warp_reduce(sum[k], Sum());
            if (lane == 0 && j0 + k < p.gqa) {
                s.ml[warp][j0 + k].x = sum[k];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < p.gqa) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            sum += s.ml[w][threadIdx.x].x;
        }
        p.part_read[(int64_t(blockIdx.y) * p.n_head_kv * p.n_q + party) * p.gqa + threadIdx.x] = sum;
    }
}

// log2 of the estimated mass of the groups that head `j` of the party leaves unread, once all pieces have been told; at most kNoScore
// for none. The whole warp calls.
__device__ __forceinline__ float unread_mass(const SelectParams & p, int party, int j, float log_sum, bool all_taken) {
    if (all_taken) {  // what rounding leaves of 1 then is nothing
        return kNoScore;
    }
    float read = 0.0f;
    for (int i = threadIdx.x & 31; i < p.n_split; i += 32) {
        read += __ldcg(p.part_read + (int64_t(i) * p.n_head_kv * p.n_q + party) * p.gqa + j);
    }
    const float rest = 1.0f - warp_reduce(read, Sum());
    return rest > 0.0f ? log_sum + float(p.group_shift) + __log2f(rest) : kNoScore;
}

// --- all of it -------------------------------------------------------------------------------------------------------

// grid: x KV head, y split, z query; with several splits all blocks must be at work together. Returns the block's piece of the list
// (all of them together are the list) and the operands of the query's heads. Shared memory is free again afterwards but for
// the queries, and the party's arrivals are 2 * n_split (0 with one split).
template <int D, int NB, int WARPS>
__device__ __forceinline__ ListPiece look_up(const SelectParams & p, uint32_t * shared, LookupShared<WARPS> & s,
                                             uint32_t (&q)[NB][D / 32][4]) {
    using S         = LookupShape<D, NB, WARPS>;
    const int  head = blockIdx.x, query = blockIdx.z, party = query * p.n_head_kv + head;
    int *      count    = reinterpret_cast<int *>(shared + S::q_words);
    float *    score    = p.score + int64_t(party) * p.gqa * p.stride;
    float2 *   ml       = p.part_ml + (int64_t(blockIdx.y) * p.n_head_kv * p.n_q + party) * p.gqa;
    const bool several  = p.n_split > 1;
    uint32_t * arrivals = several ? &meeting_arrivals[p.meeting_slot][party] : nullptr;

    score_groups<D, NB, WARPS>(p, head, query, score, ml, shared, s, q);
    several ? arrive(arrivals) : __syncthreads();
    for (int b = threadIdx.x; b < kGridBins; b += S::threads) {
        count[b] = 0;
    }
    if (several) {
        wait_for(arrivals, p.n_split);
    }
    make_codes<WARPS>(p, party, score, count, s);
    if (several) {
        arrive(arrivals);
        wait_for(arrivals, 2 * p.n_split);
    } else {
        __syncthreads();
    }
    const Cut cut = find_cut<WARPS>(p, p.count + int64_t(party) * kGridBins, count, s);
    return list_piece<WARPS>(p, party, cut, s);
}

// Only the lists, and what they leave unread.
template <int D, int NB, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 1) select_groups(const __grid_constant__ SelectParams p) {
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ LookupShared<WARPS> s;
    __shared__ bool                last;
    uint32_t                       q[NB][D / 32][4];
    const ListPiece                piece = look_up<D, NB, WARPS>(p, shared, s, q);
    const int                      party = blockIdx.z * gridDim.x + blockIdx.x;
    let_next_begin();
    if (p.unread) {
        tell_read<WARPS>(p, party, piece, s);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        last = true;
        if (p.n_split > 1) {
            __threadfence();
            last = atomicAdd(&meeting_arrivals[p.meeting_slot][party], 1u) == 3u * p.n_split - 1;
            if (last) {
                leave_meetings(p, party);
            }
        }
    }
    __syncthreads();
    if (!p.unread || !last) {
        return;
    }
    __threadfence();
    for (int j = threadIdx.x >> 5; j < p.gqa; j += WARPS) {
        const float x = unread_mass(p, party, j, s.log_sum[j], piece.all_taken);
        if ((threadIdx.x & 31) == 0) {
            p.unread[int64_t(blockIdx.z) * p.n_head_kv * p.gqa + blockIdx.x * p.gqa + j] =
                x > kNoScore ? x * 0.69314718055994531f : -INFINITY;
        }
    }
}

}  // namespace device
}  // namespace kvfold
