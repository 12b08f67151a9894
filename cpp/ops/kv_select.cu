// kv_select on CUDA, alone and with the attention over what it chooses: how many splits, where the scratch goes.
#include <algorithm>

#include "ops/attend_decode.cuh"
#include "ops/attend_launch.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/select_device.cuh"

namespace kvfold {

namespace {

using device::AttendParams;
using device::SelectParams;

// Choosing and attending are a launch each where so few tokens are read: the code of both in one launch then costs more than a
// second launch (bench/cuda/NOTES.md, look-up 8).
constexpr float kFewTokens = 4096.0f;

// Where the parts of the scratch are.
struct SelectPlan {
    int    stride;
    int    n_split;
    size_t code, count, part_ml;  // scores first
    size_t part_read;             // only with SelectArgs::unread
    size_t part, attend_ml;       // only with the attention
    size_t bytes;
};

size_t reserve(size_t & bytes, size_t n) {
    const size_t at = bytes;
    bytes           = (at + n + 255) / 256 * 256;
    return at;
}

// Does the mean value stand in for what a look-up leaves unread?
bool stands_in(const SelectArgs & a) {
    return a.unread != nullptr && can_stand_in(a.mem.head_dim, a.n_head / a.mem.n_head_kv);
}

// Blocks meet, so there are no more than multiprocessors, unless each has a list to itself. `attend`: with the attention.
SelectPlan make_plan(const SelectArgs & a, const CudaDevice & device, bool attend) {
    const size_t parties = size_t(a.n_q) * a.mem.n_head_kv, gqa = a.n_head / a.mem.n_head_kv;
    SelectPlan   p{};
    const int    tiles = ceil_div(ceil_div(a.n_kv, a.mem.group), device::kScoreTile);
    p.stride           = tiles * device::kScoreTile;
    p.n_split          = parties <= device::kArrivals ? std::max(1, device.n_sm / int(parties)) : 1;
    (void) reserve(p.bytes, parties * gqa * p.stride * sizeof(float));
    p.code    = reserve(p.bytes, parties * p.stride * sizeof(uint16_t));
    p.count   = reserve(p.bytes, parties * device::kGridBins * sizeof(int32_t));
    p.part_ml = reserve(p.bytes, parties * gqa * p.n_split * sizeof(float2));
    if (a.unread != nullptr) {
        p.part_read = reserve(p.bytes, parties * gqa * p.n_split * sizeof(float));
    }
    if (attend) {
        const size_t rows = parties * (gqa + (stands_in(a) ? 1 : 0)) * p.n_split;
        p.part            = reserve(p.bytes, rows * a.mem.head_dim * sizeof(float));
        p.attend_ml       = reserve(p.bytes, rows * sizeof(float2));
    }
    return p;
}

SelectParams select_params(const SelectArgs & a, const SelectPlan & plan, uint8_t * scratch) {
    const SideLayout side = side_layout(a.mem);
    SelectParams     p{};
    p.summary        = reinterpret_cast<const uint32_t *>(a.mem.side);
    p.spread         = reinterpret_cast<const half *>(a.mem.side + side.spread_offset);
    p.far_bits       = a.far_bits;
    p.mask           = reinterpret_cast<const half *>(a.mask);
    p.q              = a.q;
    p.score          = reinterpret_cast<float *>(scratch);
    p.code           = reinterpret_cast<uint16_t *>(scratch + plan.code);
    p.count          = reinterpret_cast<int32_t *>(scratch + plan.count);
    p.part_ml        = reinterpret_cast<float2 *>(scratch + plan.part_ml);
    p.selected       = a.selected;
    p.counters       = a.counters;
    p.unread         = a.unread;
    p.part_read      = reinterpret_cast<float *>(scratch + plan.part_read);
    p.mask_stride    = a.mask_stride;
    p.q_stride_query = a.q_stride_query;
    p.q_stride_head  = a.q_stride_head;
    p.budget         = a.budget;
    p.n_head_kv      = a.mem.n_head_kv;
    p.gqa            = a.n_head / a.mem.n_head_kv;
    p.n_q            = a.n_q;
    p.n_kv           = a.n_kv;
    p.n_groups       = ceil_div(a.n_kv, a.mem.group);
    p.stride         = plan.stride;
    p.n_split        = plan.n_split;
    p.capacity       = a.capacity;
    p.list_stride    = int32_t(group_list_stride(a.capacity));
    p.group_shift    = log2_of(a.mem.group);
    p.rot_k          = a.rot.k;
    p.scale          = a.scale;
    p.softcap        = a.softcap;
    return p;
}

template <int D, int NB, int WARPS>
void launch_shape(const SelectParams & p, const AttendParams * attend, cudaStream_t stream) {
    using S = device::DecodeShape<D, NB, WARPS>;
    const dim3 grid(p.n_head_kv, p.n_split, p.n_q);
    // Blocks that wait for one another must all get a multiprocessor. Two such launches of different streams could each have some and
    // wait for the rest; so all streams but the first ask the device to see to it.
    const bool together = p.meeting_slot > 0;
    if (attend != nullptr) {
        const auto kernel = device::attend_looked_up<D, NB, WARPS>;
        const int  bytes  = S::shared_bytes(1 << p.group_shift);
        (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        launch_kernel(together, kernel, grid, S::threads, bytes, stream, *attend, p);
    } else {
        const auto    kernel = device::select_groups<D, NB, WARPS>;
        constexpr int bytes  = device::LookupShape<D, NB, WARPS>::shared_bytes;
        static_assert(bytes <= 99 * 1024 - 8192, "more than consumer devices have");
        (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        launch_kernel(together, kernel, grid, S::threads, bytes, stream, p);
    }
}

template <int D, int NB>
void launch_columns(const SelectParams & p, const AttendParams * attend, cudaStream_t stream) {
    constexpr int wide = device::decode_warps(D, NB, false, true), narrow = device::decode_warps(D, NB, false, false);
    if constexpr (wide != narrow) {
        if (p.group_shift >= 2) {  // or else the tiles of so many warps do not fit the shared memory of all devices
            return launch_shape<D, NB, wide>(p, attend, stream);
        }
    }
    launch_shape<D, NB, narrow>(p, attend, stream);
}

void launch(const SelectArgs & a, const SelectParams & p, const AttendParams * attend, cudaStream_t stream) {
    const bool one = column_blocks(a.mem.head_dim, p.gqa, attend != nullptr && attend->stands_in) == 1;
    switch (a.mem.head_dim) {
    case 64:
        return one ? launch_columns<64, 1>(p, attend, stream) : launch_columns<64, 2>(p, attend, stream);
    case 128:
        return one ? launch_columns<128, 1>(p, attend, stream) : launch_columns<128, 2>(p, attend, stream);
    case 256:
        return launch_columns<256, 1>(p, attend, stream);
    default:
        return;  // kv_ops_cuda_refusal() names it
    }
}

// Where the meetings of a launch are counted; without such a place every list is made by one block.
void give_slot(SelectParams & p, cudaStream_t stream) {
    p.meeting_slot = p.n_split > 1 ? arrival_slot(stream) : -1;
    p.n_split      = p.meeting_slot < 0 ? 1 : p.n_split;
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
    if (a.ready != nullptr) {
        return "a search in two levels is slower than one level there";  // bench/cuda/NOTES.md
    }
    if (gqa > device::kMaxGqa || (a.mem.head_dim == 256 && gqa > 8)) {
        return "more than 16 heads a KV head (8 at head size 256)";
    }
    return nullptr;
}

bool kv_select_cuda_reads_few(const SelectArgs & a) {
    const float most = a.budget.lookup_max * float(a.n_kv);
    return (a.budget.max_tokens > 0 ? std::min(most, float(a.budget.max_tokens)) : most) <= kFewTokens;
}

size_t kv_select_cuda_scratch(const SelectArgs & a, const CudaDevice & device) {
    return make_plan(a, device, false).bytes;
}

void kv_select_cuda(const SelectArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream) {
    SelectParams p = select_params(a, make_plan(a, device, false), static_cast<uint8_t *>(scratch));
    give_slot(p, stream);
    launch(a, p, nullptr, stream);
}

size_t kv_select_attend_cuda_scratch(const SelectArgs & a, const SparseAttendArgs & b, const CudaDevice & device) {
    return std::max(make_plan(a, device, true).bytes, kv_attend_sparse_cuda_scratch(b, device));
}

void kv_select_attend_cuda(const SelectArgs & a, const SparseAttendArgs & b, const CudaDevice & device, void * scratch,
                           cudaStream_t stream) {
    const SelectPlan plan = make_plan(a, device, true);
    SelectParams     p    = select_params(a, plan, static_cast<uint8_t *>(scratch));
    give_slot(p, stream);
    // The kernel that does both is there for rows with a scale for 16 channels only.
    if (p.n_split == 1 || b.attend.cur.n_rows > device::kSharedRows || kv_select_cuda_reads_few(a) ||
        b.attend.mem.scale_group != kFp4ScaleGroup) {
        launch(a, p, nullptr, stream);
        return kv_attend_sparse_cuda(b, true, device, scratch, stream);
    }
    AttendParams q = attend_params(b.attend);
    q.part         = reinterpret_cast<float *>(static_cast<uint8_t *>(scratch) + plan.part);
    q.part_ml      = reinterpret_cast<float2 *>(static_cast<uint8_t *>(scratch) + plan.attend_ml);
    q.n_split      = p.n_split;
    q.arrival_slot = p.meeting_slot;
    q.stands_in    = stands_in(a);
    q.part_rows += q.stands_in ? a.n_q * a.mem.n_head_kv : 0;
    launch(a, p, &q, stream);
}

}  // namespace kvfold
