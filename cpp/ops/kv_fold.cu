// kv_fold on CUDA, alone and together with kv_store.
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
    const SideLayout side = side_layout(a.mem.n_head_kv, a.mem.head_dim, a.mem.n_cells / a.mem.group);
    p.mem                 = a.mem;
    p.cur                 = a.cur;
    p.rot                 = a.rot;
    p.spread              = reinterpret_cast<uint16_t *>(a.mem.side + side.spread_offset);
    return p;
}

// grid: x planned group (padding included), y KV head, z keys or values
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ FoldParams p, const int32_t * plan, const int32_t * n_real) {
    extern __shared__ float shared[];
    if (n_real != nullptr && int(blockIdx.x) >= *n_real) {
        return;
    }
    const bool             keys = FoldPart(blockIdx.z) == FoldPart::keys;
    const device::HeadRows current{(keys ? p.cur.k : p.cur.v) + blockIdx.y * p.mem.head_dim,
                                   keys ? p.cur.k_stride : p.cur.v_stride};
    device::fold_group(p, current, plan + blockIdx.x * (1 + p.mem.group), blockIdx.y, FoldPart(blockIdx.z), shared);
}

// grid: x KV head, y keys or values. A head's part of a pool row is read by its own folds and overwritten by its own stores
// only, so the order within a block is all the order there needs to be. Dynamic shared memory: the rows of the micro-batch, then
// what fold_group() wants.
template <int D>
__global__ void __launch_bounds__(kFoldThreads)
    commit_kernel(const __grid_constant__ FoldParams p, const int32_t * plan, const int32_t * n_real, int capacity,
                  const __grid_constant__ StoreParams s) {
    extern __shared__ float shared[];
    const bool              keys   = FoldPart(blockIdx.y) == FoldPart::keys;
    const int               lane   = threadIdx.x & 31;
    const int64_t           stride = keys ? p.cur.k_stride : p.cur.v_stride;
    const float *           from   = (keys ? p.cur.k : p.cur.v) + blockIdx.x * D;
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
    const int n = n_real != nullptr ? min(*n_real, capacity) : capacity;
    for (int i = 0; i < n; ++i) {
        device::fold_group(p, {shared, D}, plan + i * (1 + p.mem.group), blockIdx.x, FoldPart(blockIdx.y),
                           shared + s.n_rows * D);
    }
    __syncthreads();
    for (int r = 0; r < s.n_rows; ++r) {
        device::store_row(s, r, shared + r * D, keys, blockIdx.x * D, D);
    }
    device::write_epoch(s);
}

template <int D>
void launch_commit(const FoldArgs & fold, const int32_t * n_real, const StoreArgs & store, const Epoch & epoch,
                   cudaStream_t stream) {
    const size_t bytes = device::fold_shared_bytes(fold.mem) + size_t(store.cur.n_rows) * D * sizeof(float);
    (void) cudaFuncSetAttribute(commit_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    launch_early(commit_kernel<D>, dim3(fold.mem.n_head_kv, 2), kFoldThreads, bytes, stream, fold_params(fold),
                 fold.plan, n_real, fold.n_groups, device::store_params(store, epoch));
}

}  // namespace

void kv_fold_cuda(const FoldArgs & a, const int32_t * n_real, cudaStream_t stream) {
    if (a.n_groups == 0) {
        return;
    }
    const dim3 grid(a.n_groups, a.mem.n_head_kv, 2);
    fold_kernel<<<grid, kFoldThreads, device::fold_shared_bytes(a.mem), stream>>>(fold_params(a), a.plan, n_real);
}

void kv_commit_cuda(const FoldArgs & fold, const int32_t * n_real, const StoreArgs & store, const Epoch & epoch,
                    cudaStream_t stream) {
    switch (fold.mem.head_dim) {
    case 64:
        return launch_commit<64>(fold, n_real, store, epoch, stream);
    case 128:
        return launch_commit<128>(fold, n_real, store, epoch, stream);
    case 256:
        return launch_commit<256>(fold, n_real, store, epoch, stream);
    default:
        return;  // kv_ops_cuda_refusal() names it
    }
}

}  // namespace kvfold
