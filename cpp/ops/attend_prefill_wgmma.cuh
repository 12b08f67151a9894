// Attention of many queries on Hopper: the same tiles and the same softmax as attend_prefill.cuh, with matrix products that read
// keys and values from shared memory by themselves. The other kernel spends its time on feeding operands to the tensor cores.
//
// A block has three warpgroups. One loads and decodes tiles into a ring of shared buffers; each of the others attends with 64
// columns (query, head of the group), so that while one weighs its scores the other's products keep the tensor cores busy.
#pragma once

#include "ops/prefill_tile.cuh"

namespace kvfold {
namespace device {

template <int D_>
struct WgmmaShape {
    static constexpr int D = D_, BC = 64, rows = 128;
    static constexpr int loaders = 128, threads = loaders + 2 * rows;  // a warp for 16 rows
    static constexpr int loader_registers = 136, registers = 184;      // a thread; all begin with 168
    static_assert(loaders * loader_registers + 2 * rows * registers <= 65536);
    static constexpr int stages      = 3;
    static constexpr int tile_halves = BC * D;
    static constexpr int shared_bytes =
        stages * 2 * tile_halves * 2 + 1024;  // and what it takes to begin at a multiple of 1024
};

// Launches it for all columns and splits of `p`, head size 64 or 128, on a device of compute capability 9.0.
// n_blocks: of 128 columns.
void launch_prefill_wgmma(const AttendParams & p, int head_dim, int n_blocks, cudaStream_t stream);

}  // namespace device
}  // namespace kvfold
