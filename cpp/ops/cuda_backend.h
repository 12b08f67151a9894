// kvfold's operations on ggml's CUDA backend: what the hooks in ggml-cuda.cu call.
#pragma once

#include <cstddef>

struct ggml_backend_cuda_context;
struct ggml_cgraph;
struct ggml_tensor;

namespace kvfold {

// The nodes that come next are those of `graph`, in order, or some of them.
void cuda_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph);

// Queues a node of ours; false when it is not one.
bool cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

// What a node of ours needs beside its result, in bytes, so that it is allocated and accounted for with the other buffers of the
// graph; 0 when it is not one. The sources need no memory yet.
size_t cuda_scratch(int device, const ggml_tensor * node);

// Can the device compute this node? -1 when it is not one of ours, else 0 or 1.
int cuda_supports(int device, const ggml_tensor * node);

}  // namespace kvfold
