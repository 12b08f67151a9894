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

// What one warp of the loaders does for a tile: it copies its cells' rows to its own buffers, some tiles ahead and without waiting,
// and decodes them into the ring later. A lane decodes one word of some neighbouring rows.
template <class S>
struct TileFeed {
    static constexpr int D = S::D, words = D / 8, cells = S::cells * words / 32;  // of a lane
    static constexpr int row_words = FarRows<D>::words, stride = FarRows<D>::stride;
    static_assert(cells >= 2 && cells % 2 == 0, "summaries are read for pairs of cells");

    const AttendParams & p;
    int                  lane;
    int                  head;
    int                  first;  // of the tile's cells, this warp's
    uint32_t *           raw;    // this warp's buffers

    __device__ __forceinline__ CoarseCopy<D> coarse() const { return {lane, p.n_head_kv, head, p.scale_shift}; }

    // Starts copying a tile to buffer `slot`.
    __device__ __forceinline__ void request(int tile, int slot) const {
        const FarCopy<D> copy(lane);
        const int        cell0 = tile * S::BC + first, n = p.n_kv - cell0, step = p.n_head_kv * row_words;
        uint32_t *       to = raw + slot * S::raw_words;
        if (n > 0) {
            const size_t at    = size_t(cell0) * step + head * row_words;
            const int    group = cell0 >> p.group_shift, n_groups = max(S::cells >> p.group_shift, 1);
            if constexpr (S::COARSE) {
                const auto cell_of = [cell0, n](int j) { return j < n ? cell0 + j : -1; };
                coarse().template copy<S::cells>(to, p.far_k, p.far_k_scales, cell_of);
                coarse().template copy<S::cells>(to + S::cells * stride, p.far_v, p.far_v_scales, cell_of);
            } else {
                copy.template copy<S::cells>(to, p.far_k + at, step, n);
                copy.template copy<S::cells>(to + S::cells * stride, p.far_v + at, step, n);
            }
            copy.template copy<S::cells / 2>(to + 2 * S::cells * stride,
                                             p.summary + size_t(group) * step + head * row_words, step,
                                             min(n_groups, ((p.n_kv - 1) >> p.group_shift) - group + 1));
        }
    }

    // Decodes a tile from buffer `slot`, whose copies have arrived, to `keys` and the values behind them; afterwards rows that are not
    // far, of which there are only if `exact`.
    __device__ __forceinline__ void decode(int tile, int slot, bool exact, half * keys) const {
        const int        word = lane % words, mine = lane / words * cells;
        const int        block = (word >> 3) * kBlockWords, value_at = block + 1 + (word & 7);
        const uint32_t   select = scale_selector(word >> 1 & 3);
        const uint32_t * from   = raw + slot * S::raw_words;
        const int        at     = first + mine;  // of the tile's cells
#pragma unroll
        for (int i = 0; i < cells; i += 2) {
            const uint32_t * g = from + (2 * S::cells + ((mine + i) >> p.group_shift)) * stride;
            const Pairs      s = decode_word(g[value_at], scale_pair(g[block], select));
#pragma unroll
            for (int c = i; c < i + 2; ++c) {
                const uint32_t *k = from + (mine + c) * stride, *v = k + S::cells * stride;
                // as copied: all scales are in the first word, a few bytes from its beginning
                const int      scales = S::COARSE ? 0 : block;
                const uint32_t row_select =
                    S::COARSE
                        ? scale_selector(coarse().first_byte(tile * S::BC + at + c) + (word >> (p.scale_shift - 3)))
                        : select;
                store(keys, at + c, word, add_pairs(s, decode_word(k[value_at], scale_pair(k[scales], row_select))),
                      decode_word(v[value_at], scale_pair(v[scales], row_select)));
            }
        }
        if (exact) {
            int       src[cells];
            ExactWord k[cells], v[cells];  // all are under way before the first is needed
#pragma unroll
            for (int i = 0; i < cells; ++i) {
                const int cell = tile * S::BC + at + i;
                src[i]         = cell < p.n_kv ? p.cell_src[cell] : kSrcHidden;
            }
#pragma unroll
            for (int i = 0; i < cells; ++i) {
                k[i].load(p, p.near_k, p.cur_half_k, src[i], head, D, word);
                v[i].load(p, p.near_v, p.cur_half_v, src[i], head, D, word);
            }
#pragma unroll
            for (int i = 0; i < cells; ++i) {
                if (src[i] != kSrcFar) {
                    store(keys, at + i, word, k[i].pairs(), v[i].pairs());
                }
            }
        }
    }

    static __device__ __forceinline__ void store(half * keys, int cell, int word, const Pairs & k, const Pairs & v) {
        half * to = keys + panel_chunk<S::BC>(cell, word);
        store_pairs(to, k);
        store_pairs(to + S::tile_halves, v);
    }
};

// grid: x block of columns, y KV head from head0 on, z split of the cells. Dynamic shared memory: S::shared_bytes.
template <class S>
__global__ void __launch_bounds__(S::threads, 1) attend_prefill_wgmma(const __grid_constant__ AttendParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int     D = S::D, BC = S::BC, NS = BC / 8, KS = D / 16;
    constexpr int     panel_bytes = BC * kPanelColumns * 2;
    extern __shared__ __align__(16) half shared_rows[];

    const uint32_t base = uint32_t(__cvta_generic_to_shared(shared_rows));
    half *         ring = shared_rows + ((1024 - base % 1024) % 1024) / 2;

    const int       lane = threadIdx.x & 31, head = p.head0 + blockIdx.y, row0 = blockIdx.x * S::rows;
    const int       n_tiles = (p.n_kv + BC - 1) / BC, per = (n_tiles + p.n_split - 1) / p.n_split;
    const int       tile0 = blockIdx.z * per, tile1 = min(n_tiles, tile0 + per);
    const uint8_t * flags = p.tile_flags + blockIdx.x * n_tiles;

    if (threadIdx.x < S::loaders) {
        set_registers<false, S::loader_registers>();
        const int         warp = threadIdx.x >> 5;
        uint32_t *        raw  = reinterpret_cast<uint32_t *>(reinterpret_cast<uint8_t *>(ring) + S::ring_bytes);
        const TileFeed<S> feed{p, lane, head, warp * S::cells, raw + warp * (S::raw_ahead + 1) * S::raw_words};

        int ahead = next_seen(flags, tile0, tile1), ahead_slot = S::raw_ahead;
        for (int i = 0; i < S::raw_ahead; ++i) {
            if (ahead < tile1) {
                feed.request(ahead, i);
                ahead = next_seen(flags, ahead + 1, tile1);
            }
            copy_commit();
        }
        int n = 0, stage = 0, slot = 0;
        for (int tile = next_seen(flags, tile0, tile1); tile < tile1; tile = next_seen(flags, tile + 1, tile1), ++n) {
            if (ahead < tile1) {
                feed.request(ahead, ahead_slot);
                ahead = next_seen(flags, ahead + 1, tile1);
            }
            copy_commit();
            copy_wait<S::raw_ahead>();
            if (n >= S::stages) {
                Ring<S>::wait(Ring<S>::empty + stage);
            }
            feed.decode(tile, slot, flags[tile] & kTileExact, ring + stage * 2 * S::tile_halves);
            publish_to_tensor_cores();
            Ring<S>::arrive(Ring<S>::full + stage);
            __syncwarp();  // what this warp read may be overwritten by its next copies
            stage      = stage == S::stages - 1 ? 0 : stage + 1;
            slot       = slot == S::raw_ahead ? 0 : slot + 1;
            ahead_slot = ahead_slot == S::raw_ahead ? 0 : ahead_slot + 1;
        }
        for (int i = min(n, S::stages); i > 0; --i) {  // no barrier is left half used
            Ring<S>::wait(Ring<S>::empty + (n - i) % S::stages);
        }
        return;
    }
    set_registers<true, S::registers>();

    const ScoreRows rows(p, head, row0 + (int(threadIdx.x) - S::loaders) / 32 * 16, lane);
    uint32_t        q[KS][4];
    rows.load_queries<D>(p, lane, [&](int i, int w, uint32_t pair) { q[w / 2][2 * (w & 1) + i] = pair; });
    // this thread's in shared memory, a piece of 16 bytes for every step of the product
    uint4 * q_pieces = reinterpret_cast<uint4 *>(reinterpret_cast<uint8_t *>(ring) + S::ring_bytes + S::raw_bytes) +
                       threadIdx.x - S::loaders;
    if constexpr (S::q_shared) {
#pragma unroll
        for (int ks = 0; ks < KS; ++ks) {
            q_pieces[ks * 2 * S::rows] = make_uint4(q[ks][0], q[ks][1], q[ks][2], q[ks][3]);
        }
    }

    OnlineSoftmax<D> sums;
    int              stage = 0;
    for (int tile = next_seen(flags, tile0, tile1); tile < tile1; tile = next_seen(flags, tile + 1, tile1)) {
        const bool masked = flags[tile] & kTileMasked;
        Ring<S>::wait(Ring<S>::full + stage);
        const half *keys = ring + stage * 2 * S::tile_halves, *values = keys + S::tile_halves;
        float       s[NS][4];
        if constexpr (S::q_shared) {
#pragma unroll
            for (int ks = 0; ks < KS; ++ks) {
                const uint4 piece = q_pieces[ks * 2 * S::rows];
                q[ks][0]          = piece.x;
                q[ks][1]          = piece.y;
                q[ks][2]          = piece.z;
                q[ks][3]          = piece.w;
            }
        }
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < KS; ++ks) {
            const half * at = keys + ks / 4 * BC * kPanelColumns + ks % 4 * 16;
            wgmma_64x64x16<false>(s, q[ks], panel_descriptor(at, panel_bytes), ks > 0);
        }
        wgmma_commit();
        wgmma_wait(s);
        finish_scores(p, p.score_scale * kFp4Inverse, s);
        if (masked) {
            rows.mask_scores(p, lane, tile * BC, s);
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
        Ring<S>::arrive(Ring<S>::empty + stage);
        stage = stage == S::stages - 1 ? 0 : stage + 1;
    }
    sums.write(p, rows, lane, blockIdx.z);
#else
    __trap();
#endif
}

template <int D, bool COARSE>
void launch(const AttendParams & p, int n_blocks, cudaStream_t stream) {
    using S           = WgmmaShape<D, COARSE>;
    const auto kernel = attend_prefill_wgmma<S>;
    // of the current device, hence every time; a failure shows in the launch
    (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared_bytes);
    kernel<<<dim3(n_blocks, p.n_heads, p.n_split), S::threads, S::shared_bytes, stream>>>(p);
}

}  // namespace

void launch_prefill_wgmma(const AttendParams & p, int head_dim, int n_blocks, cudaStream_t stream) {
    if (p.scale_shift == kFineShift) {
        head_dim == 128 ? launch<128, false>(p, n_blocks, stream) : launch<64, false>(p, n_blocks, stream);
    } else {
        head_dim == 128 ? launch<128, true>(p, n_blocks, stream) : launch<64, true>(p, n_blocks, stream);
    }
}

}  // namespace device
}  // namespace kvfold
