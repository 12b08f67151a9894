// kv_store on CUDA.
#include "ops/kv_ops_cuda.h"
#include "ops/store_device.cuh"

namespace kvfold {

namespace {

// grid: x row of the micro-batch, y keys or values
__global__ void store_kernel(const __grid_constant__ device::StoreParams p) {
    const bool keys = blockIdx.y == 0;
    const int  row  = blockIdx.x;
    device::store_row(p, row, keys ? p.k + row * p.k_stride : p.v + row * p.v_stride, keys, 0, p.row);
    device::write_epoch(p);
}

}  // namespace

void kv_store_cuda(const StoreArgs & a, const Epoch & epoch, cudaStream_t stream) {
    if (a.cur.n_rows == 0) {
        return;
    }
    store_kernel<<<dim3(a.cur.n_rows, 2), 256, 0, stream>>>(device::store_params(a, epoch));
}

}  // namespace kvfold
