// kv_align on CUDA: softmax sums over all cells, and over those that are read.
#include "ops/kv_ops_cuda.h"
#include "ops/seen_cells.cuh"

namespace kvfold {

namespace {

struct AlignParams {
    device::AttendParams attend;  // with lists of groups
    Alignment *          sums;    // [n_head]
};

// The list of a query and KV head, which is in ascending order, gone through along with the tiles.
class ListedGroups {
  public:
    __device__ __forceinline__ ListedGroups(const device::AttendParams & p, int query, int head)
        : next_(p.selected + (int64_t(query) * p.n_head_kv + head) * p.list_stride + 1), end_(next_ + next_[-1]) {}

    // Bits of the groups first .. first + n - 1 that are listed.
    __device__ __forceinline__ uint32_t take(int first, int n) {
        uint32_t bits = 0;
        for (; next_ < end_ && *next_ < first + n; ++next_) {
            bits |= *next_ >= first ? 1u << (*next_ - first) : 0u;
        }
        return bits;
    }

  private:
    const int32_t * next_;
    const int32_t * end_;
};

template <int D>
__global__ void __launch_bounds__(device::KeyTile<D>::threads, 2) align(const __grid_constant__ AlignParams p) {
    using S = device::KeyTile<D>;
    static_assert(S::keys / 2 <= 32, "bits of the groups of a tile");
    __shared__ device::KeyStages<D> shared;
    __shared__ float                kept[S::rows];  // negative: a row that sees nothing
    const int                       lane = threadIdx.x & 31, warp = threadIdx.x >> 5, shift = p.attend.group_shift;
    device::SeenCells<D>            cells(p.attend, shared);

    ListedGroups lists[2] = {{p.attend, cells.rows.query[0], int(blockIdx.y)},
                             {p.attend, cells.rows.query[1], int(blockIdx.y)}};

    device::RowSums sums;
    cells.walk_far(
        [&](int first, int, auto & s) {
            const uint32_t listed[2] = {lists[0].take(first >> shift, S::keys >> shift),
                                        lists[1].take(first >> shift, S::keys >> shift)};
            sums.add(s, [&](int i, int n, int e) { return (listed[i] >> (cells.key(n, e) >> shift) & 1u) != 0; });
        },
        [](int, int) {});
    cells.walk_exact([&](auto & s) { sums.add(s, [](int, int, int) { return true; }); });
    sums.merge();
    cells.add_sinks(sums, true);
    if (lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float share                  = fminf(fmaxf(sums.some[i] / sums.all[i], 1e-30f), 1.0f);
            kept[16 * warp + lane / 4 + 8 * i] = sums.sees(i) ? share : -1.0f;
        }
    }
    device::add_to_alignments<S::rows, S::threads>(kept, p.attend.gqa, p.sums);
}

template <int D>
void launch(const AttendArgs & a, const AlignParams & p, cudaStream_t stream) {
    align<D><<<row_blocks<D>(a), device::KeyTile<D>::threads, 0, stream>>>(p);
}

}  // namespace

void kv_align_cuda(const SparseAttendArgs & a, Alignment * sums, cudaStream_t stream) {
    if (a.attend.n_q == 0) {
        return;
    }
    AlignParams p{attend_params(a.attend), sums};
    p.attend.selected    = a.selected;
    p.attend.list_stride = int32_t(group_list_stride(a.capacity));
    switch (a.attend.mem.head_dim) {
    case 64:
        return launch<64>(a.attend, p, stream);
    case 128:
        return launch<128>(a.attend, p, stream);
    case 256:
        return launch<256>(a.attend, p, stream);
    default:
        return;  // kv_ops_cuda_refusal() names it
    }
}

}  // namespace kvfold
