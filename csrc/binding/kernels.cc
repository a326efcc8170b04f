// The CPU kernels themselves, for codecs, tests and the benchmark's memory
// floor.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "binding/array.h"
#include "binding/module.h"
#include "common/check.h"
#include "common/partition.h"
#include "reduce/reduce.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

void reduce_buffers(const nb::list& sources, const nb::list& destinations, const char* op,
                    const std::optional<std::vector<double>>& scales, double divisor) {
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const nb::handle item : sources) {
    arrays.push_back(std::make_unique<Array>(item, false));
    from.push_back(arrays.back()->pointer());
  }
  for (const nb::handle item : destinations) {
    arrays.push_back(std::make_unique<Array>(item, true));
    to.push_back(arrays.back()->pointer());
  }
  const int parsed_op = parse_op(op);
  if (from.empty() || to.empty() || parsed_op < 0 || static_cast<Op>(parsed_op) == Op::kMean) {
    throw Error(ErrorKind::kInvalidValue,
                "reduce_buffers needs sources, destinations and the op sum, "
                "prod, min or max");
  }
  for (const auto& array : arrays) {
    if (array->dtype() != arrays[0]->dtype() || array->count() != arrays[0]->count()) {
      throw Error(ErrorKind::kInvalidBuffer,
                  "reduce_buffers needs arrays of one dtype and one number of "
                  "elements");
    }
  }
  if (scales && scales->size() != from.size()) {
    throw Error(ErrorKind::kInvalidValue, "reduce_buffers needs one scale for each source");
  }
  ReduceArgs args;
  args.sources = from.data();
  args.num_sources = static_cast<int>(from.size());
  args.destinations = to.data();
  args.num_destinations = static_cast<int>(to.size());
  args.count = arrays[0]->count();
  args.dtype = arrays[0]->dtype();
  args.op = static_cast<Op>(parsed_op);
  args.scales = scales ? scales->data() : nullptr;
  args.divisor = divisor;
  const nb::gil_scoped_release no_gil;
  reduce(args);
}

// One load and one store of every byte: each float32 changes its sign.
std::vector<double> memory_floor(nb::handle x, int iterations) {
  const Array array(x, true);
  const void* source = array.pointer();
  void* destination = array.pointer();
  const double scale = -1.0;
  ReduceArgs args;
  args.sources = &source;
  args.num_sources = 1;
  args.destinations = &destination;
  args.num_destinations = 1;
  args.count = array.nbytes() / 4;
  args.dtype = DType::kFloat32;
  args.scales = &scale;
  std::vector<double> seconds;
  const nb::gil_scoped_release no_gil;
  for (int i = 0; i < iterations; ++i) {
    const auto start = std::chrono::steady_clock::now();
    reduce(args);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

}  // namespace

void register_kernels(nb::module_& module) {
  module.def("reduce_buffers", &reduce_buffers, nb::arg("sources"), nb::arg("destinations"),
             nb::arg("op"), nb::arg("scales") = nb::none(), nb::arg("divisor") = 1.0);
  module.def("memory_floor", &memory_floor, nb::arg("x"), nb::arg("iterations"));
  module.def("instruction_set", &instruction_set);
  module.def("set_instruction_set", &set_instruction_set, nb::arg("name"));
  module.def(
      "chunk_of",
      [](std::int64_t count, int num_chunks, int index, std::int64_t granule) {
        if (count < 0 || num_chunks < 1 || index < 0 || index >= num_chunks || granule < 1) {
          throw Error(ErrorKind::kInvalidValue, "chunk_of: arguments out of range");
        }
        const Range range = chunk_of(count, num_chunks, index, granule);
        return nb::make_tuple(range.offset, range.count);
      },
      nb::arg("count"), nb::arg("num_chunks"), nb::arg("index"), nb::arg("granule") = 1);
}

}  // namespace mpidp
