// The Python face of the CUDA kernels: pointers and streams arrive as integers (0 is null, or the default stream), the lock of
// the interpreter is released while work is enqueued.
#include <build_info.h>
#include <pybind11/stl.h>

#include <array>

#include "../bindings.h"
#include "api.h"
#include "compiled.h"
#include "cublas.h"
#include "fused_weight.h"
#include "fused_weight_last.h"
#include "module_backward.h"
#include "module_tiles.h"

namespace py = pybind11;

namespace {

using upfold::ColumnBlock;
using upfold::Dtype;
using upfold::Problem;
using upfold::cuda::GemmCall;
using upfold::cuda::GemmForm;
using upfold::cuda::GemmOptions;
using upfold::cuda::Launch;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void col2im(const Problem& p, const ColumnBlock& block, int column_dtype, std::uintptr_t columns, std::uintptr_t bias,
            std::uintptr_t y, int device, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  upfold::cuda::col2im({device, stream}, p, block, static_cast<Dtype>(column_dtype), pointer(columns), pointer(bias), pointer(y));
}

// Rows of columns in any order; `strides` = (channel, tap_d, tap_h, tap_w), `addresses` = (columns, bias, y).
void col2im_strided(const Problem& p, const ColumnBlock& block, const std::array<std::int64_t, 4>& strides, int column_dtype,
                    const std::array<std::uintptr_t, 3>& addresses, int device, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  upfold::cuda::col2im({device, stream}, p, block, {strides[0], strides[1], strides[2], strides[3]},
                       static_cast<Dtype>(column_dtype), pointer(addresses[0]), pointer(addresses[1]), pointer(addresses[2]));
}

void im2col(const Problem& p, const ColumnBlock& block, int column_dtype, std::uintptr_t y, std::uintptr_t columns, int device,
            std::uintptr_t stream) {
  const py::gil_scoped_release release;
  upfold::cuda::im2col({device, stream}, p, block, static_cast<Dtype>(column_dtype), pointer(y), pointer(columns));
}

void col2im_atomic(const Problem& p, const ColumnBlock& block, std::uintptr_t columns, std::uintptr_t bias, std::uintptr_t y,
                   std::uintptr_t staging, int device, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  upfold::cuda::col2im_atomic({device, stream}, p, block, {pointer(columns), pointer(bias), pointer(y), pointer(staging)});
}

// `rows` = (rows, columns, from_row, to_row).
void copy_rows(int dtype, const std::array<std::int64_t, 4>& rows, bool relu, std::uintptr_t from, std::uintptr_t to, int device,
               std::uintptr_t stream) {
  const py::gil_scoped_release release;
  upfold::cuda::copy_rows({device, stream}, static_cast<Dtype>(dtype), {rows[0], rows[1], rows[2], rows[3]}, relu, pointer(from),
                          pointer(to));
}

void gemm(const GemmCall& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y,
          std::uintptr_t workspace, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run({pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace)}, stream);
}

// What the calls of one plan have in common, so that a call converts addresses and nothing else.
template <typename Operands, void (*kRun)(const Launch&, const Problem&, const Operands&, int)>
struct BoundCall {
  Problem problem;
  int config, device;

  void enqueue(std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y, std::uintptr_t workspace,
               std::uintptr_t stream) const {
    const py::gil_scoped_release release;
    kRun({device, stream}, problem, {pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace)}, config);
  }
};
using DirectCall = BoundCall<upfold::cuda::DirectOperands, upfold::cuda::direct>;
using DepthwiseCall = BoundCall<upfold::cuda::DepthwiseOperands, upfold::cuda::depthwise>;
using upfold::cuda::FusedCall;
using upfold::cuda::FusedInputCall;

// (tiles, steps, patch, parts)
py::tuple fused_work(const FusedCall& call) {
  const upfold::cuda::FusedWork work = call.work();
  return py::make_tuple(work.tiles, work.steps, work.patch, work.parts);
}

// Of a forward whose weight may be packed apart.
template <typename Call>
void fused(const Call& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y, std::uintptr_t workspace,
           std::uintptr_t stream, std::uintptr_t packed) {
  const py::gil_scoped_release release;
  call.run({pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace), pointer(packed)}, stream);
}

template <typename Call>
void fused_pack(const Call& call, std::uintptr_t w, std::uintptr_t packed, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.pack(pointer(w), pointer(packed), stream);
}

// (output channels, phases of height, phases of width, units, blocks of a multiprocessor, kind: 1 of warpgroups, 2 whose
// rows are pixels, 3 of warpgroups that pack x, 4 whose rows are channels and phases, 0 another; vectors of channels in a step)
// of each tile choice.
py::list fused_tiles() {
  py::list tiles;
  for (const upfold::cuda::FusedTileSize& t : upfold::cuda::fused_tiles())
    tiles.append(py::make_tuple(t.channels, t.phases_h, t.phases_w, t.units, t.blocks,
                                t.phase_rows      ? 4
                                : t.packed_inputs ? 3
                                : t.pixels        ? 2
                                : t.products > 0  ? 1
                                                  : 0,
                                t.vectors));
  return tiles;
}

void fused_input(const FusedInputCall& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t, std::uintptr_t y,
                 std::uintptr_t workspace, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run({pointer(y), pointer(w), pointer(x), pointer(workspace)}, stream);
}

// (pixels, input channels, how taps are read) of each tile choice.
py::list fused_input_tiles() {
  py::list tiles;
  for (const upfold::cuda::FusedInputTile& tile : upfold::cuda::fused_input_tiles())
    tiles.append(py::make_tuple(tile.pixels, tile.channels, tile.reads));
  return tiles;
}

// (whole, split, parts, steps, copied, grain, resident, later, clustered)
py::tuple fused_input_work(const FusedInputCall& call) {
  const upfold::cuda::FusedInputWork work = call.work();
  return py::make_tuple(work.whole, work.split, work.parts, work.steps, work.copied, work.grain, work.resident, work.later,
                        work.clustered);
}

using upfold::cuda::FusedLastCall;

// (positions, columns, phases, blocks of a multiprocessor, vectors of a chunk) of each tile choice.
py::list fused_last_tiles() {
  py::list tiles;
  for (const upfold::cuda::FusedLastTile& t : upfold::cuda::fused_last_tiles())
    tiles.append(py::make_tuple(t.rows, t.columns, t.phases, t.blocks, t.vectors));
  return tiles;
}

// (tiles, products of a tile, bytes that it copies of the source, whether weights stay, parts of the reduction; bytes of packed
// weights and of packed source, whether lanes store results in planes, blocks that share weights) of a tile choice.
py::tuple fused_last_work(const FusedLastCall& call) {
  const upfold::cuda::FusedLastWork work = call.work();
  return py::make_tuple(work.tiles, work.products, work.copied, work.resident, work.splits, work.packed, work.source, work.loose,
                        work.sharers);
}

using upfold::cuda::FusedWeightCall;

// (taps, warps, channels, blocks of a multiprocessor, whether operands come in boxes) of each tile of the weight's gradient.
py::list fused_weight_tiles() {
  py::list tiles;
  for (const upfold::cuda::FusedWeightTileSize& t : upfold::cuda::fused_weight_tiles())
    tiles.append(py::make_tuple(t.taps, t.warps, t.channels, t.blocks, t.boxes));
  return tiles;
}

// (blocks, steps of one, products and copies of a step, bytes that are packed, and that are copied as planes, blocks that share,
// whether maps are one row, parts that a cluster adds up)
py::tuple fused_weight_work(const FusedWeightCall& call) {
  const upfold::cuda::FusedWeightWork work = call.work();
  return py::make_tuple(work.blocks, work.steps, work.products, work.copies, work.packed, work.planes, work.sharers, work.merged,
                        work.together);
}

void fused_weight(const FusedWeightCall& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y,
                  std::uintptr_t workspace, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run({pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace)}, stream);
}

using upfold::cuda::FusedWeightLastCall;

// (input channels, columns) of each tile of the weight's gradient whose channels are innermost.
py::list fused_weight_last_tiles() {
  py::list tiles;
  for (const upfold::cuda::FusedWeightLastTile& t : upfold::cuda::fused_weight_last_tiles())
    tiles.append(py::make_tuple(t.channels, t.columns));
  return tiles;
}

// (blocks, tiles of positions of one, launches, products and copied bytes of such a tile, packed bytes, bytes of partial sums,
// cycles of a store of w by a block, blocks that share it)
py::tuple fused_weight_last_work(const FusedWeightLastCall& call) {
  const upfold::cuda::FusedWeightLastWork work = call.work();
  return py::make_tuple(work.blocks, work.length, work.launches, work.steps, work.copied, work.packed, work.partial, work.stored,
                        work.cluster, work.squares, work.planes);
}

void fused_weight_last(const FusedWeightLastCall& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y,
                       std::uintptr_t workspace, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  call.run({pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace)}, stream);
}

// (result channels, positions) of each tile choice.
py::list direct_tiles() {
  py::list tiles;
  for (const upfold::cuda::DirectTile& tile : upfold::cuda::direct_tiles())
    tiles.append(py::make_tuple(tile.channels, tile.pixels));
  return tiles;
}

// (blocks, steps of the reduction of each) of a tile choice.
py::tuple direct_work(const Problem& p, int config) {
  const upfold::cuda::DirectWork work = upfold::cuda::direct_work(p, config);
  return py::make_tuple(work.blocks, work.steps);
}

// 12080 -> "12.8"; empty for 0.
std::string dotted(int version) { return version == 0 ? "" : upfold::concat(version / 1000, ".", version % 1000 / 10); }

py::dict info() {
  const upfold::cuda::Info found = upfold::cuda::info();
  const upfold::cuda::CublasFound cublas = upfold::cuda::find_cublas();
  py::list devices;
  for (const upfold::cuda::Device& device : found.devices) {
    devices.append(py::dict(py::arg("name") = device.name, py::arg("capability") = py::make_tuple(device.major, device.minor),
                            py::arg("multiprocessors") = device.multiprocessors, py::arg("memory_bytes") = device.memory_bytes));
  }
  return py::dict(py::arg("compiled_version") = dotted(found.compiled_version), py::arg("architectures") = found.architectures,
                  py::arg("runtime_version") = dotted(found.runtime_version),
                  py::arg("driver_version") = dotted(found.driver_version), py::arg("driver_floor") = found.driver_floor,
                  py::arg("devices") = devices, py::arg("no_device_reason") = found.no_device_reason,
                  py::arg("cublas_path") = cublas.path, py::arg("cublas_version") = cublas.version,
                  py::arg("cublas_reason") = cublas.reason);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of upfold: device pointers, a Problem, a device and a stream in; nothing of torch.";
  upfold::bind_problem(m);
  m.def("col2im", &col2im, py::arg("problem"), py::arg("block"), py::arg("column_dtype"), py::arg("columns"), py::arg("bias"),
        py::arg("y"), py::arg("device"), py::arg("stream"));
  m.def("col2im_strided", &col2im_strided, py::arg("problem"), py::arg("block"), py::arg("strides"), py::arg("column_dtype"),
        py::arg("addresses"), py::arg("device"), py::arg("stream"));
  m.def("im2col", &im2col, py::arg("problem"), py::arg("block"), py::arg("column_dtype"), py::arg("y"), py::arg("columns"),
        py::arg("device"), py::arg("stream"));
  m.def("col2im_atomic", &col2im_atomic, py::arg("problem"), py::arg("block"), py::arg("columns"), py::arg("bias"), py::arg("y"),
        py::arg("staging"), py::arg("device"), py::arg("stream"));
  m.def("copy_rows", &copy_rows, py::arg("dtype"), py::arg("rows"), py::arg("relu"), py::arg("source"), py::arg("to"),
        py::arg("device"), py::arg("stream"));
  py::class_<GemmOptions>(m, "GemmOptions", py::module_local())
      .def(py::init([](std::int64_t workspace_cap, std::int64_t chunk_bytes, bool allow_tf32, bool atomic, bool has_bias,
                       int form, std::int64_t alignment) {
             return GemmOptions{workspace_cap, chunk_bytes, allow_tf32, atomic, has_bias, GemmForm(form), false, alignment};
           }),
           py::kw_only(), py::arg("workspace_cap"), py::arg("chunk_bytes"), py::arg("allow_tf32"), py::arg("atomic"),
           py::arg("has_bias"), py::arg("form"), py::arg("alignment") = 16);
  m.def("gemm_prepare", &upfold::cuda::gemm_prepare, py::arg("device"), py::call_guard<py::gil_scoped_release>());
  py::class_<GemmCall>(m, "GemmCall", py::module_local(), "One planned call: run(x, w, bias, y, workspace, stream).")
      .def(py::init<int, const Problem&, const GemmOptions&>(), py::arg("device"), py::arg("problem"), py::arg("options"))
      .def_property_readonly("workspace_bytes", &GemmCall::workspace_bytes)
      .def("run", &gemm, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"), py::arg("stream"));
  m.def("direct_tiles", &direct_tiles);
  m.def("direct_fits", &upfold::cuda::direct_fits, py::arg("problem"), py::arg("config"));
  m.def("direct_work", &direct_work, py::arg("problem"), py::arg("config"));
  m.def("direct_workspace_bytes", &upfold::cuda::direct_workspace_bytes, py::arg("problem"), py::arg("config"));
  py::class_<DirectCall>(m, "DirectCall", py::module_local())
      .def(py::init([](const Problem& problem, int config, int device) { return DirectCall{problem, config, device}; }),
           py::arg("problem"), py::arg("config"), py::arg("device"))
      .def("enqueue", &DirectCall::enqueue, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"));
  m.def("depthwise_fits", &upfold::cuda::depthwise_fits, py::arg("problem"), py::arg("config"));
  m.def("depthwise_workspace_bytes", &upfold::cuda::depthwise_workspace_bytes, py::arg("problem"), py::arg("config"));
  py::class_<DepthwiseCall>(m, "DepthwiseCall", py::module_local())
      .def(py::init([](const Problem& problem, int config, int device) { return DepthwiseCall{problem, config, device}; }),
           py::arg("problem"), py::arg("config"), py::arg("device"))
      .def("enqueue", &DepthwiseCall::enqueue, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"));
  m.def("fused_tiles", &fused_tiles);
  m.def("fused_fits", &upfold::cuda::fused_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"),
        py::arg("exact"));
  py::class_<FusedCall>(m, "FusedCall", py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t, std::int64_t, bool>(), py::arg("device"), py::arg("problem"),
           py::arg("config"), py::arg("alignment"), py::arg("workspace_cap"), py::arg("exact"))
      .def_property_readonly("workspace_bytes", &FusedCall::workspace_bytes)
      .def_property_readonly("work", &fused_work)
      .def_property_readonly("packed_bytes", &FusedCall::packed_bytes)
      .def_property_readonly("packing", &FusedCall::packing)
      .def("pack", &fused_pack<FusedCall>, py::arg("w"), py::arg("packed"), py::arg("stream"))
      .def("enqueue", &fused<FusedCall>, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"), py::arg("packed") = 0);
  m.def("fused_input_tiles", &fused_input_tiles);
  m.def("fused_input_fits", &upfold::cuda::fused_input_fits, py::arg("device"), py::arg("problem"), py::arg("config"),
        py::arg("alignment"));
  py::class_<FusedInputCall>(m, "FusedInputCall", py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t>(), py::arg("device"), py::arg("problem"), py::arg("config"),
           py::arg("alignment"))
      .def_property_readonly("workspace_bytes", &FusedInputCall::workspace_bytes)
      .def_property_readonly("work", &fused_input_work)
      .def("enqueue", &fused_input, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"));
  m.def("fused_last_tiles", &fused_last_tiles);
  m.def("fused_last_fits", &upfold::cuda::fused_last_fits, py::arg("device"), py::arg("problem"), py::arg("config"),
        py::arg("alignment"));
  py::class_<FusedLastCall>(m, "FusedLastCall", py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t, std::int64_t>(), py::arg("device"), py::arg("problem"),
           py::arg("config"), py::arg("alignment"), py::arg("workspace_cap"))
      .def_property_readonly("workspace_bytes", &FusedLastCall::workspace_bytes)
      .def_property_readonly("work", &fused_last_work)
      .def_property_readonly("packed_bytes", &FusedLastCall::packed_bytes)
      .def_property_readonly("packing", &FusedLastCall::packing)
      .def("pack", &fused_pack<FusedLastCall>, py::arg("w"), py::arg("packed"), py::arg("stream"))
      .def("enqueue", &fused<FusedLastCall>, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"), py::arg("packed") = 0);
  upfold::cuda::bind_tiles(m);
  upfold::cuda::bind_backward(m);
  m.def("fused_weight_tiles", &fused_weight_tiles);
  py::class_<FusedWeightCall>(m, "FusedWeightCall", py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t, std::int64_t>(), py::arg("device"), py::arg("problem"),
           py::arg("config"), py::arg("alignment"), py::arg("workspace_cap"))
      .def_property_readonly("workspace_bytes", &FusedWeightCall::workspace_bytes)
      .def_property_readonly("work", &fused_weight_work)
      .def_property_readonly("sums", &FusedWeightCall::sums)
      .def("enqueue", &fused_weight, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"));
  m.def("fused_weight_last_tiles", &fused_weight_last_tiles);
  py::class_<FusedWeightLastCall>(m, "FusedWeightLastCall", py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t, std::int64_t>(), py::arg("device"), py::arg("problem"),
           py::arg("config"), py::arg("alignment"), py::arg("workspace_cap"))
      .def_property_readonly("workspace_bytes", &FusedWeightLastCall::workspace_bytes)
      .def_property_readonly("work", &fused_weight_last_work)
      .def("enqueue", &fused_weight_last, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"));
  m.def("code_capability", &upfold::cuda::code_capability, py::arg("device"));
  m.def("info", &info);
  m.def("build_info", &upfold::build_info);
}
