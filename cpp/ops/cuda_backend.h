// kvfold's operations on ggml's CUDA backend: what the two hooks in ggml-cuda.cu call.
#pragma once

struct ggml_backend_cuda_context;
struct ggml_tensor;

namespace kvfold {

// Queues a node of ours; false when it is not one.
bool cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

// Can the device compute this node? -1 when it is not one of ours, else 0 or 1.
int cuda_supports(int device, const ggml_tensor * node);

}  // namespace kvfold
