// kv_attend on CUDA: which kernel, how many splits, where its scratch goes.
#include <algorithm>

#include "ops/attend_decode.cuh"
#include "ops/attend_launch.cuh"
#include "ops/attend_merge.cuh"
#include "ops/attend_prefill.cuh"
#include "ops/attend_prefill_wgmma.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/launch.cuh"

namespace kvfold {

namespace {

using device::AttendParams;

// The prefill kernel of a head size. Turing has at most 64 KiB of shared memory a block.
template <int D, bool SMALL, bool COARSE>
using Prefill = device::PrefillShape<D, D == 256 || (D == 128 && SMALL) ? 32 : 64, D == 256 ? 4 : 8, COARSE>;

// Built with the prefill kernel for Hopper? Its blocks and tiles are as large as the other's at the same head size.
#ifdef KVFOLD_WGMMA
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif
static_assert(device::WgmmaShape<128, false>::rows == Prefill<128, false, false>::rows &&
              device::WgmmaShape<128, false>::BC == 64);

struct Plan {
    bool   prefill;
    bool   wgmma;  // prefill with the kernel for Hopper
    bool   sparse;
    bool   stands_in;  // AttendParams
    bool   wide;       // decode_warps()
    int    blocks;     // of 8 columns a thread block of the decode kernel handles: 1 or 2
    int    z;          // thread blocks over the columns of a KV head
    int    n_split;    // shares of the cells
    size_t ml_offset;
    size_t src_offset;    // prefill: the source of every cell
    int    tile_cells;    // prefill
    size_t flags_offset;  // prefill: TileFlag
    size_t rows_offset;   // prefill, and decode with many rows: the current rows as halves, keys, then values
    bool   halve_rows;
    int    heads;  // KV heads of a launch
    size_t scratch;
};

// Splits are chosen so that the device is full once, and no more: every one costs a partial result. `sparse`: where the lists of
// groups are; null: dense.
Plan make_plan(const AttendArgs & a, const CudaDevice & device, const SparseAttendArgs * sparse) {
    Plan      p{};
    const int dim = a.mem.head_dim, gqa = a.n_head / a.mem.n_head_kv, columns = a.n_q * gqa;
    // Up to 16 columns the decode kernel needs one pass. (Turing has not the shared memory for the other at head size 256.)
    p.sparse    = sparse != nullptr;
    p.stands_in = p.sparse && sparse->unread != nullptr && can_stand_in(dim, gqa);
    p.prefill   = !p.sparse && columns > 16 && !(device.arch < 80 && dim == 256);
    if (p.prefill) {
        p.wgmma        = kHasWgmma && device.arch == 90 && dim <= 128;
        const int rows = dim == 256 ? 64 : 128, cells = dim == 256 || (dim == 128 && device.arch < 80) ? 32 : 64;
        p.tile_cells    = cells;
        p.z             = ceil_div(columns, rows);
        const int tiles = ceil_div(a.n_kv, cells), room = device.n_sm / (p.z * a.mem.n_head_kv);
        const int most  = ceil_div(tiles, 4);
        const int split = room < 1 ? 1 : room < most ? room : most;
        p.n_split       = ceil_div(tiles, ceil_div(tiles, split));
    } else {
        p.blocks        = column_blocks(dim, p.sparse ? gqa : columns, p.stands_in);
        p.z             = p.sparse ? a.n_q : ceil_div(columns, 8 * p.blocks);
        const int cells = p.sparse ? std::min(sparse->capacity * a.mem.group, a.n_kv) : a.n_kv;
        // at small groups the tiles of 16 warps do not fit the shared memory of all devices
        p.wide           = cells >= 16384 && a.mem.group >= 4;
        const int shares = a.mem.n_head_kv * p.z, warps = device::decode_warps(dim, p.blocks, device.arch < 80, p.wide);
        const int most = ceil_div(ceil_div(cells, device::kDecodeTile), warps);  // with a tile for every warp
        // One wave of blocks; more where that would leave multiprocessors without work and there is enough of it.
        p.n_split = 1;
        int busy  = 0;  // of 1000 multiprocessors
        for (int waves = 1; waves <= 3; ++waves) {
            const int split = waves * device.n_sm / shares, used = split * shares * 1000 / (waves * device.n_sm);
            if (used > busy + 50 && split * (waves == 1 ? 1 : 8) <= (waves == 1 ? split : most)) {
                p.n_split = split < most ? split : most;
                busy      = used;
            }
        }
    }
    p.n_split = std::max(p.n_split, p.stands_in ? 2 : 1);  // the mean is made when splits are merged
    if (p.n_split > 1) {
        const size_t rows = size_t(p.n_split) * a.n_q * (a.n_head + (p.stands_in ? a.mem.n_head_kv : 0));
        p.ml_offset       = rows * dim * sizeof(float);
        p.scratch         = p.ml_offset + rows * sizeof(float2);
    }
    p.heads      = a.mem.n_head_kv;
    p.halve_rows = a.cur.n_rows > (p.prefill ? 0 : device::kSharedRows);
    if (p.halve_rows) {
        p.rows_offset     = (p.scratch + 255) / 256 * 256;
        const size_t head = 2 * size_t(a.cur.n_rows) * dim * sizeof(half);
        if (p.prefill) {
            p.heads = int(std::max<size_t>(std::min<size_t>(device.half_rows / head, p.heads), 1));
        }
        p.scratch = p.rows_offset + p.heads * head;
    }
    if (p.prefill) {
        p.src_offset   = (p.scratch + 255) / 256 * 256;
        p.flags_offset = p.src_offset + size_t(a.n_kv) * sizeof(int32_t);
        p.scratch      = p.flags_offset + size_t(p.z) * ceil_div(a.n_kv, p.tile_cells);
    }
    return p;
}

constexpr int kSpreadCells = 1024;

// cell_src[c] = where the row of cell c is, or kSrcHidden. One thread a cell; a block writes its own cells only, far ones first.
__global__ void __launch_bounds__(kSpreadCells)
    spread_cells(const uint32_t * far_bits, const int2 * exact, int n_exact, int32_t * cell_src, int n_kv) {
    const int first = blockIdx.x * kSpreadCells, c = first + int(threadIdx.x);
    if (c < n_kv) {
        cell_src[c] = far_bits[c / 32] >> (c % 32) & 1u ? kSrcFar : kSrcHidden;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_exact; i += kSpreadCells) {
        const int2 e = exact[i];
        if (e.y != kSrcHidden && e.x >= first && e.x < first + kSpreadCells) {
            cell_src[e.x] = e.y;
        }
    }
}

// grid: x row, y keys or values
__global__ void halve_rows(const float * k, const float * v, int64_t k_stride, int64_t v_stride, half * to, int row) {
    const float * from = blockIdx.y == 0 ? k + blockIdx.x * k_stride : v + blockIdx.x * v_stride;
    to += (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * row;
    for (int i = threadIdx.x; i < row; i += blockDim.x) {
        to[i] = __float2half_rn(from[i]);
    }
}

template <int BC, int ROWS>
void launch_flags(const AttendParams & p, const Plan & plan, cudaStream_t stream) {
    const int n_tiles = ceil_div(p.n_kv, BC);
    device::flag_tiles<BC, ROWS>
        <<<dim3(ceil_div(n_tiles, device::kFlagWarps), plan.z), 32 * device::kFlagWarps, 0, stream>>>(
            p, const_cast<uint8_t *>(p.tile_flags), n_tiles);
}

template <class S>
void launch_prefill(const AttendParams & p, const Plan & plan, cudaStream_t stream) {
    static_assert(S::shared_bytes <= 99 * 1024 - 1024, "more than consumer devices have");
    // of the current device, hence every time; a failure shows in the launch
    (void) cudaFuncSetAttribute(device::attend_prefill<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                S::shared_bytes);
    launch_flags<S::BC, S::rows>(p, plan, stream);
    device::attend_prefill<S><<<dim3(plan.z, p.n_heads, plan.n_split), S::threads, S::shared_bytes, stream>>>(p);
}

template <int D, int NB, bool SMALL, bool SPARSE, bool COARSE, bool WIDE>
void launch_warps(const AttendParams & p, const Plan & plan, cudaStream_t stream) {
    constexpr int warps  = device::decode_warps(D, NB, SMALL, WIDE);
    const auto    kernel = device::attend_decode<D, NB, warps, SPARSE, COARSE>;
    using S              = device::DecodeShape<D, NB, warps>;
    const int bytes      = S::shared_bytes(1 << p.group_shift);
    (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    launch_early(kernel, dim3(p.n_head_kv, plan.n_split, plan.z), S::threads, bytes, stream, p);
}

template <int D, int NB, bool SMALL, bool SPARSE, bool COARSE>
void launch_decode(const AttendParams & p, const Plan & plan, cudaStream_t stream) {
    if constexpr (device::decode_warps(D, NB, SMALL, true) != device::decode_warps(D, NB, SMALL, false)) {
        if (plan.wide) {
            return launch_warps<D, NB, SMALL, SPARSE, COARSE, true>(p, plan, stream);
        }
    }
    launch_warps<D, NB, SMALL, SPARSE, COARSE, false>(p, plan, stream);
}

template <int D, bool COARSE>
void launch(const AttendParams & p, const Plan & plan, const CudaDevice & device, cudaStream_t stream) {
    if (plan.wgmma) {
#ifdef KVFOLD_WGMMA
        using S = device::WgmmaShape<D, COARSE>;
        launch_flags<S::BC, S::rows>(p, plan, stream);
        device::launch_prefill_wgmma(p, D, plan.z, stream);
#endif
    } else if (plan.prefill) {
        if (device.arch < 80) {
            if constexpr (D <= 128) {
                launch_prefill<Prefill<D, true, COARSE>>(p, plan, stream);
            }
        } else {
            launch_prefill<Prefill<D, false, COARSE>>(p, plan, stream);
        }
    } else {
        const bool small = device.arch < 80;
        if (plan.blocks == 1) {
            plan.sparse ? launch_decode<D, 1, false, true, COARSE>(p, plan, stream)
            : small     ? launch_decode<D, 1, true, false, COARSE>(p, plan, stream)
                        : launch_decode<D, 1, false, false, COARSE>(p, plan, stream);
        }
        if constexpr (D <= 128) {
            if (plan.blocks == 2) {
                plan.sparse ? launch_decode<D, 2, false, true, COARSE>(p, plan, stream)
                : small     ? launch_decode<D, 2, true, false, COARSE>(p, plan, stream)
                            : launch_decode<D, 2, false, false, COARSE>(p, plan, stream);
            }
        }
    }
    if (plan.n_split > 1 && p.arrival_slot < 0 && p.head0 + p.n_heads == p.n_head_kv) {
        device::attend_merge<D><<<p.n_q * p.n_head, 32 * device::kMergeWarps, 0, stream>>>(p);
    }
}

template <int D>
void launch_scaled(const AttendParams & p, const Plan & plan, const CudaDevice & device, cudaStream_t stream) {
    p.scale_shift == device::kFineShift ? launch<D, false>(p, plan, device, stream)
                                        : launch<D, true>(p, plan, device, stream);
}

}  // namespace

const char * kv_ops_cuda_refusal(int32_t n_head_kv, int32_t head_dim, int32_t group, int32_t n_head) {
    if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
        return "head size must be 64, 128 or 256";
    }
    if (group < 2 || group > 32 || (group & (group - 1)) != 0) {
        return "cells a group must be 2, 4, 8, 16 or 32";
    }
    if (n_head_kv < 1 || n_head % n_head_kv != 0) {
        return "query heads must be a multiple of the KV heads";
    }
    return nullptr;
}

namespace {

void attend(const AttendArgs & a, const SparseAttendArgs * sparse, bool after_lookup, const CudaDevice & device,
            void * scratch, cudaStream_t stream) {
    if (a.n_q == 0) {
        return;
    }
    const Plan   plan = make_plan(a, device, sparse);
    AttendParams p    = attend_params(a);
    p.part            = static_cast<float *>(scratch);
    p.part_ml         = reinterpret_cast<float2 *>(static_cast<uint8_t *>(scratch) + plan.ml_offset);
    p.n_split         = plan.n_split;
    p.arrival_slot    = plan.prefill || plan.z * a.mem.n_head_kv > device::kArrivals ? -1 : arrival_slot(stream);
    if (sparse != nullptr) {
        p.selected     = sparse->selected;
        p.list_stride  = int32_t(group_list_stride(sparse->capacity));
        p.after_lookup = after_lookup;
        p.stands_in    = plan.stands_in;
        p.unread       = sparse->unread;
        p.part_rows += plan.stands_in ? a.n_q * a.mem.n_head_kv : 0;
    }
    if (plan.prefill) {
        auto * cell_src = reinterpret_cast<int32_t *>(static_cast<uint8_t *>(scratch) + plan.src_offset);
        spread_cells<<<ceil_div(p.n_kv, kSpreadCells), kSpreadCells, 0, stream>>>(p.far_bits, p.exact, p.n_exact,
                                                                                  cell_src, p.n_kv);
        p.cell_src   = cell_src;
        p.tile_flags = static_cast<uint8_t *>(scratch) + plan.flags_offset;
    }
    auto * rows = reinterpret_cast<half *>(static_cast<uint8_t *>(scratch) + plan.rows_offset);
    for (p.head0 = 0; p.head0 < p.n_head_kv; p.head0 += plan.heads) {
        p.n_heads = std::min(plan.heads, p.n_head_kv - p.head0);
        if (plan.halve_rows) {
            const int row = p.n_heads * a.mem.head_dim, first = p.head0 * a.mem.head_dim;
            halve_rows<<<dim3(a.cur.n_rows, 2), 256, 0, stream>>>(a.cur.k + first, a.cur.v + first, a.cur.k_stride,
                                                                  a.cur.v_stride, rows, row);
            p.cur_half_k = rows;
            p.cur_half_v = rows + int64_t(a.cur.n_rows) * row;
        }
        switch (a.mem.head_dim) {
        case 64:
            launch_scaled<64>(p, plan, device, stream);
            break;
        case 128:
            launch_scaled<128>(p, plan, device, stream);
            break;
        case 256:
            launch_scaled<256>(p, plan, device, stream);
            break;
        default:
            break;  // kv_ops_cuda_refusal() names it
        }
    }
}

}  // namespace

size_t kv_attend_cuda_scratch(const AttendArgs & a, const CudaDevice & device) {
    return make_plan(a, device, nullptr).scratch;
}

void kv_attend_cuda(const AttendArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream) {
    attend(a, nullptr, false, device, scratch, stream);
}

size_t kv_attend_sparse_cuda_scratch(const SparseAttendArgs & a, const CudaDevice & device) {
    return make_plan(a.attend, device, &a).scratch;
}

void kv_attend_sparse_cuda(const SparseAttendArgs & a, bool after_lookup, const CudaDevice & device, void * scratch,
                           cudaStream_t stream) {
    attend(a.attend, &a, after_lookup, device, scratch, stream);
}

}  // namespace kvfold
