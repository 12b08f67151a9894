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

Bytes encode(const Floats & x) {
    Bytes         blocks(resized("x", x, kFp4BlockValues, sizeof(Fp4Block)));
    const float * from = x.data();
    auto *        to   = reinterpret_cast<Fp4Block *>(blocks.mutable_data());
    const int64_t n    = x.size();
    {
        py::gil_scoped_release release;
        fp4_encode_row(from, to, n);
    }
    return blocks;
}

Floats decode(const Bytes & blocks) {
    Floats        x(resized("data", blocks, sizeof(Fp4Block), kFp4BlockValues));
    const auto *  from = reinterpret_cast<const Fp4Block *>(blocks.data());
    float *       to   = x.mutable_data();
    const int64_t n    = x.size();
    {
        py::gil_scoped_release release;
        fp4_decode_row(from, to, n);
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
    m.def("fp4_encode", &encode, py::arg("x").noconvert(),
          "Encode float32 [..., 64 n] to FP4 bytes uint8 [..., 36 n]. ValueError: the last axis is no multiple of 64.");
    m.def("fp4_decode", &decode, py::arg("data").noconvert(),
          "Decode FP4 bytes uint8 [..., 36 n] to float32 [..., 64 n]. ValueError: the last axis is no multiple of 36.");
    m.def("fp4_scales", &scales, "Values of the scale bytes 0 .. 0xF7: float32 [248].");
    m.def("fp4_values", &values, "Values of the 16 nibbles: float32 [16].");
}

}  // namespace kvfold
