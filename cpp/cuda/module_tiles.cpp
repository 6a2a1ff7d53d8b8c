// The Python face of the tiles of the fused method for few channels and for small maps.
#include "module_tiles.h"

#include <pybind11/stl.h>

#include "../bindings.h"
#include "fused_api.h"
#include "fused_weight_laid.h"

namespace py = pybind11;

namespace upfold::cuda {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

template <typename Call>
void enqueue(const Call& call, std::uintptr_t x, std::uintptr_t w, std::uintptr_t bias, std::uintptr_t y,
             std::uintptr_t workspace, std::uintptr_t stream, std::uintptr_t packed) {
  const py::gil_scoped_release release;
  call.run({pointer(x), pointer(w), pointer(bias), pointer(y), pointer(workspace), pointer(packed)}, stream);
}

// (blocks, of a multiprocessor, walks of a block, steps of a walk, products and turns of a step, bytes that are copied)
py::tuple fused_columns_work(const FusedColumnsCall& call) {
  const FusedColumnsWork work = call.work();
  return py::make_tuple(work.blocks, work.resident, work.walks, work.steps, work.products, work.turns, work.copied);
}

// (blocks, of a multiprocessor, tiles of a block, vectors that a thread fills in, products of a tile)
py::tuple fused_units_work(const FusedUnitsCall& call) {
  const FusedUnitsWork work = call.work();
  return py::make_tuple(work.blocks, work.resident, work.tiles, work.filled, work.products);
}

// (tiles, chunks of one, bytes that are copied for each, positions of outputs, cycles of a chunk's products)
py::tuple fused_maps_work(const FusedMapsCall& call) {
  const FusedMapsWork work = call.work();
  return py::make_tuple(work.tiles, work.chunks, work.copied, work.positions, work.cycles);
}

// (blocks, warps of one, runs of a warp, units of a run, products of a unit, bytes of a row)
py::tuple fused_heads_work(const FusedHeadsCall& call) {
  const FusedHeadsWork work = call.work();
  return py::make_tuple(work.blocks, work.warps, work.turns, work.units, work.products, work.row_bytes);
}

// (blocks, channels of x that one loads, samples of one)
py::tuple fused_point_work(const FusedPointCall& call) {
  const FusedPointWork work = call.work();
  return py::make_tuple(work.blocks, work.rows, work.samples);
}

// (blocks, rows of the weight and samples of one)
py::tuple fused_point_input_work(const FusedPointInputCall& call) {
  const FusedPointWork work = call.work();
  return py::make_tuple(work.blocks, work.rows, work.samples);
}

// (tiles, chunks of one, parts of the reduction, stages, whether taps may lie beside the plane and pixels are laid out one by
// one)
py::tuple fused_laid_work(const FusedLaidCall& call) {
  const FusedLaidWork work = call.work();
  return py::make_tuple(work.tiles, work.chunks, work.splits, work.stages, work.beside);
}

// (tiles, parts of one that a cluster adds up, clusters of parts, chunks of one, stages, bytes of a chunk's rows of y, whether
// two pixels are laid out together, bytes of x that are packed, of partial sums)
py::tuple fused_weight_laid_work(const FusedWeightLaidCall& call) {
  const FusedWeightLaidWork work = call.work();
  return py::make_tuple(work.tiles, work.splits, work.clusters, work.chunks, work.stages, work.raw_bytes, work.paired,
                        work.packed, work.partial);
}

// (blocks, steps of the reduction of a warp)
py::tuple fused_small_work(const FusedSmallCall& call) {
  const FusedSmallWork work = call.work();
  return py::make_tuple(work.blocks, work.steps);
}

// (blocks, pixels times chunks, steps whose weight is laid out, steps of a warp)
py::tuple fused_window_work(const FusedWindowCall& call) {
  const FusedWindowWork work = call.work();
  return py::make_tuple(work.blocks, work.loaded, work.laid, work.steps);
}

// The class of a call whose plan depends on the alignment, and which needs no workspace.
template <typename Call, typename Work>
void define_aligned(py::module_& m, const char* name, const Work& work) {
  py::class_<Call>(m, name, py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t>(), py::arg("device"), py::arg("problem"), py::arg("config"),
           py::arg("alignment"))
      .def_property_readonly("work", work)
      .def("enqueue", &enqueue<Call>, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"), py::arg("packed") = 0);
}

// (tiles, blocks, loads and products of a tile, turns that lay out the weight, output channels)
py::tuple fused_groups_work(const FusedGroupsCall& call) {
  const FusedGroupsWork work = call.work();
  return py::make_tuple(work.tiles, work.blocks, work.loads, work.products, work.packs, work.channels);
}

}  // namespace

void bind_tiles(py::module_& m) {
  m.def("fused_columns_tiles", &fused_columns_tiles);
  m.def("fused_columns_fits", &fused_columns_fits, py::arg("device"), py::arg("problem"), py::arg("config"),
        py::arg("alignment"));
  define_aligned<FusedColumnsCall>(m, "FusedColumnsCall", &fused_columns_work);
  m.def("fused_units_tiles", &fused_units_tiles);
  m.def("fused_units_fits", &fused_units_fits, py::arg("device"), py::arg("problem"), py::arg("config"));
  py::class_<FusedUnitsCall>(m, "FusedUnitsCall", py::module_local())
      .def(py::init<int, const Problem&, int>(), py::arg("device"), py::arg("problem"), py::arg("config"))
      .def_property_readonly("work", &fused_units_work)
      .def("enqueue", &enqueue<FusedUnitsCall>, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"), py::arg("packed") = 0);
  m.def("fused_heads_tiles", &fused_heads_tiles);
  m.def("fused_heads_fits", &fused_heads_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"));
  define_aligned<FusedHeadsCall>(m, "FusedHeadsCall", &fused_heads_work);
  m.def("fused_maps_tiles", &fused_maps_tiles);
  m.def("fused_maps_fits", &fused_maps_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"));
  define_aligned<FusedMapsCall>(m, "FusedMapsCall", &fused_maps_work);
  m.def("fused_point_tiles", &fused_point_tiles);
  m.def("fused_point_fits", &fused_point_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"));
  define_aligned<FusedPointCall>(m, "FusedPointCall", &fused_point_work);
  m.def("fused_point_input_tiles", &fused_point_input_tiles);
  m.def("fused_point_input_fits", &fused_point_input_fits, py::arg("device"), py::arg("problem"), py::arg("config"),
        py::arg("alignment"));
  define_aligned<FusedPointInputCall>(m, "FusedPointInputCall", &fused_point_input_work);
  m.def("fused_laid_tiles", &fused_laid_tiles);
  m.def("fused_laid_fits", &fused_laid_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"));
  define_aligned<FusedLaidCall>(m, "FusedLaidCall", &fused_laid_work);
  m.def("fused_weight_laid_tiles", &fused_weight_laid_tiles);
  py::class_<FusedWeightLaidCall>(m, "FusedWeightLaidCall", py::module_local())
      .def(py::init<int, const Problem&, int, std::int64_t, std::int64_t>(), py::arg("device"), py::arg("problem"),
           py::arg("config"), py::arg("alignment"), py::arg("workspace_cap"))
      .def_property_readonly("workspace_bytes", &FusedWeightLaidCall::workspace_bytes)
      .def_property_readonly("work", &fused_weight_laid_work)
      .def_property_readonly("sums", &FusedWeightLaidCall::sums)
      .def("enqueue", &enqueue<FusedWeightLaidCall>, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"),
           py::arg("workspace"), py::arg("stream"), py::arg("packed") = 0);
  m.def("fused_small_tiles", &fused_small_tiles);
  m.def("fused_small_fits", &fused_small_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"));
  define_aligned<FusedSmallCall>(m, "FusedSmallCall", &fused_small_work);
  m.def("fused_window_tiles", &fused_window_tiles);
  m.def("fused_window_fits", &fused_window_fits, py::arg("device"), py::arg("problem"), py::arg("config"), py::arg("alignment"));
  define_aligned<FusedWindowCall>(m, "FusedWindowCall", &fused_window_work);
  py::class_<FusedGroupsCall>(m, "FusedGroupsCall", py::module_local())
      .def(py::init<int, const Problem&, std::int64_t, std::int64_t>(), py::arg("device"), py::arg("problem"),
           py::arg("alignment"), py::arg("workspace_cap"))
      .def_property_readonly("workspace_bytes", &FusedGroupsCall::workspace_bytes)
      .def_property_readonly("work", &fused_groups_work)
      .def("enqueue", &enqueue<FusedGroupsCall>, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("workspace"),
           py::arg("stream"), py::arg("packed") = 0);
}

}  // namespace upfold::cuda
