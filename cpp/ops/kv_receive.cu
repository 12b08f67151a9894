// kv_receive and kv_lose on CUDA. A block has 128 rows (queries and heads) of one KV head and goes through all cells: kv_receive twice,
// because what a cell gets is known when the sums of the rows are, kv_lose once.
#include "ops/kv_ops_cuda.h"
#include "ops/seen_cells.cuh"

namespace kvfold {

namespace {

using device::AttendParams;

struct ReceiveParams {
    AttendParams attend;
    float *      received;  // [n_head_kv][n_cells], none negative
    int64_t      n_cells;
};

struct LoseParams {
    AttendParams     attend;
    const uint32_t * dropped;
    Alignment *      sums;  // [n_head]
};

template <int D>
__global__ void __launch_bounds__(device::KeyTile<D>::threads, 2) receive(const __grid_constant__ ReceiveParams p) {
    using S = device::KeyTile<D>;
    __shared__ device::KeyStages<D> shared;
    __shared__ __align__(16) float largest[device::KeyStages<D>::n][S::warps][S::keys];
    const int                      lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    device::SeenCells<D>           cells(p.attend, shared);

    device::RowSums sums;
    const auto      none = [](int, int, int) { return false; };
    cells.walk_far([&](int, int, auto & s) { sums.add(s, none); }, [](int, int) {});
    cells.walk_exact([&](auto & s) { sums.add(s, none); });
    sums.merge();
    cells.add_sinks(sums);
    float log_sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        log_sum[i] = sums.sees(i) ? sums.m[i] + __log2f(sums.all[i]) : INFINITY;
    }

    cells.walk_far(
        [&](int, int stage, auto & s) {
            float most[2 * S::fragments];
#pragma unroll
            for (int j = 0; j < 2 * S::fragments; ++j) {
                most[j] = fmaxf(device::exp2_fast(s[j / 2][j % 2] - log_sum[0]),
                                device::exp2_fast(s[j / 2][2 + j % 2] - log_sum[1]));
            }
            device::reduce_rows<S::fragments>(most, lane, device::Max{});
            if (lane / 4 < S::fragments) {
                *reinterpret_cast<float2 *>(&largest[stage][warp][cells.key(lane / 4, 0)]) =
                    make_float2(most[0], most[1]);
            }
        },
        [&](int first, int stage) {
            if (threadIdx.x < S::keys) {
                float most = 0.0f;
#pragma unroll
                for (int i = 0; i < S::warps; ++i) {
                    most = fmaxf(most, largest[stage][i][threadIdx.x]);
                }
                if (most > 0.0f) {  // floats that are not negative are in the order of their bits
                    float * to = p.received + blockIdx.y * p.n_cells + first + threadIdx.x;
                    atomicMax(reinterpret_cast<int *>(to), __float_as_int(most));
                }
            }
        });
}

template <int D>
__global__ void __launch_bounds__(device::KeyTile<D>::threads, 2) lose(const __grid_constant__ LoseParams p) {
    using S = device::KeyTile<D>;
    __shared__ device::KeyStages<D> shared;
    __shared__ float                kept[S::rows];  // negative: a row that sees nothing
    const int                       lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    device::SeenCells<D>            cells(p.attend, shared);

    device::RowSums sums;
    cells.walk_far(
        [&](int first, int, auto & s) {
            sums.add(s, [&](int, int n, int e) {
                const int cell = first + cells.key(n, e);
                return cell < p.attend.n_kv && (__ldg(p.dropped + cell / 32) >> (cell % 32) & 1u) != 0;
            });
        },
        [](int, int) {});
    cells.walk_exact([&](auto & s) { sums.add(s, [](int, int, int) { return false; }); });
    sums.merge();
    cells.add_sinks(sums);
    if (lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            kept[16 * warp + lane / 4 + 8 * i] = sums.sees(i) ? fmaxf(1.0f - sums.some[i] / sums.all[i], 1e-7f) : -1.0f;
        }
    }
    device::add_to_alignments<S::rows, S::threads>(kept, p.attend.gqa, p.sums);
}

template <int D>
void launch(const ReceiveArgs & a, cudaStream_t stream) {
    const ReceiveParams p{attend_params(a.attend), a.received, a.attend.mem.n_cells};
    receive<D><<<row_blocks<D>(a.attend), device::KeyTile<D>::threads, 0, stream>>>(p);
}

template <int D>
void launch(const LoseArgs & a, cudaStream_t stream) {
    const LoseParams p{attend_params(a.attend), a.dropped, a.sums};
    lose<D><<<row_blocks<D>(a.attend), device::KeyTile<D>::threads, 0, stream>>>(p);
}

template <class Args>
void launch_sized(const Args & a, cudaStream_t stream) {
    if (a.attend.n_q == 0) {
        return;
    }
    switch (a.attend.mem.head_dim) {
    case 64:
        return launch<64>(a, stream);
    case 128:
        return launch<128>(a, stream);
    case 256:
        return launch<256>(a, stream);
    default:
        return;  // kv_ops_cuda_refusal() names it
    }
}

}  // namespace

void kv_receive_cuda(const ReceiveArgs & a, cudaStream_t stream) { launch_sized(a, stream); }

void kv_lose_cuda(const LoseArgs & a, cudaStream_t stream) { launch_sized(a, stream); }

}  // namespace kvfold
