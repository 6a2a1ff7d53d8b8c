// The Python classes Problem and ColumnBlock, bound in the same way by every module of upfold.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <exception>

#include "columns.h"
#include "error.h"
#include "problem.h"

namespace upfold {

inline std::array<std::int64_t, 5> integers5(const pybind11::handle& value, const char* name) {
  const auto sequence = pybind11::reinterpret_borrow<pybind11::object>(value).cast<pybind11::tuple>();
  require(sequence.size() == 5, name, " has ", sequence.size(), " entries; must have 5");
  std::array<std::int64_t, 5> result{};
  for (std::size_t i = 0; i < 5; ++i) result[i] = sequence[i].cast<std::int64_t>();
  return result;
}

inline Range range_of(const pybind11::handle& value, const char* name) {
  const auto sequence = pybind11::reinterpret_borrow<pybind11::object>(value).cast<pybind11::tuple>();
  require(sequence.size() == 2, name, " has ", sequence.size(), " entries; must be (begin, end)");
  return {sequence[0].cast<std::int64_t>(), sequence[1].cast<std::int64_t>()};
}

inline Strides strides_of(const pybind11::handle& value, const char* name) {
  const std::array<std::int64_t, 5> s = integers5(value, name);
  return {s[0], s[1], s[2], s[3], s[4]};
}

inline pybind11::tuple tuple_of(const Strides& s) { return pybind11::make_tuple(s.n, s.c, s.d, s.h, s.w); }

// The integer fields of a Problem, by the names that Python uses.
struct ProblemField {
  const char* name;
  std::int64_t Problem::* member;
};

constexpr ProblemField kProblemFields[] = {
    {"batch", &Problem::batch},
    {"in_channels", &Problem::in_channels},
    {"out_channels", &Problem::out_channels},
    {"groups", &Problem::groups},
    {"in_d", &Problem::in_d},
    {"in_h", &Problem::in_h},
    {"in_w", &Problem::in_w},
    {"out_d", &Problem::out_d},
    {"out_h", &Problem::out_h},
    {"out_w", &Problem::out_w},
    {"kernel_d", &Problem::kernel_d},
    {"kernel_h", &Problem::kernel_h},
    {"kernel_w", &Problem::kernel_w},
    {"stride_d", &Problem::stride_d},
    {"stride_h", &Problem::stride_h},
    {"stride_w", &Problem::stride_w},
    {"pad_d", &Problem::pad_d},
    {"pad_h", &Problem::pad_h},
    {"pad_w", &Problem::pad_w},
    {"dilation_d", &Problem::dilation_d},
    {"dilation_h", &Problem::dilation_h},
    {"dilation_w", &Problem::dilation_w},
};

// Problem(op=, dtype=, activation=, activation_slope=, batch=, ..., x_strides=, w_strides=, y_strides=): every field is required
// but activation, activation_slope and the strides.
inline Problem problem_from(const pybind11::kwargs& fields) {
  Problem p{};
  std::size_t used = 0;
  const auto take = [&](const char* name, bool required) {
    const bool given = fields.contains(name);
    require(given || !required, "Problem: ", name, " is missing");
    used += given ? 1 : 0;
    return given ? pybind11::object(fields[name]) : pybind11::object(pybind11::none());
  };
  p.op = static_cast<Operator>(take("op", true).cast<std::int32_t>());
  p.dtype = static_cast<Dtype>(take("dtype", true).cast<std::int32_t>());
  const pybind11::object activation = take("activation", false), slope = take("activation_slope", false);
  p.activation = activation.is_none() ? Activation::kNone : static_cast<Activation>(activation.cast<std::int32_t>());
  p.activation_slope = slope.is_none() ? 0.0f : slope.cast<float>();
  for (const ProblemField& field : kProblemFields) p.*field.member = take(field.name, true).cast<std::int64_t>();
  const pybind11::object x = take("x_strides", false), w = take("w_strides", false), y = take("y_strides", false);
  if (!x.is_none()) p.x = strides_of(x, "x_strides");
  if (!w.is_none()) p.w = strides_of(w, "w_strides");
  if (!y.is_none()) p.y = strides_of(y, "y_strides");
  require(used == fields.size(), "Problem: an unknown field was given among ",
          pybind11::repr(pybind11::list(fields)).cast<std::string>());
  return p;
}

inline ColumnBlock column_block_from(const pybind11::kwargs& fields) {
  const auto range = [&](const char* name) {
    require(fields.contains(name), "ColumnBlock: ", name, " is missing");
    return range_of(fields[name], name);
  };
  const auto integer = [&](const char* name) {
    require(fields.contains(name), "ColumnBlock: ", name, " is missing");
    return fields[name].cast<std::int64_t>();
  };
  require(fields.size() == 10, "ColumnBlock: ", fields.size(), " fields given; must be 10");
  return {range("n"),           range("oc"),    range("in_d"),
          range("in_h"),        range("in_w"),  range("out_d"),
          range("out_h"),       range("out_w"), integer("sample_stride"),
          integer("row_stride")};
}

// Raises upfold.InvalidArgument, the class that Python's own checks raise; a ValueError where a module stands alone.
inline void raise_in_python(const InvalidArgument& error) {
  namespace py = pybind11;
  py::object kind = py::reinterpret_borrow<py::object>(PyExc_ValueError);
  try {
    kind = py::module_::import("upfold.geometry").attr("InvalidArgument");
  } catch (const py::error_already_set&) {
  }
  py::set_error(kind, error.what());
}

inline void bind_problem(pybind11::module_& m) {
  namespace py = pybind11;
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const InvalidArgument& error) {
      raise_in_python(error);
    }
  });
  py::class_<Problem> problem(m, "Problem", py::module_local(),
                              "One operator call: sizes, axes, dtype and strides, checked by Python.");
  problem.def(py::init([](const py::kwargs& fields) { return problem_from(fields); }));
  for (const ProblemField& field : kProblemFields) problem.def_readonly(field.name, field.member);
  problem.def_property_readonly("op", [](const Problem& p) { return static_cast<std::int32_t>(p.op); });
  problem.def_property_readonly("dtype", [](const Problem& p) { return static_cast<std::int32_t>(p.dtype); });
  problem.def_property_readonly("activation", [](const Problem& p) { return static_cast<std::int32_t>(p.activation); });
  problem.def_readonly("activation_slope", &Problem::activation_slope);
  problem.def_property_readonly("x_strides", [](const Problem& p) { return tuple_of(p.x); });
  problem.def_property_readonly("w_strides", [](const Problem& p) { return tuple_of(p.w); });
  problem.def_property_readonly("y_strides", [](const Problem& p) { return tuple_of(p.y); });
  py::class_<ColumnBlock>(m, "ColumnBlock", py::module_local(), "The block of the column matrix that one call works on.")
      .def(py::init([](const py::kwargs& fields) { return column_block_from(fields); }));
}

}  // namespace upfold
