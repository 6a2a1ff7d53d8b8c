// The part of the Python face that module.cpp calls for the tiles of fused_api.h.
#pragma once

#include <pybind11/pybind11.h>

namespace upfold::cuda {

void bind_tiles(pybind11::module_& m);

}  // namespace upfold::cuda
