// The side file that `kvfold calibrate` writes: a GGUF file without tensors. kvfold/calibration.py says what is in it.
#pragma once

#include <cstdint>

#include "kvfold/kvfold.h"

struct llama_model;

namespace kvfold {

constexpr uint32_t kCalibrationVersion = 1;

// False (see fail) for a file that cannot be read, is cut short, is no calibration, or has another version.
bool read_calibration(const char * path, kvfold_calibration & out);

// False (see fail) if a calibration is that of another model. A dry run has no weights to tell by.
bool check_calibration(const kvfold_calibration & calibration, const llama_model & model);

}  // namespace kvfold
