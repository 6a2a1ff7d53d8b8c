// The part of the Python face that module.cpp calls for what a backward runs.
#pragma once

#include <pybind11/pybind11.h>

namespace upfold::cuda {

void bind_backward(pybind11::module_& m);

}  // namespace upfold::cuda
