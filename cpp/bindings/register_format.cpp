// The FP4 row codec on NumPy arrays.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "format/fp4_codec.h"

namespace kvfold {

namespace {

// The shape of `a` with its last axis changed from a multiple of `from` to the same multiple of `to`.
std::vector<py::ssize_t> resized(const char * name, const py::array & a, py::ssize_t from, py::ssize_t to) {
    if (a.ndim() < 1 || a.shape(a.ndim() - 1) % from != 0) {
        throw py::value_error(std::string(name) + ": the last axis must be a multiple of " + std::to_string(from) +
                              ", got shape " + shape_text(a));
    }
    std::vector<py::ssize_t> shape(a.shape(), a.shape() + a.ndim());
    shape.back() = shape.back() / from * to;
    return shape;
}

using Floats = py::array_t<float, py::array::c_style>;
using Bytes  = py::array_t<uint8_t, py::array::c_style>;

void require_scale_group(int scale_group) {
    if (!is_scale_group(scale_group)) {
        throw py::value_error("scale_group: " + std::to_string(scale_group) + " is not one of 16, 32, 64");
    }
}

// Of rows of `channels`, one behind the other. With a scale group of 32 or 64, a row's values lie in front of its scales.
Fp4Row row_at(const uint8_t * rows, int64_t index, int64_t channels, int scale_group) {
    auto * at = const_cast<uint8_t *>(rows) + index * channels / kFp4BlockValues * fp4_block_bytes(scale_group);
    if (scale_group == kFp4ScaleGroup) {
        return {at, at + sizeof(Fp4Block::scale), sizeof(Fp4Block), sizeof(Fp4Block)};
    }
    return {at + channels / 2, at, kFp4BlockValues / scale_group, kFp4BlockValues / 2};
}

Bytes encode(const Floats & x, int scale_group) {
    require_scale_group(scale_group);
    Bytes         rows(resized("x", x, kFp4BlockValues, fp4_block_bytes(scale_group)));
    const float * from = x.data();
    uint8_t *     to   = rows.mutable_data();
    const int64_t n = x.shape(x.ndim() - 1), n_rows = n > 0 ? x.size() / n : 0;
    {
        py::gil_scoped_release release;
        for (int64_t i = 0; i < n_rows; ++i) {
            fp4_encode_row(from + i * n, row_at(to, i, n, scale_group), n, scale_group);
        }
    }
    return rows;
}

Floats decode(const Bytes & rows, int scale_group) {
    require_scale_group(scale_group);
    Floats          x(resized("data", rows, fp4_block_bytes(scale_group), kFp4BlockValues));
    const uint8_t * from = rows.data();
    float *         to   = x.mutable_data();
    const int64_t   n = x.shape(x.ndim() - 1), n_rows = n > 0 ? x.size() / n : 0;
    {
        py::gil_scoped_release release;
        for (int64_t i = 0; i < n_rows; ++i) {
            fp4_decode_row(row_at(from, i, n, scale_group), to + i * n, n, scale_group);
        }
    }
    return x;
}

Floats scales() {
    Floats table(kScaleMax + 1);
    for (int code = 0; code <= kScaleMax; ++code) {
        table.mutable_data()[code] = scale_decode(uint32_t(code));
    }
    return table;
}

Floats values() {
    Floats table(16);
    for (int nibble = 0; nibble < 16; ++nibble) {
        table.mutable_data()[nibble] = e2m1_decode(uint32_t(nibble));
    }
    return table;
}

}  // namespace

void register_format(py::module_ & m) {
    m.def("fp4_encode", &encode, py::arg("x").noconvert(), py::kw_only(), py::arg("scale_group") = kFp4ScaleGroup,
          "Encode float32 [..., 64 n] to FP4 bytes uint8 [..., b n], with a scale for every 16, 32 or 64 channels;\n"
          "b is 36, 34 or 33. With 32 and 64 the scales lie behind the values. ValueError: the last axis is no "
          "multiple of 64, or another scale group.");
    m.def(
        "fp4_decode", &decode, py::arg("data").noconvert(), py::kw_only(), py::arg("scale_group") = kFp4ScaleGroup,
        "Decode FP4 bytes uint8 [..., b n] to float32 [..., 64 n]. ValueError: the last axis is no multiple of b, or\n"
        "another scale group.");
    m.def("fp4_scales", &scales, "Values of the scale bytes 0 .. 0xF7: float32 [248].");
    m.def("fp4_values", &values, "Values of the 16 nibbles: float32 [16].");
}

}  // namespace kvfold
