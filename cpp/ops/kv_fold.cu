// kv_fold on CUDA, alone and together with kv_store.
#include <type_traits>

#include "ops/fold_device.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/launch.cuh"
#include "ops/rotate_device.cuh"
#include "ops/store_device.cuh"

namespace kvfold {

namespace {

using device::FoldParams;
using device::FoldPart;
using device::kFoldThreads;
using device::let_next_begin;
using device::StoreParams;
using device::wait_for_earlier;

FoldParams fold_params(const FoldArgs & a) {
    FoldParams       p{};
    const SideLayout side = side_layout(a.mem);
    p.mem                 = a.mem;
    p.cur                 = a.cur;
    p.rot                 = a.rot;
    p.spread              = reinterpret_cast<uint16_t *>(a.mem.side + side.spread_offset);
    return p;
}

// grid: x planned group (padding included), y KV head, z keys or values
template <int PIECES>
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ FoldParams p, const int32_t * plan, const int32_t * n_real) {
    extern __shared__ float shared[];
    if (n_real != nullptr && int(blockIdx.x) >= *n_real) {
        return;
    }
    const bool             keys = FoldPart(blockIdx.z) == FoldPart::keys;
    const device::HeadRows current{(keys ? p.cur.k : p.cur.v) + blockIdx.y * p.mem.head_dim,
                                   keys ? p.cur.k_stride : p.cur.v_stride};
    device::fold_group<PIECES>(p, current, plan + blockIdx.x * (1 + p.mem.group), blockIdx.y, FoldPart(blockIdx.z),
                               shared);
}

// Layers of the same shape, of which only the memory differs.
constexpr int kCommitLayers = 48;  // parameters of a kernel are 4 KiB at most

struct CommitMemory {
    uint8_t *     far_k;
    uint8_t *     far_v;
    uint8_t *     side;
    uint16_t *    near_k;
    const float * cur_k;
    const float * cur_v;
    int32_t *     epoch;
};

struct CommitParams {
    FoldParams      fold;  // of the first layer
    StoreParams     store;
    const int32_t * plan;
    const int32_t * n_real;
    size_t          spread_offset;
    int64_t         near_values;  // from keys of the pool to its values
    int32_t         capacity;
    CommitMemory    layer[kCommitLayers];
};
static_assert(sizeof(CommitParams) <= 4096, "more than a launch may carry");

// grid: x KV head, y keys or values, z layer. A head's part of a pool row is read by its own folds and overwritten by its own
// stores only, so the order within a block is all the order there needs to be. Dynamic shared memory: the rows of the
// micro-batch, then what fold_group() wants.
template <int D, int PIECES>
__global__ void __launch_bounds__(kFoldThreads) commit_kernel(const __grid_constant__ CommitParams c) {
    extern __shared__ float shared[];
    const bool              keys  = FoldPart(blockIdx.y) == FoldPart::keys;
    const int               lane  = threadIdx.x & 31;
    const CommitMemory &    layer = c.layer[blockIdx.z];
    FoldParams              p     = c.fold;
    p.mem.far_k = layer.far_k, p.mem.far_v = layer.far_v, p.mem.side = layer.side;
    p.mem.near_k = layer.near_k, p.mem.near_v = layer.near_k + c.near_values;
    p.spread      = reinterpret_cast<uint16_t *>(layer.side + c.spread_offset);
    StoreParams s = c.store;
    s.near_k = p.mem.near_k, s.near_v = p.mem.near_v, s.epoch.to = layer.epoch;
    const int64_t stride = keys ? p.cur.k_stride : p.cur.v_stride;
    const float * from   = (keys ? layer.cur_k : layer.cur_v) + blockIdx.x * D;
    let_next_begin();
    wait_for_earlier();
    for (int row = threadIdx.x / 32; row < s.n_rows; row += kFoldThreads / 32) {
        float x[D / 32];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            x[i] = from[row * stride + lane + 32 * i];
        }
        device::rotate_row(x, keys ? p.rot.k : p.rot.v, lane);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            shared[row * D + lane + 32 * i] = x[i];
        }
    }
    __syncthreads();
    const int n = c.n_real != nullptr ? min(*c.n_real, c.capacity) : c.capacity;
    for (int i = 0; i < n; ++i) {
        device::fold_group<PIECES>(p, {shared, D}, c.plan + i * (1 + p.mem.group), blockIdx.x, FoldPart(blockIdx.y),
                                   shared + s.n_rows * D);
    }
    __syncthreads();
    for (int r = 0; r < s.n_rows; ++r) {
        device::store_row(s, r, shared + r * D, keys, blockIdx.x * D, D);
    }
    device::write_epoch(s);
}

// Calls use() with the PIECES of a layer as an integral constant.
template <typename Use>
void with_pieces(const LayerMemory & mem, const Use & use) {
    switch (mem.scale_group) {
    case 32:
        return use(std::integral_constant<int, 2>{});
    case 64:
        return use(std::integral_constant<int, 4>{});
    default:
        return use(std::integral_constant<int, 1>{});
    }
}

template <int D>
void launch_commit(const CommitParams & c, int n_layers, cudaStream_t stream) {
    const size_t bytes = device::fold_shared_bytes(c.fold.mem) + size_t(c.store.n_rows) * D * sizeof(float);
    with_pieces(c.fold.mem, [&](auto pieces) {
        const auto kernel = commit_kernel<D, decltype(pieces)::value>;
        (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
        launch_early(kernel, dim3(c.fold.mem.n_head_kv, 2, n_layers), kFoldThreads, bytes, stream, c);
    });
}

// Can they share a launch?
bool same_shape(const CommitArgs & a, const CommitArgs & b) {
    const LayerMemory &x = a.fold.mem, &y = b.fold.mem;
    const CurrentRows &r = a.fold.cur, &q = b.fold.cur;
    return x.n_head_kv == y.n_head_kv && x.head_dim == y.head_dim && x.group == y.group && x.n_cells == y.n_cells &&
           x.scale_group == y.scale_group && x.near_v - x.near_k == y.near_v - y.near_k && r.k_stride == q.k_stride &&
           r.v_stride == q.v_stride && r.n_rows == q.n_rows && a.fold.rot.k == b.fold.rot.k &&
           a.fold.rot.v == b.fold.rot.v && a.fold.plan == b.fold.plan && a.store.dst == b.store.dst &&
           a.fold.n_groups == b.fold.n_groups;
}

}  // namespace

void kv_fold_cuda(const FoldArgs & a, const int32_t * n_real, cudaStream_t stream) {
    if (a.n_groups == 0) {
        return;
    }
    const dim3 grid(a.n_groups, a.mem.n_head_kv, 2);
    with_pieces(a.mem, [&](auto pieces) {
        fold_kernel<decltype(pieces)::value>
            <<<grid, kFoldThreads, device::fold_shared_bytes(a.mem), stream>>>(fold_params(a), a.plan, n_real);
    });
}

void kv_commit_cuda(const std::vector<CommitArgs> & layers, const int32_t * n_real, const int32_t * epoch,
                    cudaStream_t stream) {
    for (size_t first = 0, n = 0; first < layers.size(); first += n) {
        const CommitArgs &  a   = layers[first];
        const LayerMemory & mem = a.fold.mem;
        CommitParams        c{};
        c.fold          = fold_params(a.fold);
        c.store         = device::store_params(a.store, {epoch, a.epoch});
        c.plan          = a.fold.plan;
        c.n_real        = n_real;
        c.spread_offset = side_layout(mem).spread_offset;
        c.near_values   = mem.near_v - mem.near_k;
        c.capacity      = a.fold.n_groups;
        for (n = 0; n < kCommitLayers && first + n < layers.size() && same_shape(a, layers[first + n]); ++n) {
            const CommitArgs &  layer = layers[first + n];
            const LayerMemory & m     = layer.fold.mem;
            c.layer[n] = {m.far_k, m.far_v, m.side, m.near_k, layer.fold.cur.k, layer.fold.cur.v, layer.epoch};
        }
        switch (mem.head_dim) {
        case 64:
            launch_commit<64>(c, int(n), stream);
            break;
        case 128:
            launch_commit<128>(c, int(n), stream);
            break;
        case 256:
            launch_commit<256>(c, int(n), stream);
            break;
        default:
            break;  // kv_ops_cuda_refusal() names it
        }
    }
}

}  // namespace kvfold
