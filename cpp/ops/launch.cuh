// How kernels are launched that
// - may begin before the kernel ahead of them in the stream has ended ("programmatic dependent launch", compute capability 9.0 on): its
//   set-up, which needs nothing of that kernel, then costs no time;
// - have blocks that count each other in global memory.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <unordered_map>

#include "ops/kv_ops.h"

namespace kvfold {
namespace device {

// Counters of blocks: so many places for launches that may overlap, so many counters in each.
constexpr int kArrivalSlots = 64, kArrivals = 256;

// Everything queued earlier is done, and its results can be read, when this returns. Every kernel of launch_early() calls it.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin (and wait).
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace device

// Can the queries of two layers be watched by one launch?
inline bool same_shape(const QueryRows & a, const QueryRows & b) {
    return a.q_stride_query == b.q_stride_query && a.q_stride_head == b.q_stride_head && a.n_q == b.n_q &&
           a.n_head == b.n_head && a.head_dim == b.head_dim && a.rot == b.rot;
}

// Was the kernel compiled with the instructions above? One that was translated from older code must not begin early.
inline bool can_begin_early(const void * kernel) {
    static std::mutex                             mutex;
    static std::unordered_map<const void *, bool> known;  // the same code runs on all devices of a process
    const std::lock_guard<std::mutex>             lock(mutex);
    const auto                                    found = known.find(kernel);
    if (found != known.end()) {
        return found->second;
    }
    cudaFuncAttributes attributes{};
    const bool         can = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
    known.emplace(kernel, can);
    return can;
}

// Launches of one stream run one after the other, so each stream has counters of its own. Negative when there are none left.
inline int arrival_slot(cudaStream_t stream) {
    static std::mutex                            mutex;
    static std::unordered_map<cudaStream_t, int> slots;
    const std::lock_guard<std::mutex>            lock(mutex);
    const auto                                   found = slots.find(stream);
    if (found != slots.end()) {
        return found->second;
    }
    const int slot = int(slots.size());
    if (slot >= device::kArrivalSlots) {
        return -1;
    }
    slots.emplace(stream, slot);
    return slot;
}

// `together`: all blocks are at work at the same time, or else none is, whatever the kernels of other streams do; a grid for which
// there is no room fails. It costs 1.5 us.
template <typename... Params, typename... Args>
void launch_kernel(bool together, void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                   cudaStream_t stream, Args... args) {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t  config{};
    config.gridDim          = grid;
    config.blockDim         = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream           = stream;
    config.attrs            = attributes;
    if (can_begin_early(reinterpret_cast<const void *>(kernel))) {
        cudaLaunchAttribute & early                      = attributes[config.numAttrs++];
        early.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (together) {
        cudaLaunchAttribute & cooperative = attributes[config.numAttrs++];
        cooperative.id                    = cudaLaunchAttributeCooperative;
        cooperative.val.cooperative       = 1;
    }
    (void) cudaLaunchKernelEx(&config, kernel, Params(args)...);  // a failure shows in cudaGetLastError()
}

template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                  Args... args) {
    launch_kernel(false, kernel, grid, threads, shared_bytes, stream, args...);
}

}  // namespace kvfold
