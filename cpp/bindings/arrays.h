// Checked views of NumPy arrays. Every failure is a Python ValueError that names the argument.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace kvfold {

namespace py = pybind11;

// Element types that the operations know. NumPy's float16 and uint16 (raw bits) are both taken as f16.
enum class Element { u8, i32, f16, f32 };

inline const char * element_name(Element element) {
    switch (element) {
    case Element::u8:
        return "uint8";
    case Element::i32:
        return "int32";
    case Element::f16:
        return "float16 (or uint16)";
    default:
        return "float32";
    }
}

inline bool has_element(const py::array & a, Element element) {
    const char        kind = a.dtype().kind();
    const py::ssize_t size = a.itemsize();
    switch (element) {
    case Element::u8:
        return kind == 'u' && size == 1;
    case Element::i32:
        return kind == 'i' && size == 4;
    case Element::f16:
        return (kind == 'f' || kind == 'u') && size == 2;
    default:
        return kind == 'f' && size == 4;
    }
}

inline std::string shape_text(const py::array & a) {
    std::string text = "[";
    for (py::ssize_t i = 0; i < a.ndim(); ++i) {
        text += (i ? ", " : "") + std::to_string(a.shape(i));
    }
    return text + "]";
}

constexpr py::ssize_t kAny = -1;  // in `require`: any length of this axis

// Checks type, C order and shape; returns the data.
inline const void * require(const char * name, const py::array & a, Element element,
                            std::initializer_list<py::ssize_t> shape) {
    if (!has_element(a, element)) {
        throw py::value_error(std::string(name) + ": expected " + element_name(element) + ", got " +
                              std::string(py::str(a.dtype())));
    }
    if ((a.flags() & py::array::c_style) == 0) {
        throw py::value_error(std::string(name) + ": must be a C-contiguous array");
    }
    bool        same = a.ndim() == py::ssize_t(shape.size());
    std::string wanted;
    py::ssize_t axis = 0;
    for (const py::ssize_t n : shape) {
        same = same && (n == kAny || a.shape(axis) == n);
        wanted += (axis ? ", " : "") + (n == kAny ? std::string("any") : std::to_string(n));
        ++axis;
    }
    if (!same) {
        throw py::value_error(std::string(name) + ": expected shape [" + wanted + "], got " + shape_text(a));
    }
    return a.data();
}

// The same for memory that the operation writes to.
inline void * require_writable(const char * name, const py::array & a, Element element,
                               std::initializer_list<py::ssize_t> shape) {
    require(name, a, element, shape);
    if (!a.writeable()) {
        throw py::value_error(std::string(name) + ": must be writable");
    }
    return const_cast<void *>(a.data());
}

}  // namespace kvfold
