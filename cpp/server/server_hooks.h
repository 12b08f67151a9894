// What the patched llama-server calls. Nothing changes for a server without a kvfold cache, except that compacting is refused.
#pragma once

#include <memory>

#include "kvfold/kvfold.h"  // the server asks kvfold_prefix_usable() itself
#include "server-http.h"
#include "server-task.h"

// `POST /slots/N?action=compact&keep=0.5`, or with {"keep": 0.5} as its body, drops what the text of an idle slot can do without
// (kvfold_compact). It travels through the server as an erasure does, and waits for its slot as that does.
struct kvfold_server {
    // Makes a compaction of the task, an erasure, if the request is for one. std::invalid_argument: its `keep` is not possible.
    static void request(const server_http_req & req, server_task & task);
    static bool is_compaction(const server_task & task);
    // An erasure's result, or an error.
    static server_task_result_ptr compact(const server_task & task, const server_tokens & text, llama_context * ctx);

    // Adds to what `/slots` say of a slot: `n_kept`, positions that the cache holds of it, and `n_evicted`, those it lacks.
    static void count(json & slot, const llama_context * ctx, int id);
    // To be called for an empty result: adds the same to the `usage` of an OpenAI completion, as `kept_tokens` and `evicted_tokens`.
    static void count(std::unique_ptr<server_task_result_cmpl_final> & result, const llama_context * ctx, int id);
};
