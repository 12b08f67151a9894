// Launches that may begin before the kernel ahead of them in the stream has ended ("programmatic dependent launch", compute
// capability 9.0 on): its set-up, which needs nothing of that kernel, then costs no time.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <unordered_map>

namespace kvfold {
namespace device {

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

template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                  Args... args) {
    cudaLaunchAttribute early{};
    early.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim          = grid;
    config.blockDim         = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream           = stream;
    config.attrs            = &early;
    config.numAttrs         = can_begin_early(reinterpret_cast<const void *>(kernel)) ? 1 : 0;
    (void) cudaLaunchKernelEx(&config, kernel, Params(args)...);  // a failure shows in cudaGetLastError()
}

}  // namespace kvfold
