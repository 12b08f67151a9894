// kv_fold on CUDA, alone and together with kv_store.
#include "ops/fold_device.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/store_device.cuh"

namespace kvfold {

namespace {

using device::FoldParams;
using device::FoldPart;
using device::kFoldThreads;
using device::StoreParams;

FoldParams fold_params(const FoldArgs & a) {
    FoldParams       p{};
    const SideLayout side = side_layout(a.mem.n_head_kv, a.mem.head_dim, a.mem.n_cells / a.mem.group);
    p.mem                 = a.mem;
    p.cur                 = a.cur;
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
    device::fold_group(p, plan + blockIdx.x * (1 + p.mem.group), blockIdx.y, FoldPart(blockIdx.z), shared);
}

// grid: x KV head, y keys or values. A head's part of a pool row is read by its own folds and overwritten by its own stores
// only, so the order within a block is all the order there needs to be.
__global__ void __launch_bounds__(kFoldThreads)
    commit_kernel(const __grid_constant__ FoldParams p, const int32_t * plan, const int32_t * n_real, int capacity,
                  const __grid_constant__ StoreParams s) {
    extern __shared__ float shared[];
    const int               n = n_real != nullptr ? min(*n_real, capacity) : capacity;
    for (int i = 0; i < n; ++i) {
        device::fold_group(p, plan + i * (1 + p.mem.group), blockIdx.x, FoldPart(blockIdx.y), shared);
    }
    __syncthreads();
    for (int r = 0; r < s.n_rows; ++r) {
        device::store_row(s, r, blockIdx.y == 0, blockIdx.x * p.mem.head_dim, p.mem.head_dim);
    }
    device::write_epoch(s);
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
    const dim3 grid(fold.mem.n_head_kv, 2);
    commit_kernel<<<grid, kFoldThreads, device::fold_shared_bytes(fold.mem), stream>>>(
        fold_params(fold), fold.plan, n_real, fold.n_groups, device::store_params(store, epoch));
}

}  // namespace kvfold
