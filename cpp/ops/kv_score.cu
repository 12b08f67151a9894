// kv_score and kv_observe on CUDA.
#include <algorithm>
#include <cmath>

#include "ops/attend_launch.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/launch.cuh"
#include "ops/score_device.cuh"
#include "ops/scratch_plan.h"

namespace kvfold {

namespace {

using device::ScoreParams;

// Query heads a block of read_rows() handles.
int query_heads(const ScoreArgs & a) { return std::min(4, a.n_head / a.mem.n_head_kv); }

struct ScorePlan {
    int    n_split;
    size_t part, count, cosine, size, logit, part_size, part_ml;
    size_t bytes;

    ScorePlan(const ScoreArgs & a, const CudaDevice & device) {
        const int64_t heads = a.mem.n_head_kv, n_head = a.queries != nullptr ? a.n_head : 0;
        const int     warps = device::RowsShape<64, 1>::warps;
        // three blocks a multiprocessor, but some tiles for every warp
        const int chunks = ceil_div(int(a.n_head / heads), query_heads(a));
        n_split = std::max(1, std::min(ceil_div(3 * device.n_sm, int(heads) * chunks), ceil_div(a.n_kv, 32 * warps)));
        const auto  floats = [](int64_t n) { return size_t(n) * sizeof(float); };
        ScratchPlan plan;
        part      = plan.reserve(floats(device::kSumSlices * heads * a.mem.head_dim));
        count     = plan.reserve(device::kSumSlices * sizeof(int32_t));
        cosine    = plan.reserve(floats(heads * a.n_kv));
        size      = plan.reserve(floats(heads * a.n_kv));
        logit     = plan.reserve(floats(n_head * a.n_kv));
        part_size = plan.reserve(floats(n_split * heads));
        part_ml   = plan.reserve(floats(2 * n_split * n_head));
        bytes     = plan.bytes();
    }
};

ScoreParams score_params(const ScoreArgs & a, const ScorePlan & plan, uint8_t * scratch) {
    ScoreParams p{};
    p.far_k       = reinterpret_cast<const uint32_t *>(a.mem.far_k);
    p.far_v       = reinterpret_cast<const uint32_t *>(a.mem.far_v);
    p.summary     = reinterpret_cast<const uint32_t *>(a.mem.side);
    p.far_bits    = a.far_bits;
    p.queries     = a.queries;
    p.before      = a.before;
    p.scores      = a.scores;
    p.part        = reinterpret_cast<float *>(scratch + plan.part);
    p.count       = reinterpret_cast<int32_t *>(scratch + plan.count);
    p.cosine      = reinterpret_cast<float *>(scratch + plan.cosine);
    p.size        = reinterpret_cast<float *>(scratch + plan.size);
    p.logit       = reinterpret_cast<float *>(scratch + plan.logit);
    p.part_size   = reinterpret_cast<float *>(scratch + plan.part_size);
    p.part_ml     = reinterpret_cast<float2 *>(scratch + plan.part_ml);
    p.n_head_kv   = a.mem.n_head_kv;
    p.n_head      = a.n_head;
    p.gqa         = a.n_head / a.mem.n_head_kv;
    p.n_kv        = a.n_kv;
    p.n_groups    = ceil_div(a.n_kv, a.mem.group);
    p.group_shift = log2_of(a.mem.group);
    p.n_split     = plan.n_split;
    p.scale       = a.scale;
    p.softcap     = a.softcap;

    p.scale_shift  = log2_of(a.mem.scale_group);
    p.far_k_scales = a.mem.far_k + far_scales_offset(a.mem);
    p.far_v_scales = a.mem.far_v + far_scales_offset(a.mem);
    return p;
}

template <int D, int QC>
void launch_rows(const ScoreParams & p, cudaStream_t stream) {
    using S           = device::RowsShape<D, QC>;
    const bool fine   = p.scale_shift == device::kFineShift;
    const auto kernel = fine ? device::read_rows<D, QC, false> : device::read_rows<D, QC, true>;
    const int  bytes  = S::shared_bytes(p.group_shift);
    const dim3 grid(p.n_head_kv, p.n_split, p.queries != nullptr ? ceil_div(p.gqa, QC) : 1);
    (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<grid, S::threads, bytes, stream>>>(p);
}

template <int D>
void launch_score(const ScoreParams & p, int query_heads, cudaStream_t stream) {
    device::sum_summaries<D><<<dim3(p.n_head_kv, device::kSumSlices), 32 * device::kSumWarps, 0, stream>>>(p);
    if (query_heads == 1) {
        launch_rows<D, 1>(p, stream);
    } else if (query_heads == 2) {
        launch_rows<D, 2>(p, stream);
    } else {
        launch_rows<D, 4>(p, stream);
    }
    const size_t totals = size_t(p.n_head_kv + p.n_head) * sizeof(float);
    device::write_scores<<<ceil_div(p.n_kv, device::kScoreThreads), device::kScoreThreads, totals, stream>>>(p);
}

// Layers of the same shape, of which only the memory differs.
constexpr int kObserveLayers = 128;

struct ObserveParams {
    int64_t q_stride_query;
    int64_t q_stride_head;
    int32_t n_q;
    int32_t n_head;
    int32_t rot;
    float   log2_decay;
    float   all;    // decay^n_q
    float   added;  // to the weight
    struct {
        const float * q;
        float *       queries;
    } layer[kObserveLayers];
};
static_assert(sizeof(ObserveParams) <= 4096, "more than a launch may carry");

template <int D>
constexpr int kObserveWarps = D == 256 ? 8 : 16;

// grid: x head, y layer. Warps share the queries.
template <int D>
__global__ void __launch_bounds__(32 * kObserveWarps<D>) observe(const __grid_constant__ ObserveParams p) {
    __shared__ float sums[kObserveWarps<D>][2 * D];
    const int        lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5, head = blockIdx.x;
    const float *    q           = p.layer[blockIdx.y].q + head * p.q_stride_head;
    float *          queries     = p.layer[blockIdx.y].queries;
    float            sum[D / 32] = {}, square[D / 32] = {};
    device::let_next_begin();
    device::wait_for_earlier();
#pragma unroll 4
    for (int i = warp; i < p.n_q; i += n_warps) {
        float x[D / 32];
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            x[c] = q[i * p.q_stride_query + lane + 32 * c];
        }
        device::rotate_row(x, p.rot, lane);
        const float weight = device::exp2_fast(p.log2_decay * float(p.n_q - 1 - i));
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            sum[c] += weight * x[c];
            square[c] += weight * x[c] * x[c];
        }
    }
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
        sums[warp][lane + 32 * c]     = sum[c];
        sums[warp][D + lane + 32 * c] = square[c];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * D; i += blockDim.x) {
        float total = 0.0f;
        for (int w = 0; w < n_warps; ++w) {
            total += sums[w][i];
        }
        float & to = queries[1 + (int64_t(i / D) * p.n_head + head) * D + i % D];
        to         = to * p.all + total;
    }
    if (head == 0 && threadIdx.x == 0) {
        queries[0] = queries[0] * p.all + p.added;
    }
}

template <int D>
void launch_observe(const ObserveParams & p, int n_layers, cudaStream_t stream) {
    launch_early(observe<D>, dim3(p.n_head, n_layers), 32 * std::min(kObserveWarps<D>, p.n_q), 0, stream, p);
}

}  // namespace

size_t kv_score_cuda_scratch(const ScoreArgs & a, const CudaDevice & device) { return ScorePlan(a, device).bytes; }

void kv_score_cuda(const ScoreArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream) {
    if (a.n_kv == 0) {
        return;
    }
    const ScoreParams p = score_params(a, ScorePlan(a, device), static_cast<uint8_t *>(scratch));
    switch (a.mem.head_dim) {
    case 64:
        return launch_score<64>(p, query_heads(a), stream);
    case 128:
        return launch_score<128>(p, query_heads(a), stream);
    case 256:
        return launch_score<256>(p, query_heads(a), stream);
    default:
        return;  // kv_ops_cuda_refusal() names it
    }
}

void kv_observe_cuda(const std::vector<ObserveArgs> & layers, cudaStream_t stream) {
    for (size_t first = 0, n = 0; first < layers.size(); first += n) {
        const ObserveArgs & a   = layers[first];
        const double        all = std::pow(double(kQueryDecay), a.n_q);
        ObserveParams       p{};
        p.q_stride_query = a.q_stride_query;
        p.q_stride_head  = a.q_stride_head;
        p.n_q            = a.n_q;
        p.n_head         = a.n_head;
        p.rot            = a.rot;
        p.log2_decay     = float(std::log2(double(kQueryDecay)));
        p.all            = float(all);
        p.added          = float((1.0 - all) / (1.0 - double(kQueryDecay)));
        for (n = 0; n < kObserveLayers && first + n < layers.size() && same_shape(a, layers[first + n]); ++n) {
            p.layer[n].q       = layers[first + n].q;
            p.layer[n].queries = layers[first + n].queries;
        }
        if (a.n_q == 0) {
            continue;
        }
        switch (a.head_dim) {
        case 64:
            launch_observe<64>(p, int(n), stream);
            break;
        case 128:
            launch_observe<128>(p, int(n), stream);
            break;
        case 256:
            launch_observe<256>(p, int(n), stream);
            break;
        default:
            break;  // kv_ops_cuda_refusal() names it
        }
    }
}

}  // namespace kvfold
