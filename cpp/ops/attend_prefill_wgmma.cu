// Compiled for sm_90a only; kv_attend.cu calls it where KVFOLD_WGMMA is defined.
#include "ops/attend_prefill_wgmma.cuh"

#include "ops/wgmma.cuh"

namespace kvfold {
namespace device {

namespace {

// Barriers of a block beside that of __syncthreads, one of each kind for every buffer of the ring.
template <class S>
struct Ring {
    static constexpr int full = 1, empty = 1 + S::stages;

    static __device__ __forceinline__ void arrive(int barrier) {
        asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "n"(S::threads) : "memory");
    }
    static __device__ __forceinline__ void wait(int barrier) {
        asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(S::threads) : "memory");
    }
};

// grid: x block of columns, y KV head, z split of the cells. Dynamic shared memory: S::shared_bytes.
template <class S>
__global__ void __launch_bounds__(S::threads, 1) attend_prefill_wgmma(const __grid_constant__ AttendParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int     D = S::D, BC = S::BC, NS = BC / 8, KS = D / 16;
    constexpr int     panel_bytes = BC * kPanelColumns * 2;
    extern __shared__ __align__(16) half shared_rows[];
    __shared__ int                       shared_src[S::stages][BC];
    __shared__ int                       flags[S::stages][4];  // of each warp of the loaders

    const uint32_t base = uint32_t(__cvta_generic_to_shared(shared_rows));
    half *         ring = shared_rows + ((1024 - base % 1024) % 1024) / 2;

    const int lane = threadIdx.x & 31, head = blockIdx.y, row0 = blockIdx.x * S::rows;
    const int n_tiles = (p.n_kv + BC - 1) / BC, per = (n_tiles + p.n_split - 1) / p.n_split;
    const int tile0 = blockIdx.z * per, tile1 = min(n_tiles, tile0 + per);

    if (threadIdx.x < S::loaders) {
        set_registers<false, S::loader_registers>();
        TileLoader<D, BC, S::rows, S::loaders> loader(p, head, row0, threadIdx.x);
        if (tile0 < tile1) {
            loader.request(tile0);
        }
        for (int tile = tile0, stage = 0; tile < tile1; ++tile) {
            if (tile - tile0 >= S::stages) {
                Ring<S>::wait(Ring<S>::empty + stage);
            }
            half *    keys = ring + stage * 2 * S::tile_halves;
            const int flag =
                loader.decode(tile, shared_src[stage], [&](int cell, int word, const Pairs & k, const Pairs & v) {
                    const int at = panel_chunk<BC>(cell, word);
                    store_pairs(keys + at, k);
                    store_pairs(keys + S::tile_halves + at, v);
                });
            const bool any_masked = __any_sync(~0u, flag & kTileMasked), any_seen = __any_sync(~0u, flag & kTileSeen);
            if (lane == 0) {
                flags[stage][threadIdx.x >> 5] = (any_masked ? kTileMasked : 0) | (any_seen ? kTileSeen : 0);
            }
            publish_to_tensor_cores();
            Ring<S>::arrive(Ring<S>::full + stage);
            if (tile + 1 < tile1) {
                loader.request(tile + 1);
            }
            stage = stage == S::stages - 1 ? 0 : stage + 1;
        }
        return;
    }

    set_registers<true, S::registers>();
    const ScoreRows rows(p, head, row0 + (int(threadIdx.x) - S::loaders) / 32 * 16, lane);
    uint32_t        q[KS][4];
    rows.load_queries<D>(p, lane, [&](int i, int w, uint32_t pair) { q[w / 2][2 * (w & 1) + i] = pair; });

    OnlineSoftmax<D> sums;
    for (int tile = tile0, stage = 0; tile < tile1; ++tile) {
        Ring<S>::wait(Ring<S>::full + stage);
        const int   flag = flags[stage][0] | flags[stage][1] | flags[stage][2] | flags[stage][3];
        const half *keys = ring + stage * 2 * S::tile_halves, *values = keys + S::tile_halves;
        if (flag & kTileSeen) {
            float s[NS][4];
            wgmma_fence();
#pragma unroll
            for (int ks = 0; ks < KS; ++ks) {
                const half * at = keys + ks / 4 * BC * kPanelColumns + ks % 4 * 16;
                wgmma_64x64x16<false>(s, q[ks], panel_descriptor(at, panel_bytes), ks > 0);
            }
            wgmma_commit();
            wgmma_wait(s);
            finish_scores(p, p.score_scale * kFp4Inverse, s);
            if (flag & kTileMasked) {
                rows.mask_scores(p, lane, tile * BC, shared_src[stage], s);
            }
            sums.weigh(s);
            uint32_t weights[BC / 16][4];
#pragma unroll
            for (int n = 0; n < NS; ++n) {
                weights[n / 2][2 * (n & 1)]     = pack_half2(s[n][0], s[n][1]);
                weights[n / 2][2 * (n & 1) + 1] = pack_half2(s[n][2], s[n][3]);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BC / 16; ++k) {
                const uint64_t b = panel_descriptor(values + 16 * k * kPanelColumns, panel_bytes);
                if constexpr (D == 128) {
                    wgmma_64x128x16<true>(sums.o, weights[k], b, true);
                } else {
                    wgmma_64x64x16<true>(sums.o, weights[k], b, true);
                }
            }
            wgmma_commit();
            wgmma_wait(sums.o);
        }
        if (tile + S::stages < tile1) {
            Ring<S>::arrive(Ring<S>::empty + stage);
        }
        stage = stage == S::stages - 1 ? 0 : stage + 1;
    }
    sums.write(p, rows, lane, blockIdx.z);
#else
    __trap();
#endif
}

template <int D>
void launch(const AttendParams & p, int n_blocks, cudaStream_t stream) {
    using S           = WgmmaShape<D>;
    const auto kernel = attend_prefill_wgmma<S>;
    // of the current device, hence every time; a failure shows in the launch
    (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared_bytes);
    kernel<<<dim3(n_blocks, p.n_head_kv, p.n_split), S::threads, S::shared_bytes, stream>>>(p);
}

}  // namespace

void launch_prefill_wgmma(const AttendParams & p, int head_dim, int n_blocks, cudaStream_t stream) {
    head_dim == 128 ? launch<128>(p, n_blocks, stream) : launch<64>(p, n_blocks, stream);
}

}  // namespace device
}  // namespace kvfold
