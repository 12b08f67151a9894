// Matrix products of a warpgroup (4 warps) on Hopper's tensor cores, which read one operand from shared memory by themselves.
// Only for code compiled for sm_90a. (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".)
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace kvfold {
namespace device {

// A matrix of halves in shared memory is kept in panels of 64 columns: a row of a panel has 128 bytes, 8 rows repeat a pattern in which
// the 16-byte chunks of row r change places, chunk c to c ^ (r % 8), so that neither rows nor columns meet in a bank. Panels begin at
// multiples of 1024 bytes.
constexpr int kPanelColumns = 64;

// Where chunk `chunk` (8 halves) of a row is, in halves, in a matrix of ROWS rows.
template <int ROWS>
__device__ __forceinline__ int panel_chunk(int row, int chunk) {
    return (chunk >> 3) * ROWS * kPanelColumns + row * kPanelColumns + ((chunk ^ row) & 7) * 8;
}

// Describes operand B, which begins at `at`, to the tensor cores; `panel_bytes`: from one panel to the next (for operands whose
// columns are the columns of the product and are more than a panel).
__device__ __forceinline__ uint64_t panel_descriptor(const half * at, int panel_bytes) {
    const uint64_t address = uint32_t(__cvta_generic_to_shared(at));
    const uint64_t rows8 = 1024, pattern128 = 1;
    return (address & 0x3FFFF) >> 4 | uint64_t(panel_bytes >> 4) << 16 | (rows8 >> 4) << 32 | pattern128 << 62;
}

// Registers and shared memory written so far may be used by the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products that were committed; their sums may be read then.
template <int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
        asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");  // no read moves to before the wait
    }
}

// Shared memory that this thread wrote is seen by the tensor cores after the next barrier.
__device__ __forceinline__ void publish_to_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Gives registers of this warpgroup back, or takes such (MORE): afterwards each thread has COUNT, a multiple of 8.
template <bool MORE, int COUNT>
__device__ __forceinline__ void set_registers() {
    if constexpr (MORE) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT));
    }
}

#define KVFOLD_ACC(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

// d (64xN, f32; fragments of 8 columns as in mma_16x8x16, 16 rows a warp) = a (64x16) * b (16xN), or += where `add`. B has a row
// of shared memory for each column of the product, or, TRANSPOSED, for each of the 16 it sums over.
template <bool TRANSPOSED>
__device__ __forceinline__ void wgmma_64x64x16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %38, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;\n"
                 "}\n"
                 : KVFOLD_ACC(d, 0), KVFOLD_ACC(d, 1), KVFOLD_ACC(d, 2), KVFOLD_ACC(d, 3), KVFOLD_ACC(d, 4),
                   KVFOLD_ACC(d, 5), KVFOLD_ACC(d, 6), KVFOLD_ACC(d, 7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED ? 1 : 0), "r"(int(add)));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void wgmma_64x128x16(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %70, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
                 "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
                 "%62, %63"
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;\n"
                 "}\n"
                 : KVFOLD_ACC(d, 0), KVFOLD_ACC(d, 1), KVFOLD_ACC(d, 2), KVFOLD_ACC(d, 3), KVFOLD_ACC(d, 4),
                   KVFOLD_ACC(d, 5), KVFOLD_ACC(d, 6), KVFOLD_ACC(d, 7), KVFOLD_ACC(d, 8), KVFOLD_ACC(d, 9),
                   KVFOLD_ACC(d, 10), KVFOLD_ACC(d, 11), KVFOLD_ACC(d, 12), KVFOLD_ACC(d, 13), KVFOLD_ACC(d, 14),
                   KVFOLD_ACC(d, 15)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED ? 1 : 0), "r"(int(add)));
}

#undef KVFOLD_ACC

}  // namespace device
}  // namespace kvfold
