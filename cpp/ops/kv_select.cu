// kv_select on CUDA: how many splits, where its scratch goes.
#include "ops/kv_ops_cuda.h"
#include "ops/select_device.cuh"

namespace kvfold {

namespace {

struct SelectPlan {
    int    n_groups;
    int    score_stride;
    int    n_split;
    int    n_chunks;
    size_t ml_offset;
    size_t max_offset;
    size_t scratch;
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

SelectPlan make_plan(const SelectArgs & a, const CudaDevice & device) {
    const int  columns = a.n_q * (a.n_head / a.mem.n_head_kv);
    SelectPlan p{};
    p.n_groups     = ceil_div(a.n_kv, a.mem.group);
    p.score_stride = (p.n_groups + 31) / 32 * 32;
    const int room = device.n_sm / a.mem.n_head_kv, tiles = ceil_div(p.n_groups, device::kScoreTile);
    const int warps = a.mem.head_dim == 256 ? 8 : 16, most = ceil_div(tiles, warps);
    p.n_split    = room < 1 ? 1 : room < most ? room : most;
    p.n_split    = p.n_split < 1 ? 1 : p.n_split;
    p.ml_offset  = size_t(a.mem.n_head_kv) * columns * p.score_stride * sizeof(float);
    p.max_offset = p.ml_offset + size_t(p.n_split) * a.mem.n_head_kv * columns * sizeof(float2);
    p.n_chunks   = ceil_div(p.score_stride, device::kMassGroups);
    p.scratch    = p.max_offset + size_t(a.mem.n_head_kv) * a.n_q * p.n_chunks * sizeof(float);
    return p;
}

template <int D, int NB>
void launch_score(const device::SelectParams & p, cudaStream_t stream) {
    using S           = device::ScoreShape<D, NB>;
    const auto kernel = device::select_score<D, NB>;
    static_assert(S::shared_bytes <= 99 * 1024 - 4096, "more than consumer devices have");
    (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared_bytes);
    launch_early(kernel, dim3(p.n_head_kv, p.n_split), S::threads, S::shared_bytes, stream, p);
}

template <int D>
void launch(const device::SelectParams & p, cudaStream_t stream) {
    p.n_q * p.gqa <= 8 ? launch_score<D, 1>(p, stream) : launch_score<D, 2>(p, stream);
    launch_early(device::select_mass, dim3(p.n_head_kv, p.n_chunks, p.n_q), device::kMassThreads, 0, stream, p);
    launch_early(device::select_pick, dim3(p.n_head_kv, p.n_q), device::kPickThreads, 0, stream, p);
}

}  // namespace

const char * kv_select_cuda_refusal(const SelectArgs & a, const CudaDevice & device) {
    const int gqa = a.n_head / a.mem.n_head_kv;
    if (device.arch < 80) {
        return "look-up needs compute capability 8.0";
    }
    if (a.pool != nullptr) {
        return "pools of candidates are not there yet";
    }
    if (a.n_q * gqa > 16 || (a.mem.head_dim == 256 && gqa > 8)) {
        return "more than 16 columns (8 heads a KV head at head size 256)";
    }
    return nullptr;
}

size_t kv_select_cuda_scratch(const SelectArgs & a, const CudaDevice & device) { return make_plan(a, device).scratch; }

void kv_select_cuda(const SelectArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream) {
    const SelectPlan     plan = make_plan(a, device);
    const SideLayout     side = side_layout(a.mem.n_head_kv, a.mem.head_dim, a.mem.n_cells / a.mem.group);
    device::SelectParams p{};
    p.summary        = reinterpret_cast<const uint32_t *>(a.mem.side);
    p.spread         = reinterpret_cast<const half *>(a.mem.side + side.spread_offset);
    p.far_bits       = a.far_bits;
    p.mask           = reinterpret_cast<const half *>(a.mask);
    p.q              = a.q;
    p.score          = static_cast<float *>(scratch);
    p.part_ml        = reinterpret_cast<float2 *>(static_cast<uint8_t *>(scratch) + plan.ml_offset);
    p.part_max       = reinterpret_cast<float *>(static_cast<uint8_t *>(scratch) + plan.max_offset);
    p.n_chunks       = plan.n_chunks;
    p.selected       = a.selected;
    p.counters       = a.counters;
    p.mask_stride    = a.mask_stride;
    p.q_stride_query = a.q_stride_query;
    p.q_stride_head  = a.q_stride_head;
    p.budget         = a.budget;
    p.n_head_kv      = a.mem.n_head_kv;
    p.gqa            = a.n_head / a.mem.n_head_kv;
    p.n_q            = a.n_q;
    p.n_kv           = a.n_kv;
    p.n_groups       = plan.n_groups;
    p.score_stride   = plan.score_stride;
    p.n_split        = plan.n_split;
    p.capacity       = a.capacity;
    p.list_stride    = int32_t(group_list_stride(a.capacity));
    p.rot_k          = a.rot.k;
    p.scale          = a.scale;
    p.softcap        = a.softcap;
    for (p.group_shift = 0; (1 << p.group_shift) < a.mem.group;) {
        ++p.group_shift;
    }
    switch (a.mem.head_dim) {
    case 64:
        return launch<64>(p, stream);
    case 128:
        return launch<128>(p, stream);
    case 256:
        return launch<256>(p, stream);
    default:
        return;
    }
}

}  // namespace kvfold
