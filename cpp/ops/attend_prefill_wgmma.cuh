// Attention of many queries on Hopper: the same tiles and the same softmax as attend_prefill.cuh, with matrix products that read
// keys and values from shared memory by themselves. The other kernel spends its time on feeding operands to the tensor cores.
//
// A block has four warpgroups. Two bring tiles to a ring of shared buffers, decoded; each of the others attends with 64 columns
// (query, head of the group), so that while one weighs its scores the other's products keep the tensor cores busy.
#pragma once

#include "ops/decode_rows.cuh"
#include "ops/prefill_tile.cuh"

namespace kvfold {
namespace device {

// COARSE: far rows have a scale for 32 or 64 channels.
template <int D_, bool COARSE_>
struct WgmmaShape {
    static constexpr bool COARSE = COARSE_;
    static constexpr int  D = D_, BC = 64, rows = 128;
    static constexpr int  loaders = 256, loader_warps = loaders / 32,
                          threads          = loaders + 2 * rows;   // a warp for 16 rows
    static constexpr int  loader_registers = 72, registers = 184;  // a thread; all begin with 128
    static_assert(loaders * loader_registers + 2 * rows * registers <= 65536);

    static constexpr int stages      = 3;  // of the ring
    static constexpr int tile_halves = BC * D;

    // What a warp of the loaders has in the rows as they are in memory: its cells' keys and values, summaries.
    static constexpr int cells      = BC / loader_warps;
    static constexpr int raw_ahead  = 3;  // tiles on their way
    static constexpr int raw_rows   = 2 * cells + cells / 2;
    static constexpr int raw_words  = raw_rows * FarRows<D>::stride;  // of a tile
    static constexpr int ring_bytes = stages * 2 * tile_halves * 2;
    static constexpr int raw_bytes  = (raw_ahead + 1) * loader_warps * raw_words * 4;

    // Queries stay in registers, but at head size 64, where ptxas 13.0 gives their registers to the weights as well.
    static constexpr bool q_shared = D == 64;
    static constexpr int  q_bytes  = q_shared ? rows * D * 2 : 0;

    static constexpr int shared_bytes = ring_bytes + raw_bytes + q_bytes + 1024;  // 1024 to begin at a multiple of it
};

// Launches it for all columns and splits of `p`, head size 64 or 128, on a device of compute capability 9.0.
// n_blocks: of 128 columns.
void launch_prefill_wgmma(const AttendParams & p, int head_dim, int n_blocks, cudaStream_t stream);

}  // namespace device
}  // namespace kvfold
