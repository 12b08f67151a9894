#include "ops/cuda_backend.h"

#include <vector>

#include "common.cuh"
#include "ops/kv_ops_cuda.h"
#include "ops/node_args.h"

namespace kvfold {

namespace {

// A micro-batch of up to so many rows is folded and stored by one launch.
constexpr int64_t kCommitRows = 16;

// Where the device finds what the plan's header says.
const int32_t * plan_header(const ggml_tensor * plan, PlanHeader at) { return tensor_data<const int32_t>(plan) + at; }

// A fold that leaves its work to the store node which comes after it. Outside of an attention graph there is no such node.
bool is_deferred(const ggml_tensor * fold) {
    return fold->src[fold_src::before] != nullptr && fold->src[fold_src::k_cur]->ne[1] <= kCommitRows;
}

CudaDevice the_device(int id) {
    const auto & info = ggml_cuda_info().devices[id];
    return {info.nsm, info.cc / 10};
}

constexpr size_t kScratchAlignment = 256;

// Behind the result of a node, where cuda_scratch() had room made.
void * scratch_of(const ggml_tensor * node) {
    const uintptr_t end = reinterpret_cast<uintptr_t>(node->data) + ggml_nbytes(node);
    return reinterpret_cast<void *>((end + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment);
}

// A look-up that is left to the attention behind it, to be one launch. The attention of the same layer is next in the graph, unless the
// look-up makes a pool, which is not counted.
bool is_deferred_look_up(const ggml_tensor * selection) {
    const NodeParams p = node_params(selection);
    return NodeOp(p.op) == NodeOp::select && !(p.lookup_max == 0 && p.min_tokens != 0);
}

// Does an attention have its own look-up, or another layer's?
bool looks_up(const ggml_tensor * attend) {
    const ggml_tensor * selection = attend->src[attend_src::selection];
    return selection != nullptr && selection->src[select_src::q] == attend->src[attend_src::q];
}

bool packed(const ggml_tensor * t, ggml_type type) {
    return t != nullptr && t->type == type && t->nb[0] == ggml_type_size(type);
}

// --- a look-up beside other nodes ------------------------------------------------------------------------------------
//
// A look-up needs the queries only, and its blocks mostly wait for each other. So the graph has it before the projections of keys and
// values (graph_nodes.cpp), and those are queued on a second stream until the attention needs both: at 64K that takes 6 us of 40 off a
// layer (bench/cuda/NOTES.md, look-up 11). Neither is in the way of the other, since the attention has all that a look-up reads and
// writes among its sources, so that no node between them is given that memory. Only a look-up that is a launch of its own goes ahead.

// Streams of a context are ggml's, which uses the first ones where it runs nodes side by side.
constexpr int kSecondStream = GGML_CUDA_MAX_STREAMS - 1;

struct Ahead {
    const ggml_cgraph * graph     = nullptr;  // that is being queued
    int                 searched  = 0;        // nodes of it before the last attention that was looked for
    const ggml_tensor * selection = nullptr;  // whose attention is still to come; other nodes go to the second stream
    cudaEvent_t         events[GGML_CUDA_MAX_DEVICES][2]{};
};
thread_local Ahead ahead;

// Or does ggml run nodes of this graph side by side (GGML_CUDA_GRAPH_OPT)?
bool runs_in_order(ggml_backend_cuda_context & ctx) {
    return ctx.curr_stream_no == 0 && ctx.stream_context().concurrent_events.empty();
}

bool may_go_ahead(const ggml_tensor * selection) {
    return is_deferred_look_up(selection) && kv_select_cuda_reads_few(select_args(selection));
}

// The attention has to be in the same graph: a graph that is recorded must end on one stream.
bool is_followed_by_attention(const ggml_tensor * selection) {
    ggml_cgraph * graph = const_cast<ggml_cgraph *>(ahead.graph);  // ggml's functions want it so
    for (int i = ahead.searched; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_kvfold_node(node) && NodeOp(node_params(node).op) == NodeOp::attend &&
            node->src[attend_src::selection] == selection && looks_up(node)) {
            ahead.searched = i;
            return true;
        }
    }
    return false;
}

// What is queued on `to` from now on waits for what has been queued on `from`.
void follow(ggml_backend_cuda_context & ctx, int from, int to) {
    cudaEvent_t & event = ahead.events[ctx.device][from == 0 ? 0 : 1];
    if (event == nullptr) {
        CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaEventRecord(event, ctx.stream(ctx.device, from)));
    CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(ctx.device, to), event));
}

}  // namespace

void cuda_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph) {
    if (ahead.selection != nullptr) {  // a graph that broke off
        ctx.curr_stream_no = 0;
    }
    ahead.graph     = graph;
    ahead.searched  = 0;
    ahead.selection = nullptr;
}

size_t cuda_scratch(int device_id, const ggml_tensor * node) {
    if (!is_kvfold_node(node)) {
        return 0;
    }
    const CudaDevice device = the_device(device_id);
    size_t           bytes  = 0;
    if (NodeOp(node_params(node).op) == NodeOp::select) {
        const bool alone = !is_deferred_look_up(node) || may_go_ahead(node);
        bytes            = alone ? kv_select_cuda_scratch(select_args(node), device) : 0;
    } else if (NodeOp(node_params(node).op) == NodeOp::attend) {
        const ggml_tensor * selection = node->src[attend_src::selection];
        bytes = selection == nullptr ? kv_attend_cuda_scratch(attend_args(node), device)
                : looks_up(node) && is_deferred_look_up(selection)
                    ? kv_select_attend_cuda_scratch(select_args(selection), sparse_attend_args(node), device)
                    : kv_attend_sparse_cuda_scratch(sparse_attend_args(node), device);
    } else if (NodeOp(node_params(node).op) == NodeOp::score) {
        bytes = kv_score_cuda_scratch(score_args(node), device);
    } else if (NodeOp(node_params(node).op) == NodeOp::sampled) {
        bytes = kv_sampled_cuda_scratch(sampled_args(node), device);
    }
    return bytes > 0 ? bytes + kScratchAlignment - 1 : 0;
}

bool cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    if (!is_kvfold_node(node)) {
        return false;
    }
    cudaStream_t     stream = ctx.stream();
    const CudaDevice device = the_device(ctx.device);
    // Stores that wait for the last one of their graph, observations, and queries to keep. (A graph that broke off leaves some; attention
    // is the sign of a new one.)
    thread_local std::vector<CommitArgs>  pending;
    thread_local std::vector<ObserveArgs> observations;
    thread_local std::vector<SampleArgs>  samples;
    switch (NodeOp(node_params(node).op)) {
    case NodeOp::attend:
        pending.clear();
        observations.clear();
        samples.clear();
        if (const ggml_tensor * selection = node->src[attend_src::selection]; selection != nullptr) {
            const SparseAttendArgs a = sparse_attend_args(node);
            if (selection == ahead.selection) {
                ahead.selection    = nullptr;
                ctx.curr_stream_no = 0;
                stream             = ctx.stream();
                follow(ctx, kSecondStream, 0);
                kv_attend_sparse_cuda(a, true, device, scratch_of(node), stream);
            } else if (looks_up(node) && is_deferred_look_up(selection)) {
                kv_select_attend_cuda(select_args(selection), a, device, scratch_of(node), stream);
            } else {
                kv_attend_sparse_cuda(a, looks_up(node), device, scratch_of(node), stream);
            }
        } else {
            kv_attend_cuda(attend_args(node), device, scratch_of(node), stream);
        }
        break;
    case NodeOp::select:
        if (!is_deferred_look_up(node)) {
            kv_select_cuda(select_args(node), device, scratch_of(node), stream);
        } else if (may_go_ahead(node) && runs_in_order(ctx) && is_followed_by_attention(node)) {
            follow(ctx, 0, kSecondStream);
            kv_select_cuda(select_args(node), device, scratch_of(node), stream);
            ahead.selection    = node;
            ctx.curr_stream_no = kSecondStream;
        }
        break;
    case NodeOp::fold:
        if (!is_deferred(node)) {
            kv_fold_cuda(fold_args(node), plan_header(node->src[fold_src::plan], kPlanFolds), stream);
        }
        break;
    case NodeOp::store:
    case NodeOp::store_batched: {
        const StoreArgs     a    = store_args(node);
        const ggml_tensor * plan = node->src[store_src::plan];
        const ggml_tensor * fold = node->src[store_src::before];
        if (NodeOp(node_params(node).op) == NodeOp::store) {
            kv_observe_cuda(observations, stream);
            observations.clear();
            kv_sample_cuda(samples, stream);
            samples.clear();
        }
        if (fold != nullptr && is_kvfold_node(fold) && is_deferred(fold)) {
            pending.push_back({fold_args(fold), a, epoch_of(a.mem)});
            if (NodeOp(node_params(node).op) == NodeOp::store) {
                kv_commit_cuda(pending, plan_header(plan, kPlanFolds), plan_header(plan, kPlanEpoch), stream);
                pending.clear();
            }
        } else {
            kv_store_cuda(a, {plan_header(plan, kPlanEpoch), epoch_of(a.mem)}, stream);
        }
        break;
    }
    case NodeOp::score:
        kv_score_cuda(score_args(node), device, scratch_of(node), stream);
        break;
    case NodeOp::observe:
        kv_observe_cuda({observe_args(node)}, stream);
        break;
    case NodeOp::observe_batched:
        observations.push_back(observe_args(node));
        break;
    case NodeOp::sample:
        kv_sample_cuda({sample_args(node)}, stream);
        break;
    case NodeOp::sample_batched:
        samples.push_back(sample_args(node));
        break;
    case NodeOp::sampled:
        kv_sampled_cuda(sampled_args(node), device, scratch_of(node), stream);
        break;
    case NodeOp::receive:
        kv_receive_cuda(receive_args(node), stream);
        break;
    case NodeOp::align:
        kv_align_cuda(sparse_attend_args(node), tensor_data<Alignment>(node), stream);
        break;
    case NodeOp::lose:
        kv_lose_cuda(lose_args(node), stream);
        break;
    default:
        return false;
    }
    CUDA_CHECK(cudaGetLastError());
    return true;
}

int cuda_supports(int device, const ggml_tensor * node) {
    if (!is_kvfold_node(node)) {
        return -1;
    }
    const auto & info = ggml_cuda_info().devices[device];
    if (!GGML_CUDA_CC_IS_NVIDIA(info.cc) || info.cc < 750) {
        return 0;
    }
    const NodeParams p = node_params(node);
    if (NodeOp(p.op) == NodeOp::select) {
        const ggml_tensor *q = node->src[select_src::q], *mask = node->src[select_src::mask];
        return packed(q, GGML_TYPE_F32) && (mask == nullptr || packed(mask, GGML_TYPE_F16)) &&
               kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, int32_t(q->ne[2])) == nullptr &&
               kv_select_cuda_refusal(select_args(node), the_device(device)) == nullptr;
    }
    if (NodeOp(p.op) == NodeOp::score) {
        return kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, score_args(node).n_head) == nullptr;
    }
    if (NodeOp(p.op) == NodeOp::sampled) {
        return kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, sampled_args(node).n_head) == nullptr;
    }
    if (NodeOp(p.op) == NodeOp::observe || NodeOp(p.op) == NodeOp::observe_batched || NodeOp(p.op) == NodeOp::sample ||
        NodeOp(p.op) == NodeOp::sample_batched) {
        static_assert(int(observe_src::q) == int(sample_src::q));
        const ggml_tensor * q = node->src[observe_src::q];
        return packed(q, GGML_TYPE_F32) &&
               kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, int32_t(q->ne[2])) == nullptr;
    }
    if (NodeOp(p.op) == NodeOp::fold || NodeOp(p.op) == NodeOp::store || NodeOp(p.op) == NodeOp::store_batched) {
        return kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, p.n_head_kv) == nullptr;
    }
    // attend, and what has its sources
    const ggml_tensor *q = node->src[attend_src::q], *mask = node->src[attend_src::mask];
    return packed(q, GGML_TYPE_F32) && packed(node->src[attend_src::k_cur], GGML_TYPE_F32) &&
           packed(node->src[attend_src::v_cur], GGML_TYPE_F32) && (mask == nullptr || packed(mask, GGML_TYPE_F16)) &&
           kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, int32_t(q->ne[2])) == nullptr;
}

}  // namespace kvfold
