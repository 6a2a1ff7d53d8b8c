// The Python face of what a backward runs beside the two adjoints.
#include "module_backward.h"

#include <pybind11/stl.h>

#include "../bindings.h"
#include "channel_sums.h"
#include "gemm_gradients.h"
#include "to_pixels.h"

namespace py = pybind11;

namespace upfold::cuda {
namespace {

// (samples, channels, depth, height, width), or the strides of these axes.
using Five = std::array<std::int64_t, 5>;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

Strides strides_of(const Five& strides) { return {strides[0], strides[1], strides[2], strides[3], strides[4]}; }

ChannelSumsCall channel_sums_call(int device, int dtype, const Five& sizes, const Five& strides, std::int64_t alignment) {
  return {device,
          {static_cast<Dtype>(dtype), sizes[0], sizes[1], {sizes[2], sizes[3], sizes[4]}, strides_of(strides), alignment}};
}

void channel_sums(const ChannelSumsCall& call, std::uintptr_t tensor, std::uintptr_t sums, std::uintptr_t workspace,
                  std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run(pointer(tensor), pointer(sums), pointer(workspace), stream);
}

ToPixelsCall to_pixels_call(int device, int dtype, const Five& sizes, const Five& strides) {
  return {device, {static_cast<Dtype>(dtype), sizes[0], sizes[1], {sizes[2], sizes[3], sizes[4]}, strides_of(strides)}};
}

void to_pixels(const ToPixelsCall& call, std::uintptr_t from, std::uintptr_t to, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run(pointer(from), pointer(to), stream);
}

void gemm_gradients(const GemmGradientsCall& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t y,
                    std::uintptr_t x_gradient, std::uintptr_t w_gradient, std::uintptr_t workspace, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run({pointer(x), pointer(w), pointer(y), pointer(x_gradient), pointer(w_gradient), pointer(workspace)}, stream);
}

}  // namespace

void bind_backward(py::module_& m) {
  py::class_<ChannelSumsCall>(m, "ChannelSumsCall", py::module_local())
      .def(py::init(&channel_sums_call), py::arg("device"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"),
           py::arg("alignment"))
      .def_property_readonly("workspace_bytes", &ChannelSumsCall::workspace_bytes)
      .def("run", &channel_sums, py::arg("tensor"), py::arg("sums"), py::arg("workspace"), py::arg("stream"));
  py::class_<ToPixelsCall>(m, "ToPixelsCall", py::module_local())
      .def(py::init(&to_pixels_call), py::arg("device"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"))
      .def_property_readonly("fits", &ToPixelsCall::fits)
      .def("run", &to_pixels, py::arg("source"), py::arg("to"), py::arg("stream"));
  py::class_<GemmGradientsCall>(m, "GemmGradientsCall", py::module_local())
      .def(py::init<int, const Problem&, const Problem&, std::int64_t, bool>(), py::arg("device"), py::arg("conv"),
           py::arg("weight"), py::arg("workspace_cap"), py::arg("allow_tf32"))
      .def_property_readonly("shares", &GemmGradientsCall::shares)
      .def_property_readonly("workspace_bytes", &GemmGradientsCall::workspace_bytes)
      .def("run", &gemm_gradients, py::arg("x"), py::arg("w"), py::arg("y"), py::arg("x_gradient"), py::arg("w_gradient"),
           py::arg("workspace"), py::arg("stream"));
}

}  // namespace upfold::cuda
