// The Python face of the CPU kernels: pointers arrive as integers (0 is null), the lock of the interpreter is released while they
// run.
#include <build_info.h>
#include <pybind11/stl.h>

#include "../bindings.h"
#include "api.h"

namespace py = pybind11;

namespace {

using upfold::ColumnBlock;
using upfold::Dtype;
using upfold::Problem;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void col2im(const Problem& p, const ColumnBlock& block, int column_dtype, std::uintptr_t columns, std::uintptr_t bias,
            std::uintptr_t y, int threads) {
  const py::gil_scoped_release release;
  upfold::cpu::col2im(p, block, static_cast<Dtype>(column_dtype), pointer(columns), pointer(bias), pointer(y), threads);
}

void im2col(const Problem& p, const ColumnBlock& block, int column_dtype, std::uintptr_t y, std::uintptr_t columns, int threads) {
  const py::gil_scoped_release release;
  upfold::cpu::im2col(p, block, static_cast<Dtype>(column_dtype), pointer(y), pointer(columns), threads);
}

template <void (*run)(const Problem&, const upfold::cpu::Operands&, int)>
void call(const Problem& p, std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y, std::uintptr_t workspace,
          int threads) {
  const py::gil_scoped_release release;
  run(p, {pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace)}, threads);
}

void fused_pack(const Problem& p, std::uintptr_t w, std::uintptr_t packed, int threads) {
  const py::gil_scoped_release release;
  upfold::cpu::fused_pack(p, pointer(w), pointer(packed), threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of upfold: pointers, a Problem and a thread count in; nothing of torch.";
  upfold::bind_problem(m);
  m.def("col2im", &col2im, py::arg("problem"), py::arg("block"), py::arg("column_dtype"), py::arg("columns"), py::arg("bias"),
        py::arg("y"), py::arg("threads"));
  m.def("im2col", &im2col, py::arg("problem"), py::arg("block"), py::arg("column_dtype"), py::arg("y"), py::arg("columns"),
        py::arg("threads"));
  m.def("direct_workspace_bytes", &upfold::cpu::direct_workspace_bytes, py::arg("problem"), py::arg("threads"));
  m.def("direct", &call<upfold::cpu::direct>, py::arg("problem"), py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"),
        py::arg("workspace"), py::arg("threads"));
  m.def("fused_workspace_bytes", &upfold::cpu::fused_workspace_bytes, py::arg("problem"), py::arg("threads"));
  m.def("fused", &call<upfold::cpu::fused>, py::arg("problem"), py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"),
        py::arg("workspace"), py::arg("threads"));
  m.def("fused_packing", &upfold::cpu::fused_packing, py::arg("problem"), py::arg("threads"));
  m.def("fused_pack", &fused_pack, py::arg("problem"), py::arg("w"), py::arg("packed"), py::arg("threads"));
  m.def("fused_packed", &call<upfold::cpu::fused_packed>, py::arg("problem"), py::arg("x"), py::arg("w"), py::arg("bias"),
        py::arg("y"), py::arg("packed"), py::arg("threads"));
  m.def("instruction_set", &upfold::cpu::instruction_set);
  m.def("threading", &upfold::cpu::threading);
  m.def("compiler", &upfold::compiler_name);
  m.def("build_info", &upfold::build_info);
}
