#include "cache/calibration.h"

#include <cstring>
#include <string>

#include "cache/config.h"
#include "cache/fingerprint.h"
#include "ggml-cpp.h"
#include "llama-model.h"

namespace kvfold {

namespace {

const std::string k_prefix = "kvfold.calibration.";

bool refuse(const char * path, const std::string & why) {
    return fail(message("kv_calibration '%s' %s; `kvfold calibrate` makes one", path, why.c_str()));
}

// The number of a key, or -1 if the file has none of this type.
int64_t find(const gguf_context * file, const std::string & name, gguf_type type) {
    const int64_t id = gguf_find_key(file, (k_prefix + name).c_str());
    return id >= 0 && gguf_get_kv_type(file, id) == type ? id : -1;
}

}  // namespace

bool read_calibration(const char * path, kvfold_calibration & out) {
    const gguf_context_ptr file(gguf_init_from_file(path, {/*no_alloc =*/true, /*ctx =*/nullptr}));
    if (!file) {
        return refuse(path, "cannot be read, or is not a whole GGUF file");
    }
    const int64_t version = find(file.get(), "version", GGUF_TYPE_UINT32);
    if (version < 0) {
        return refuse(path, "is not a calibration");
    }
    if (const uint32_t found = gguf_get_val_u32(file.get(), version); found != kCalibrationVersion) {
        return refuse(path, message("has format version %u, this kvfold reads version %u", found, kCalibrationVersion));
    }
    const int64_t model = find(file.get(), "model.fingerprint", GGUF_TYPE_UINT64);
    if (model < 0 || gguf_get_val_u64(file.get(), model) == 0) {
        return refuse(path, "does not say which model it is for");
    }
    // The settings as they are written on a command line, judged as if they were.
    kvfold_config settings = unset_config(KVFOLD_TYPE_FP4_CSA2);
    for (const char * name : {"kv_group", "kv_lookup", "kv_threshold", "kv_min_tokens", "kv_layers"}) {
        const int64_t id = find(file.get(), name, GGUF_TYPE_STRING);
        if (id < 0) {
            return refuse(path, std::string("has no ") + name);
        }
        if (!kvfold_config_set(&settings, name, gguf_get_val_str(file.get(), id))) {
            return refuse(path, std::string("has an impossible value: ") + kvfold_last_error());
        }
    }
    settings.tail = 1;
    if (!kvfold_config_check(&settings)) {
        return refuse(path, std::string("has an impossible value: ") + kvfold_last_error());
    }
    out = {gguf_get_val_u64(file.get(), model),
           settings.group,
           settings.lookup_min,
           settings.lookup_max,
           settings.threshold,
           settings.min_tokens,
           {}};
    std::memcpy(out.layers, settings.layers, sizeof(out.layers));
    return true;
}

bool check_calibration(const kvfold_calibration & calibration, const llama_model & model) {
    if (calibration.model == 0 || model.hparams.no_alloc || calibration.model == model_fingerprint(model)) {
        return true;
    }
    return fail(message("kv_calibration is that of another model than this one (%s, fingerprint %016llx, the file has "
                        "%016llx); `kvfold calibrate` makes one",
                        model.desc().c_str(), static_cast<unsigned long long>(model_fingerprint(model)),
                        static_cast<unsigned long long>(calibration.model)));
}

}  // namespace kvfold

uint64_t kvfold_model_fingerprint(const llama_model * model) { return kvfold::model_fingerprint(*model); }
