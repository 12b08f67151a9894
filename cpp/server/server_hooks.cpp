#include "server/server_hooks.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "llama.h"

namespace {

// A task to erase a slot has no use for its file name; this one makes it a task to compact it. `keep` is in place of the path.
constexpr char kAction[] = "compact";

// Positions of a slot; `kept` is negative without a kvfold cache.
struct Counts {
    Counts(const llama_context * ctx, int id)
        : kept(kvfold_kept(ctx, id)), evicted(kvfold_evicted(ctx, id, INT32_MAX)) {}

    int32_t kept;
    int32_t evicted;
};

struct CompactResult : server_task_result_slot_erase {
    explicit CompactResult(const Counts & counts) : counts(counts) {}

    json to_json() override {
        return json{
            {"id_slot", id_slot},
            {"n_kept", counts.kept},
            {"n_evicted", counts.evicted},
            {"timings", {{"compact_ms", t_ms}}},
        };
    }

    const Counts counts;
    double       t_ms = 0;
};

struct CountedResult : server_task_result_cmpl_final {
    explicit CountedResult(const Counts & counts) : counts(counts) {}

    json to_json() override {
        json reply = server_task_result_cmpl_final::to_json();
        if (res_type != TASK_RESPONSE_TYPE_OAI_CMPL && res_type != TASK_RESPONSE_TYPE_OAI_CHAT) {
            return reply;
        }
        if (reply.is_array()) {  // the chunks that end a stream
            for (json & chunk : reply) {
                add(chunk);
            }
        } else {
            add(reply);
        }
        return reply;
    }

    void add(json & reply) const {
        if (reply.contains("usage") && reply.at("usage").is_object()) {
            reply["usage"]["kept_tokens"]    = counts.kept;
            reply["usage"]["evicted_tokens"] = counts.evicted;
        }
    }

    const Counts counts;
};

// What was given as `keep`; 0.5, as in Python, if nothing was.
std::string given_keep(const server_http_req & req) {
    json body = json::object();
    if (!req.body.empty()) {
        body = json::parse_no_throw(req.body);
        if (!body.is_object()) {
            throw std::invalid_argument(
                "compact: the body of the request is not a JSON object; possible: {\"keep\": 0.5}");
        }
    }
    const std::string in_body = body.contains("keep") ? body.at("keep").dump_safe() : "0.5";
    return req.get_param("keep", in_body);
}

}  // namespace

void kvfold_server::request(const server_http_req & req, server_task & task) {
    if (req.get_param("action") != kAction) {
        return;
    }
    const std::string keep  = given_keep(req);
    char *            end   = nullptr;
    const float       share = std::strtof(keep.c_str(), &end);
    if (end == keep.c_str() || *end != '\0' || !(share > 0.0f && share <= 1.0f)) {
        throw std::invalid_argument("compact: keep must be a share above 0 and up to 1, got '" + keep + "'");
    }
    task.slot_action.filename = kAction;
    task.slot_action.filepath = keep;
}

bool kvfold_server::is_compaction(const server_task & task) { return task.slot_action.filename == kAction; }

server_task_result_ptr kvfold_server::compact(const server_task & task, const server_tokens & text,
                                              llama_context * ctx) {
    const int  id     = task.slot_action.id_slot;
    const auto refuse = [&](error_type type, const std::string & reason) {
        auto error      = std::make_unique<server_task_result_error>();
        error->id       = task.id;
        error->err_type = type;
        error->err_msg  = reason;
        return error;
    };
    if (kvfold_kept(ctx, 0) < 0) {
        return refuse(
            ERROR_TYPE_NOT_SUPPORTED,
            "compact: this server has no kvfold cache. Start it with `--kv-type`: fp4, fp4_csa2 or fp4_csa2_ced");
    }
    if (kvfold_kept(ctx, id) < 0) {  // llama-server would take another one
        return refuse(ERROR_TYPE_INVALID_REQUEST, "compact: slot " + std::to_string(id) +
                                                      " does not exist; possible: 0 to " +
                                                      std::to_string(llama_n_seq_max(ctx) - 1));
    }
    const llama_tokens tokens = text.get_text_tokens();
    if (tokens.empty() || tokens.size() != text.size()) {
        return refuse(ERROR_TYPE_INVALID_REQUEST,
                      "compact: slot " + std::to_string(id) + " holds " +
                          (text.empty() ? "no text" : "more than text, which cannot be read again"));
    }
    const int64_t start = llama_time_us();
    const float   keep  = std::strtof(task.slot_action.filepath.c_str(), nullptr);
    if (kvfold_compact(ctx, id, tokens.data(), tokens.size(), keep) < 0) {
        return refuse(ERROR_TYPE_INVALID_REQUEST, kvfold_last_error());
    }
    auto result     = std::make_unique<CompactResult>(Counts(ctx, id));
    result->id      = task.id;
    result->id_slot = id;
    result->t_ms    = double(llama_time_us() - start) / 1e3;
    return result;
}

void kvfold_server::count(json & slot, const llama_context * ctx, int id) {
    const Counts counts(ctx, id);
    if (counts.kept >= 0) {
        slot["n_kept"]    = counts.kept;
        slot["n_evicted"] = counts.evicted;
    }
}

void kvfold_server::count(std::unique_ptr<server_task_result_cmpl_final> & result, const llama_context * ctx, int id) {
    const Counts counts(ctx, id);
    if (counts.kept >= 0) {
        result = std::make_unique<CountedResult>(counts);
    }
}
