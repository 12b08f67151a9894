// CUDA twins of the operations in kv_ops.h: the same arguments with device pointers, queued on a stream.
//
// Nothing here allocates, synchronises or reads device memory from the host, so every call can be captured in a CUDA
// graph. What a call launches depends only on shapes; counts that change from step to step are read on the device.
// A launch that fails shows in cudaGetLastError().
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "ops/kv_ops.h"
#include "ops/kv_receive.h"
#include "ops/kv_sample.h"
#include "ops/kv_score.h"
#include "ops/kv_select.h"

namespace kvfold {

// What a launch is fitted to.
struct CudaDevice {
    int n_sm;  // multiprocessors
    int arch;  // compute capability, 10 * major + minor; at least 75

    // Bytes of scratch for current rows as halves: where all heads' take more, KV heads are attended in turns.
    size_t half_rows = size_t(32) << 20;
};

// Can these shapes be run? Null when yes, else what is not possible.
const char * kv_ops_cuda_refusal(int32_t n_head_kv, int32_t head_dim, int32_t group, int32_t n_head);

// How the rotation is shared out: with few rows the kernels do it on the way; rows of large micro-batches come rotated, because
// every block that reads them would do the work again. So `rot` of an attention of more than 16 columns (n_q * n_head /
// n_head_kv), of kv_fold_cuda() and of kv_store_cuda() is {0, 0}.

// kv_attend. Scores are computed from f16 queries and exactly decoded rows with f32 accumulation; weights are rounded
// to f16 before they meet the values. `scratch` is 256-byte aligned and as large as kv_attend_cuda_scratch() says.
size_t kv_attend_cuda_scratch(const AttendArgs & a, const CudaDevice & device);
void   kv_attend_cuda(const AttendArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream);

// kv_select, and kv_attend_sparse. Null, or what is not possible with these arguments.
const char * kv_select_cuda_refusal(const SelectArgs & a, const CudaDevice & device);
// Is kv_select a launch of its own beside the attention's?
bool   kv_select_cuda_reads_few(const SelectArgs & a);
size_t kv_select_cuda_scratch(const SelectArgs & a, const CudaDevice & device);
void   kv_select_cuda(const SelectArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream);
// With 16 query heads a KV head, or 8 at head size 256, nothing stands in for what is unread.
size_t kv_attend_sparse_cuda_scratch(const SparseAttendArgs & a, const CudaDevice & device);
// kv_select and kv_attend_sparse of the same queries over the lists that it makes (which are written, too), by one launch where the
// blocks of a list all have a multiprocessor.
size_t kv_select_attend_cuda_scratch(const SelectArgs & a, const SparseAttendArgs & b, const CudaDevice & device);
void kv_select_attend_cuda(const SelectArgs & a, const SparseAttendArgs & b, const CudaDevice & device, void * scratch,
                           cudaStream_t stream);
// `after_lookup`: what was queued last on the stream is the kv_select_cuda() of the same queries, all other arguments being ready
// before that; the exact cells are then attended while it is still at work.
void kv_attend_sparse_cuda(const SparseAttendArgs & a, bool after_lookup, const CudaDevice & device, void * scratch,
                           cudaStream_t stream);

// kv_score; results differ from the CPU's by the rounding of sums. `scratch` is as large as kv_score_cuda_scratch() says.
size_t kv_score_cuda_scratch(const ScoreArgs & a, const CudaDevice & device);
void   kv_score_cuda(const ScoreArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream);

// kv_observe, for any number of layers at once (none: nothing is launched). Layers that differ in more than their memory cost
// further launches.
void kv_observe_cuda(const std::vector<ObserveArgs> & layers, cudaStream_t stream);

// kv_sample, for any number of layers at once, as kv_observe_cuda(). The bytes written equal those of the CPU.
void kv_sample_cuda(const std::vector<SampleArgs> & layers, cudaStream_t stream);

// kv_sampled. Keys are rounded to f16, as they are for many queries; scores differ from the CPU's by that. `scratch` is as large as
// kv_sampled_cuda_scratch() says.
size_t kv_sampled_cuda_scratch(const SampledArgs & a, const CudaDevice & device);
void   kv_sampled_cuda(const SampledArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream);

// kv_receive and kv_lose; queries and keys are rounded as for kv_attend. `rot` is {0, 0} however few queries there are.
void kv_receive_cuda(const ReceiveArgs & a, cudaStream_t stream);
void kv_lose_cuda(const LoseArgs & a, cudaStream_t stream);

// kv_align, likewise; slow, as it is for reports.
void kv_align_cuda(const SparseAttendArgs & a, Alignment * sums, cudaStream_t stream);

// kv_fold: `a.n_groups` is the capacity of the plan; how many entries are real is read from `n_real` (device memory) when
// it is not null. The bytes written equal those of the CPU. Spans are not made: a cache on a device has none.
void kv_fold_cuda(const FoldArgs & a, const int32_t * n_real, cudaStream_t stream);

// Where the number of a plan that has been carried out is copied from and to (device memory); null: nowhere.
struct Epoch {
    const int32_t * from;
    int32_t *       to;
};

// kv_store. Of `a.mem`, the far tier and the side memory are not used.
void kv_store_cuda(const StoreArgs & a, const Epoch & epoch, cudaStream_t stream);

// kv_fold and then kv_store of the same layer and micro-batch, for any number of layers at once; the count of the plan and its
// number as above. Worth it when there is little to do (decoding): heads are independent, so one block does both for its head.
// Layers that differ in more than their memory cost further launches.
struct CommitArgs {
    FoldArgs  fold;
    StoreArgs store;
    int32_t * epoch;
};
void kv_commit_cuda(const std::vector<CommitArgs> & layers, const int32_t * n_real, const int32_t * epoch,
                    cudaStream_t stream);

}  // namespace kvfold
