// kv_sample and kv_sampled on CUDA.
//
// kv_sampled, after a look at the units (cells, or groups for windows) that says how old they are:
// 1. attend_samples<.., false>  sums of the softmax of every sample and head, by splits of the units
// 2. attend_samples<.., true>   once more, with those sums: what every unit gets. For windows from each eight samples of a head, of which
//                               two make a window; else from all samples and heads of a block together
// 3. weigh_windows              how sharp the attention of a head in a window is (not for the last queries)
// 4. write_sampled              scores of cells
// All sums have an order of their own, so that a repetition gives the same scores.
#include <algorithm>

#include "ops/attend_launch.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/launch.cuh"
#include "ops/row_scores_device.cuh"
#include "ops/scratch_plan.h"

namespace kvfold {

namespace {

using device::AttendParams;

// --- keeping queries -------------------------------------------------------------------------------------------------

// Layers of the same shape, of which only the memory and the rule differ.
constexpr int kSampleLayers = 128;

struct SampleParams {
    int64_t q_stride_query;
    int64_t q_stride_head;
    int32_t n_q;
    int32_t n_head;
    int32_t rot;
    struct {
        const float * q;
        uint16_t *    samples;
        SampleRule    rule;
    } layer[kSampleLayers];
};
static_assert(sizeof(SampleParams) <= 4096, "more than a launch may carry");

constexpr int kSampleWarps = 8;

// grid: x head, y layer. Warps share the queries; every head has a count of its own.
template <int D>
__global__ void __launch_bounds__(32 * kSampleWarps) sample(const __grid_constant__ SampleParams p) {
    const int        lane = threadIdx.x & 31, head = blockIdx.x;
    const auto &     layer = p.layer[blockIdx.y];
    const float *    q     = layer.q + head * p.q_stride_head;
    uint16_t *       rows  = layer.samples + head * D;
    const SampleRule rule  = layer.rule;
    auto *           count = reinterpret_cast<int64_t *>(rows);
    device::let_next_begin();
    device::wait_for_earlier();
    const int64_t seen = *count;
    __syncthreads();
    // The first query of this micro-batch that is kept and not overwritten by another one of it.
    const int64_t least = seen + max(0, p.n_q - rule.every * rule.rows);
    const int64_t first = (least + rule.every - 1) / rule.every * rule.every;
    const int     step  = rule.every * int(blockDim.x >> 5);
    for (int64_t n = first + (threadIdx.x >> 5) * rule.every; n < seen + p.n_q; n += step) {
        float x[D / 32];
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            x[c] = q[(n - seen) * p.q_stride_query + lane + 32 * c];
        }
        device::rotate_row(x, p.rot, lane);
        uint16_t * to = rows + (1 + n / rule.every % rule.rows) * int64_t(p.n_head) * D;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            to[lane + 32 * c] = __half_as_ushort(__float2half_rn(x[c]));
        }
    }
    if (threadIdx.x == 0) {
        *count = seen + p.n_q;
    }
}

template <int D>
void launch_sample(const SampleParams & p, int n_layers, cudaStream_t stream) {
    launch_early(sample<D>, dim3(p.n_head, n_layers), 32 * std::min(kSampleWarps, p.n_q), 0, stream, p);
}

// --- scores ----------------------------------------------------------------------------------------------------------

constexpr int kEight = 8, kEights = kWindowQueries.rows / kEight;  // samples that windows share
constexpr int kWindows = kEights - 1;
static_assert(kWindow == 2 * kStride && kStride == kEight * kWindowQueries.every, "a window is two eights");
static_assert(kWindowQueries.rows % 16 == 0 && kLastQueries.rows % 16 == 0, "16 rows of a warp are of one head");

// What is known of all units together; zero at first.
struct UnitTotals {
    int32_t n;       // that have far cells
    int32_t oldest;  // the greatest age
};

struct SampledParams {
    AttendParams    attend;   // rows, shapes, scale and softcap only
    const half *    samples;  // [1 + rule.rows][n_head][head_dim]
    const int32_t * cell_age;
    const float *   before;  // null: none; may be `scores`
    float *         scores;
    UnitTotals *    totals;
    int32_t *       age;     // [padded] of units; -1: no far cells, and a row that may be anything
    float *         count;   // [padded] log2 of their far cells
    float2 *        sums;    // [n_split][n_head_kv][blocks of rows * rows] maximum, sum of 2^(score - maximum)
    float *         share;   // windows: [n_head][kEights][padded], else [n_head_kv][blocks of rows][padded]
    float *         weight;  // windows: [n_head][kWindows]
    SampleRule      rule;
    int32_t         size;  // cells a unit
    int32_t         n_units;
    int32_t         padded;
    int32_t         n_blocks;  // of rows of a KV head
    int32_t         n_split;
};

constexpr int kUnitThreads = 256;

__device__ __forceinline__ bool is_far(const AttendParams & p, int cell) {
    return cell < p.n_kv && (__ldg(p.far_bits + cell / 32) >> (cell % 32) & 1u) != 0;
}

__global__ void __launch_bounds__(kUnitThreads) look_at_units(const __grid_constant__ SampledParams p) {
    const int unit = blockIdx.x * kUnitThreads + threadIdx.x;
    int       far = 0, age = INT32_MAX;  // of the youngest far cell
    for (int c = unit * p.size; c < min(p.attend.n_kv, (unit + 1) * p.size); ++c) {
        if (is_far(p.attend, c)) {
            far += 1;
            age = min(age, p.cell_age[c]);
        }
    }
    if (unit < p.padded) {
        p.age[unit]   = far > 0 ? age : -1;
        p.count[unit] = far > 0 ? __log2f(float(far)) : 0.0f;
    }
    const int n      = __popc(__ballot_sync(~0u, far > 0));
    const int oldest = device::warp_reduce(far > 0 ? age : 0, [](int a, int b) { return max(a, b); });
    if (threadIdx.x % 32 == 0 && n > 0) {
        atomicAdd(&p.totals->n, n);
        atomicMax(&p.totals->oldest, oldest);
    }
}

__device__ __forceinline__ int64_t queries_seen(const SampledParams & p) {
    return *reinterpret_cast<const int64_t *>(p.samples);
}

// The age of the i-th sample, the youngest first; INT32_MAX if there is none.
__device__ __forceinline__ int sample_age(const SampledParams & p, int64_t seen, int i) {
    const int64_t age = (seen - 1) % p.rule.every + int64_t(p.rule.every) * i;
    return seen > 0 && age < seen ? int(age) : INT32_MAX;
}

// How many of the samples `first` .. `first` + `n` - 1 see anything.
__device__ __forceinline__ int count_seeing(const SampledParams & p, int first, int n) {
    const int64_t seen = queries_seen(p);
    int           see  = 0;
    for (int i = first; i < first + n && p.totals->n > 0; ++i) {
        see += sample_age(p, seen, i) <= p.totals->oldest;
    }
    return see;
}

// A warp's rows: samples `sample` + lane / 4 and + 8 of a head. Rows of a KV head are those of its first query head, the youngest first, then
// of the next.
template <int D>
struct SampleRows {
    int                    q_head;
    int                    sample;
    int                    age[2];
    device::RowOperands<D> q;

    __device__ __forceinline__ SampleRows(const SampledParams & p, int head, int first, int lane) {
        const int  in_group = first / p.rule.rows;
        const bool exists   = in_group < p.attend.gqa;
        q_head              = head * p.attend.gqa + (exists ? in_group : 0);
        sample              = first % p.rule.rows;
        const int64_t seen  = queries_seen(p);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row      = sample + lane / 4 + 8 * i;
            age[i]             = exists ? sample_age(p, seen, row) : INT32_MAX;
            const bool    some = age[i] != INT32_MAX;
            const int64_t kept = some ? ((seen - 1) / p.rule.every - row) % p.rule.rows : 0;
            const half *  from =
                p.samples + ((1 + kept) * p.attend.n_head + q_head) * D + device::pair_channel(lane & 3);
#pragma unroll
            for (int w = 0; w < D / 8; ++w) {
                const half * x            = from + device::word_channel(w);
                const half2  y            = __halves2half2(x[0], x[2]);
                q[w / 2][2 * (w & 1) + i] = some ? *reinterpret_cast<const uint32_t *>(&y) : 0u;
            }
        }
    }
};

// grid: x block of rows, y KV head, z split
template <int D, bool WINDOWS, bool SHARES>
__global__ void __launch_bounds__(device::KeyTile<D>::threads, 2)
    attend_samples(const __grid_constant__ SampledParams p) {
    using S = device::KeyTile<D>;
    __shared__ device::KeyStages<D> shared;
    __shared__ __align__(16) float parts[device::KeyStages<D>::n][S::warps][S::keys];
    __shared__ float               log_sums[S::rows];
    const int                      lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y;
    const int                      row0 = blockIdx.x * S::rows, n_tiles = p.padded / S::keys;
    const int                      row1 = p.n_blocks * S::rows;  // of a KV head
    const SampleRows<D>            rows(p, head, row0 + 16 * warp, lane);

    device::FarKeyTiles<D, WINDOWS> keys(p.attend, head, p.n_units);

    const auto walk = [&](const auto & use, const auto & after) {
        device::walk_tiles<D>(
            keys, shared, n_tiles, rows.q, lane,
            [&](int tile) { return tile < 0 ? int(blockIdx.z) : tile + p.n_split; },
            [&](int tile, int stage, float (&s)[S::fragments][4]) {
                device::finish_scores(p.attend, p.attend.score_scale * device::kFp4Inverse, s);
#pragma unroll
                for (int n = 0; n < S::fragments; ++n) {
                    const int    unit  = tile * S::keys + 8 * n + 2 * (lane & 3);
                    const int2   age   = *reinterpret_cast<const int2 *>(p.age + unit);
                    const float2 count = *reinterpret_cast<const float2 *>(p.count + unit);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        s[n][2 * i]     = age.x >= rows.age[i] ? s[n][2 * i] + count.x : -INFINITY;
                        s[n][2 * i + 1] = age.y >= rows.age[i] ? s[n][2 * i + 1] + count.y : -INFINITY;
                    }
                }
                use(tile, stage, s);
            },
            after);
    };
    if constexpr (!SHARES) {
        device::RowSums sums;
        walk([&](int, int, const auto & s) { sums.add(s, [](int, int, int) { return false; }); }, [](int, int) {});
        sums.merge();
        if (lane % 4 == 0) {
            float2 * to = p.sums + (blockIdx.z * int64_t(p.attend.n_head_kv) + head) * row1 + row0 + 16 * warp;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                to[lane / 4 + 8 * i] = make_float2(sums.m[i], sums.all[i]);
            }
        }
    } else {
        for (int row = threadIdx.x; row < S::rows; row += S::threads) {
            float top = device::kNoScore, sum = 0.0f;
            for (int split = 0; split < p.n_split; ++split) {
                const float2 x = p.sums[(split * int64_t(p.attend.n_head_kv) + head) * row1 + row0 + row];
                const float  m = fmaxf(top, x.x);
                sum            = sum * device::exp2_fast(top - m) + x.y * device::exp2_fast(x.x - m);
                top            = m;
            }
            log_sums[row] = sum > 0.0f ? top + __log2f(sum) : INFINITY;
        }
        __syncthreads();
        const float log_sum[2] = {log_sums[16 * warp + lane / 4], log_sums[16 * warp + lane / 4 + 8]};
        const bool  exists     = row0 + 16 * warp < p.attend.gqa * p.rule.rows;
        const int   first_key  = 8 * (lane / 4 % S::fragments) + 2 * (lane & 3);
        const bool  writes     = lane / 4 < S::fragments;
        const auto  got        = [&](int i, float s) { return device::exp2_fast(s - log_sum[i]); };
        walk(
            [&](int tile, int stage, const auto & s) {
                float x[2 * S::fragments];
                if constexpr (WINDOWS) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
#pragma unroll
                        for (int j = 0; j < 2 * S::fragments; ++j) {
                            x[j] = got(i, s[j / 2][2 * i + j % 2]);
                        }
                        device::reduce_rows<S::fragments>(x, lane, device::Sum{});
                        if (exists && writes) {
                            const int64_t row = int64_t(rows.q_head) * kEights + rows.sample / kEight + i;
                            *reinterpret_cast<float2 *>(p.share + row * p.padded + tile * S::keys + first_key) =
                                make_float2(x[0], x[1]);
                        }
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < 2 * S::fragments; ++j) {
                        x[j] = got(0, s[j / 2][j % 2]) + got(1, s[j / 2][2 + j % 2]);
                    }
                    device::reduce_rows<S::fragments>(x, lane, device::Sum{});
                    if (writes) {
                        *reinterpret_cast<float2 *>(&parts[stage][warp][first_key]) = make_float2(x[0], x[1]);
                    }
                }
            },
            [&](int tile, int stage) {
                if (!WINDOWS && threadIdx.x < S::keys) {
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 0; i < S::warps; ++i) {
                        sum += parts[stage][i][threadIdx.x];
                    }
                    p.share[(int64_t(head) * p.n_blocks + blockIdx.x) * p.padded + tile * S::keys + threadIdx.x] = sum;
                }
            });
    }
}

// How much a window counts if any of its samples sees anything.
__device__ __forceinline__ float window_weight(int window) { return ldexpf(1.0f, -window); }

// grid: x head, y window. weight = 2^-window * (1 - H) / samples that see anything, or 0.
__global__ void __launch_bounds__(kUnitThreads) weigh_windows(const __grid_constant__ SampledParams p) {
    __shared__ float warp_sums[kUnitThreads / 32];
    const int        head = blockIdx.x, window = blockIdx.y;
    const int        see  = count_seeing(p, kEight * window, 2 * kEight);
    const float      each = see > 0 ? 1.0f / float(see) : 0.0f;
    const float *    a = p.share + (int64_t(head) * kEights + window) * p.padded, *b = a + p.padded;
    float            sum = 0.0f;
    for (int unit = threadIdx.x; unit < p.n_units; unit += kUnitThreads) {
        const float x = (a[unit] + b[unit]) * each;
        sum -= x > 0.0f ? x * __log2f(x) : 0.0f;
    }
    sum = device::warp_reduce(sum, device::Sum{});
    if (threadIdx.x % 32 == 0) {
        warp_sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float entropy = 0.0f;
#pragma unroll
        for (int i = 0; i < kUnitThreads / 32; ++i) {
            entropy += warp_sums[i];
        }
        const float sharp                  = p.totals->n > 1 ? 1.0f - entropy / __log2f(float(p.totals->n)) : 1.0f;
        p.weight[head * kWindows + window] = window_weight(window) * sharp * each;
    }
}

// grid: x cells, kUnitThreads at a time. Dynamic shared memory: what every row of `share` counts.
template <bool WINDOWS>
__global__ void __launch_bounds__(kUnitThreads) write_sampled(const __grid_constant__ SampledParams p) {
    extern __shared__ float counts[];
    const int               n_head = p.attend.n_head;
    const int               n_rows = WINDOWS ? n_head * kEights : p.attend.n_head_kv * p.n_blocks;
    float                   total  = 0.0f;
    float                   each   = 0.0f;
    if (WINDOWS) {
        for (int window = 0; window < kWindows; ++window) {
            total += count_seeing(p, kEight * window, 2 * kEight) > 0 ? window_weight(window) : 0.0f;
        }
    } else {
        const int see = count_seeing(p, 0, p.rule.rows);
        total         = see > 0 ? 1.0f : 0.0f;
        each          = see > 0 ? 1.0f / float(see) : 0.0f;
    }
    const float n = total > 0.0f ? float(p.totals->n) / (total * float(n_head)) : 0.0f;
    for (int row = threadIdx.x; row < n_rows; row += kUnitThreads) {
        if (WINDOWS) {
            const float * weight = p.weight + row / kEights * kWindows;
            const int     eight  = row % kEights;
            counts[row] = n * ((eight < kWindows ? weight[eight] : 0.0f) + (eight > 0 ? weight[eight - 1] : 0.0f));
        } else {
            counts[row] = n * each;
        }
    }
    __syncthreads();
    const int cell = blockIdx.x * kUnitThreads + threadIdx.x;
    if (cell >= p.attend.n_kv) {
        return;
    }
    float score = 0.0f;
    if (is_far(p.attend, cell)) {
        const float * share = p.share + cell / p.size;
#pragma unroll 4
        for (int row = 0; row < n_rows; ++row) {
            score += counts[row] * share[row * int64_t(p.padded)];
        }
    }
    p.scores[cell] = score + (p.before != nullptr ? p.before[cell] : 0.0f);
}

struct SampledPlan {
    int    size, n_units, padded, n_blocks, n_split;
    size_t totals, age, count, sums, share, weight;
    size_t bytes;

    SampledPlan(const SampledArgs & a, const CudaDevice & device) {
        const bool windows = a.score == SampledScore::windows;
        const int  keys    = a.mem.head_dim == 256 ? device::KeyTile<256>::keys : device::KeyTile<64>::keys;
        const int  heads = a.mem.n_head_kv, block = device::KeyTile<64>::rows;
        size     = windows ? a.mem.group : 1;
        n_units  = ceil_div(a.n_kv, size);
        padded   = ceil_div(n_units, keys) * keys;
        n_blocks = ceil_div(a.n_head / heads * sample_rule(a.score).rows, block);
        // two blocks a multiprocessor, but some tiles for each
        n_split = std::max(1, std::min(ceil_div(2 * device.n_sm, heads * n_blocks), ceil_div(padded, 4 * keys)));

        const size_t rows = windows ? size_t(a.n_head) * kEights : size_t(heads) * size_t(n_blocks);
        ScratchPlan  plan;
        totals = plan.reserve(sizeof(UnitTotals));
        age    = plan.reserve(size_t(padded) * sizeof(int32_t));
        count  = plan.reserve(size_t(padded) * sizeof(float));
        sums   = plan.reserve(size_t(n_split) * size_t(heads) * size_t(n_blocks) * size_t(block) * sizeof(float2));
        share  = plan.reserve(rows * size_t(padded) * sizeof(float));
        weight = plan.reserve(windows ? size_t(a.n_head) * kWindows * sizeof(float) : 0);
        bytes  = plan.bytes();
    }
};

SampledParams sampled_params(const SampledArgs & a, const SampledPlan & plan, uint8_t * scratch) {
    AttendArgs attend{};
    attend.mem      = a.mem;
    attend.far_bits = a.far_bits;
    attend.n_kv     = a.n_kv;
    attend.n_head   = a.n_head;
    attend.scale    = a.scale;
    attend.softcap  = a.softcap;
    SampledParams p{};
    p.attend = attend_params(attend);
    p.attend.score_scale *= a.scale;  // samples are not scaled
    p.samples  = reinterpret_cast<const half *>(a.samples);
    p.cell_age = a.age;
    p.before   = a.before;
    p.scores   = a.scores;
    p.totals   = reinterpret_cast<UnitTotals *>(scratch + plan.totals);
    p.age      = reinterpret_cast<int32_t *>(scratch + plan.age);
    p.count    = reinterpret_cast<float *>(scratch + plan.count);
    p.sums     = reinterpret_cast<float2 *>(scratch + plan.sums);
    p.share    = reinterpret_cast<float *>(scratch + plan.share);
    p.weight   = reinterpret_cast<float *>(scratch + plan.weight);
    p.rule     = sample_rule(a.score);
    p.size     = plan.size;
    p.n_units  = plan.n_units;
    p.padded   = plan.padded;
    p.n_blocks = plan.n_blocks;
    p.n_split  = plan.n_split;
    return p;
}

template <int D, bool WINDOWS>
void launch_sampled(const SampledParams & p, cudaStream_t stream) {
    (void) cudaMemsetAsync(p.totals, 0, sizeof(UnitTotals), stream);
    look_at_units<<<ceil_div(p.padded, kUnitThreads), kUnitThreads, 0, stream>>>(p);
    const dim3 grid(p.n_blocks, p.attend.n_head_kv, p.n_split);
    attend_samples<D, WINDOWS, false><<<grid, device::KeyTile<D>::threads, 0, stream>>>(p);
    attend_samples<D, WINDOWS, true><<<grid, device::KeyTile<D>::threads, 0, stream>>>(p);
    if (WINDOWS) {
        weigh_windows<<<dim3(p.attend.n_head, kWindows), kUnitThreads, 0, stream>>>(p);
    }
    const int rows = WINDOWS ? p.attend.n_head * kEights : p.attend.n_head_kv * p.n_blocks;
    write_sampled<WINDOWS>
        <<<ceil_div(p.attend.n_kv, kUnitThreads), kUnitThreads, size_t(rows) * sizeof(float), stream>>>(p);
}

template <int D>
void launch_sampled(const SampledArgs & a, const SampledParams & p, cudaStream_t stream) {
    a.score == SampledScore::windows ? launch_sampled<D, true>(p, stream) : launch_sampled<D, false>(p, stream);
}

}  // namespace

void kv_sample_cuda(const std::vector<SampleArgs> & layers, cudaStream_t stream) {
    for (size_t first = 0, n = 0; first < layers.size(); first += n) {
        const SampleArgs & a = layers[first];
        SampleParams       p{};
        p.q_stride_query = a.q_stride_query;
        p.q_stride_head  = a.q_stride_head;
        p.n_q            = a.n_q;
        p.n_head         = a.n_head;
        p.rot            = a.rot;
        for (n = 0; n < kSampleLayers && first + n < layers.size() && same_shape(a, layers[first + n]); ++n) {
            p.layer[n] = {layers[first + n].q, layers[first + n].samples, layers[first + n].rule};
        }
        if (a.n_q == 0) {
            continue;
        }
        switch (a.head_dim) {
        case 64:
            launch_sample<64>(p, int(n), stream);
            break;
        case 128:
            launch_sample<128>(p, int(n), stream);
            break;
        case 256:
            launch_sample<256>(p, int(n), stream);
            break;
        default:
            break;  // kv_ops_cuda_refusal() names it
        }
    }
}

size_t kv_sampled_cuda_scratch(const SampledArgs & a, const CudaDevice & device) {
    return SampledPlan(a, device).bytes;
}

void kv_sampled_cuda(const SampledArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream) {
    if (a.n_kv == 0) {
        return;
    }
    const SampledParams p = sampled_params(a, SampledPlan(a, device), static_cast<uint8_t *>(scratch));
    switch (a.mem.head_dim) {
    case 64:
        return launch_sampled<64>(a, p, stream);
    case 128:
        return launch_sampled<128>(a, p, stream);
    case 256:
        return launch_sampled<256>(a, p, stream);
    default:
        return;  // kv_ops_cuda_refusal() names it
    }
}

}  // namespace kvfold
