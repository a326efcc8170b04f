// Context: parses a call's arguments, checks that they fit, releases the GIL.

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>

#include "binding/array.h"
#include "binding/module.h"
#include "binding/work.h"
#include "common/check.h"
#include "core/context.h"
#include "reduce/reduce.h"
#include "transport/shared_memory.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

using ContextPointer = std::shared_ptr<Context>;

Algorithm algorithm_argument(const char* name) {
  const int algorithm = parse_algorithm(name);
  if (algorithm < 0) {
    throw Error(ErrorKind::kInvalidValue, std::string("unknown algorithm \"") + name +
                                              "\": use auto, direct, ring, recursive_halving, "
                                              "recursive_doubling, "
                                              "hierarchical or mpi");
  }
  return static_cast<Algorithm>(algorithm);
}

// Sets op and divisor, and refuses what the element type has no meaning for.
void set_op(Call& call, const char* name, int world_size) {
  const int parsed = parse_op(name);
  if (parsed < 0) {
    throw Error(ErrorKind::kInvalidValue,
                std::string("unknown op \"") + name + "\": use sum, mean, prod, min or max");
  }
  call.op = static_cast<Op>(parsed);
  const bool fractional = is_floating(call.dtype) || is_complex(call.dtype);
  if (call.op == Op::kMean) {
    if (!fractional) {
      throw Error(ErrorKind::kInvalidValue, std::string("the mean of ") + name_of(call.dtype) +
                                                " is not defined: use op=\"sum\" and divide, or "
                                                "convert to a floating dtype");
    }
    call.op = Op::kSum;
    call.divisor = world_size;
  }
  if (is_complex(call.dtype) && (call.op == Op::kMin || call.op == Op::kMax)) {
    throw Error(ErrorKind::kInvalidValue, std::string(name) + " of " + name_of(call.dtype) +
                                              " is not defined: complex numbers have no order");
  }
  if (call.has_scale && !fractional) {
    throw Error(
        ErrorKind::kInvalidValue,
        std::string("scale= needs a floating or complex dtype, ") + "not " + name_of(call.dtype));
  }
}

void set_scale(Call& call, std::optional<double> scale) {
  call.has_scale = scale.has_value() && *scale != 1.0;
  call.scale = scale.value_or(1.0);
}

[[noreturn]] void throw_counts(const char* rule, std::int64_t input, std::int64_t output) {
  throw Error(ErrorKind::kInvalidBuffer, std::string(rule) + ", but x has " +
                                             std::to_string(input) + " elements and out has " +
                                             std::to_string(output));
}

void check_pair(const Array& input, const Array& output) {
  if (input.dtype() != output.dtype()) {
    throw Error(ErrorKind::kInvalidBuffer, std::string("x is ") + name_of(input.dtype()) +
                                               " and out is " + name_of(output.dtype()) +
                                               ": give them the same dtype");
  }
  if (input.device() != output.device()) {
    const bool on_gpu = input.device() == DeviceKind::kCuda;
    throw Error(ErrorKind::kInvalidBuffer, std::string("x lies in ") + (on_gpu ? "GPU" : "host") +
                                               " memory and out in " + (on_gpu ? "host" : "GPU") +
                                               " memory: give both the same kind");
  }
}

// Before resolve(), which chooses by it.
void set_place(Call& call, const Array& array) {
  call.device = array.device();
  call.stream = array.stream();
}

// `allowed`: where the input may lie inside the output, or null for nowhere.
void check_overlap(const Array& input, const Array& output, const void* allowed) {
  const auto* in = static_cast<const char*>(input.pointer());
  const auto* out = static_cast<const char*>(output.pointer());
  if (input.nbytes() == 0 || output.nbytes() == 0 || in == allowed) return;
  if (in < out + output.nbytes() && out < in + input.nbytes()) {
    throw Error(ErrorKind::kInvalidBuffer,
                "x and out overlap: give separate arrays, or leave out= away "
                "for an in-place call");
  }
}

// The arrays of one call, and the call itself.
struct Arguments {
  Call call;
  std::optional<Array> input;
  std::optional<Array> output;
};

void reduction(Arguments& arguments, const Context& context, Collective collective, nb::handle x,
               nb::handle out, const char* op, const char* algorithm, std::optional<double> scale,
               bool deterministic, double timeout, int root) {
  Call& call = arguments.call;
  const int world_size = context.world_size();
  const bool in_place = out.is_none();
  const bool wants_result = collective != Collective::kReduce || context.rank() == root;
  arguments.input.emplace(x, in_place && wants_result);
  Array& input = *arguments.input;
  call.collective = collective;
  set_place(call, input);
  call.dtype = input.dtype();
  call.input = input.pointer();
  call.count = input.count();
  call.root = root;
  call.algorithm = algorithm_argument(algorithm);
  call.deterministic = deterministic;
  call.timeout = timeout;
  set_scale(call, scale);
  set_op(call, op, world_size);
  if (!wants_result) {
    call.output = nullptr;
  } else if (in_place) {
    if (collective == Collective::kReduceScatter) {
      throw Error(ErrorKind::kInvalidBuffer, "reduce_scatter needs out=");
    }
    call.output = input.pointer();
  } else {
    arguments.output.emplace(out, true);
    Array& output = *arguments.output;
    check_pair(input, output);
    call.output = output.pointer();
    if (collective == Collective::kReduceScatter) {
      if (input.count() != output.count() * world_size) {
        throw_counts("reduce_scatter needs x of world_size times out's elements", input.count(),
                     output.count());
      }
      call.count = output.count();
      check_overlap(input, output, nullptr);
    } else {
      if (input.count() != output.count()) {
        throw_counts("x and out must have the same number of elements", input.count(),
                     output.count());
      }
      check_overlap(input, output, output.pointer());
    }
  }
  context.resolve(call);
}

void exchange(Arguments& arguments, const Context& context, Collective collective, nb::handle x,
              nb::handle out, const char* algorithm, double timeout) {
  Call& call = arguments.call;
  const int world_size = context.world_size();
  arguments.input.emplace(x, false);
  arguments.output.emplace(out, true);
  Array& input = *arguments.input;
  Array& output = *arguments.output;
  check_pair(input, output);
  call.collective = collective;
  set_place(call, input);
  call.dtype = input.dtype();
  call.input = input.pointer();
  call.output = output.pointer();
  call.algorithm = algorithm_argument(algorithm);
  call.timeout = timeout;
  if (collective == Collective::kAllGather) {
    if (output.count() != input.count() * world_size) {
      throw_counts("all_gather needs out of world_size times x's elements", input.count(),
                   output.count());
    }
    call.count = input.count();
    check_overlap(input, output,
                  static_cast<char*>(output.pointer()) + context.rank() * input.nbytes());
  } else {
    if (output.count() != input.count() || input.count() % world_size != 0) {
      throw_counts("all_to_all needs x and out of equal size, a multiple of world_size",
                   input.count(), output.count());
    }
    call.count = input.count() / world_size;
    check_overlap(input, output, nullptr);
  }
  context.resolve(call);
}

void rooted(Arguments& arguments, const Context& context, nb::handle x, int root,
            const char* algorithm, double timeout) {
  Call& call = arguments.call;
  arguments.input.emplace(x, context.rank() != root);
  call.collective = Collective::kBroadcast;
  set_place(call, *arguments.input);
  call.dtype = arguments.input->dtype();
  call.count = arguments.input->count();
  call.input = call.output = arguments.input->pointer();
  call.root = root;
  call.algorithm = algorithm_argument(algorithm);
  call.timeout = timeout;
  context.resolve(call);
}

void barrier(Arguments& arguments, const Context& context, double timeout) {
  arguments.call.timeout = timeout;
  context.resolve(arguments.call);
}

void run(Context& context, Arguments& arguments) {
  const nb::gil_scoped_release no_gil;
  context.run(arguments.call);
}

Work submit(const ContextPointer& context, Arguments& arguments) {
  release_finished(*context);
  std::vector<void*> owners;
  if (arguments.input) owners.push_back(arguments.input->detach());
  if (arguments.output) owners.push_back(arguments.output->detach());
  std::shared_ptr<Operation> operation;
  {
    const nb::gil_scoped_release no_gil;
    operation = context->submit(arguments.call, std::move(owners));
  }
  return Work{std::move(operation), context};
}

// None is a value of array parameters: out=None means in place, and x=None is
// an error to report.
template <typename Parameter>
auto annotation() {
  if constexpr (std::is_same_v<Parameter, nb::handle>) {
    return nb::arg().none();
  } else {
    return nb::arg();
  }
}

// Registers NAME and NAME_async, which differ only in what happens to the
// parsed call.
template <typename Class, typename... Parameters>
void def_both(Class& cls, const char* name, const char* async_name,
              void (*parse)(Arguments&, const Context&, Parameters...)) {
  cls.def(
      name,
      [parse](Context& self, Parameters... parameters) {
        Arguments arguments;
        parse(arguments, self, parameters...);
        run(self, arguments);
      },
      annotation<Parameters>()...);
  cls.def(
      async_name,
      [parse](const ContextPointer& self, Parameters... parameters) {
        Arguments arguments;
        parse(arguments, *self, parameters...);
        return submit(self, arguments);
      },
      annotation<Parameters>()...);
}

void parse_all_reduce(Arguments& arguments, const Context& context, nb::handle x, nb::handle out,
                      const char* op, const char* algorithm, std::optional<double> scale,
                      bool deterministic, double timeout) {
  reduction(arguments, context, Collective::kAllReduce, x, out, op, algorithm, scale, deterministic,
            timeout, 0);
}

void parse_reduce_scatter(Arguments& arguments, const Context& context, nb::handle x,
                          nb::handle out, const char* op, const char* algorithm,
                          std::optional<double> scale, bool deterministic, double timeout) {
  reduction(arguments, context, Collective::kReduceScatter, x, out, op, algorithm, scale,
            deterministic, timeout, 0);
}

void parse_reduce(Arguments& arguments, const Context& context, nb::handle x, nb::handle out,
                  const char* op, int root, const char* algorithm, std::optional<double> scale,
                  bool deterministic, double timeout) {
  reduction(arguments, context, Collective::kReduce, x, out, op, algorithm, scale, deterministic,
            timeout, root);
}

void parse_all_gather(Arguments& arguments, const Context& context, nb::handle x, nb::handle out,
                      const char* algorithm, double timeout) {
  exchange(arguments, context, Collective::kAllGather, x, out, algorithm, timeout);
}

void parse_all_to_all(Arguments& arguments, const Context& context, nb::handle x, nb::handle out,
                      const char* algorithm, double timeout) {
  exchange(arguments, context, Collective::kAllToAll, x, out, algorithm, timeout);
}

DeviceTransport device_transport_argument(const char* name) {
  if (std::strcmp(name, "auto") == 0) return DeviceTransport::kAuto;
  if (std::strcmp(name, "staged") == 0) return DeviceTransport::kStaged;
  throw Error(ErrorKind::kInvalidValue,
              std::string("unknown device transport \"") + name + "\": use auto or staged");
}

std::int32_t stores_argument(const char* name) {
  if (std::strcmp(name, "auto") == 0) return -1;
  const int found = parse_stores(name);
  if (found >= 0) return found;
  throw Error(ErrorKind::kInvalidValue,
              std::string("unknown stores \"") + name + "\": use auto, streaming, loop or library");
}

MPI_Comm comm_of(std::uintptr_t handle) {
  MPI_Comm comm;
  static_assert(sizeof(comm) <= sizeof(handle));
  std::memcpy(&comm, &handle,
              sizeof(comm));  // an int in MPICH, a pointer in Open MPI
  return comm;
}

nb::object allocate(std::int64_t nbytes) {
  if (nbytes < 0) throw Error(ErrorKind::kInvalidValue, "nbytes must not be negative");
  void* pointer = nullptr;
  {
    const nb::gil_scoped_release no_gil;
    pointer = MemoryRegistry::instance().allocate(static_cast<std::size_t>(nbytes));
  }
  const nb::capsule owner(
      pointer, [](void* memory) noexcept { MemoryRegistry::instance().release(memory); });
  const std::size_t shape[1] = {static_cast<std::size_t>(nbytes)};
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(pointer, 1, shape, owner));
}

}  // namespace

void register_context(nb::module_& module) {
  auto cls = nb::class_<Context>(module, "Context");
  cls.def(nb::new_([](std::uintptr_t comm_handle, double timeout, std::int64_t node_id,
                      bool shared_memory, std::int64_t slot_bytes, std::int64_t inline_bytes,
                      std::int64_t segment_bytes, std::int64_t piece_bytes, int spin_us,
                      const char* stores, const char* device_transport,
                      std::int64_t device_segment_bytes) {
            Settings settings;
            settings.timeout = timeout;
            settings.node_id = node_id;
            settings.shared_memory = shared_memory ? 1 : 0;
            settings.slot_bytes = slot_bytes;
            settings.inline_bytes = inline_bytes;
            settings.segment_bytes = segment_bytes;
            settings.piece_bytes = piece_bytes;
            settings.spin_us = spin_us;
            settings.stores = stores_argument(stores);
            settings.device_transport = device_transport_argument(device_transport);
            settings.device_segment_bytes = device_segment_bytes;
            const nb::gil_scoped_release no_gil;
            return std::make_shared<Context>(comm_of(comm_handle), settings);
          }),
          nb::arg("comm_handle"), nb::kw_only(), nb::arg("timeout") = 600.0,
          nb::arg("node_id") = -1, nb::arg("shared_memory") = true, nb::arg("slot_bytes") = 0,
          nb::arg("inline_bytes") = 0, nb::arg("segment_bytes") = 0, nb::arg("piece_bytes") = 0,
          nb::arg("spin_us") = -1, nb::arg("stores") = "auto", nb::arg("device_transport") = "auto",
          nb::arg("device_segment_bytes") = 0);
  cls.def_prop_ro("rank", &Context::rank)
      .def_prop_ro("world_size", &Context::world_size)
      .def_prop_ro("local_rank", &Context::local_rank)
      .def_prop_ro("local_size", &Context::local_size)
      .def_prop_ro("node_rank", &Context::node_rank)
      .def_prop_ro("num_nodes", &Context::num_nodes)
      .def_prop_ro("closed", &Context::closed)
      .def_prop_ro("timeout", &Context::timeout)
      .def_prop_ro("shared_memory", &Context::shared_memory)
      .def_prop_ro("stores", [](const Context& self) { return name_of(self.stores()); })
      .def_prop_ro("thread_multiple", &Context::thread_multiple)
      .def_prop_ro("device_index", &Context::device_index)
      .def_prop_ro("device_transport", &Context::device_transport)
      .def_prop_ro("device_reason", &Context::device_reason)
      .def("use_device", [](Context& self, int device) { self.device_path(device); });

  def_both(cls, "all_reduce", "all_reduce_async", parse_all_reduce);
  def_both(cls, "reduce_scatter", "reduce_scatter_async", parse_reduce_scatter);
  def_both(cls, "reduce", "reduce_async", parse_reduce);
  def_both(cls, "all_gather", "all_gather_async", parse_all_gather);
  def_both(cls, "all_to_all", "all_to_all_async", parse_all_to_all);
  def_both(cls, "broadcast", "broadcast_async", rooted);
  def_both(cls, "barrier", "barrier_async", barrier);

  cls.def("set_rules",
          [](Context& self, const char* collective,
             const std::vector<std::pair<std::int64_t, std::string>>& rules) {
            const int parsed = parse_collective(collective);
            if (parsed < 0) {
              throw Error(ErrorKind::kInvalidValue,
                          std::string("unknown collective \"") + collective + "\"");
            }
            std::vector<Rule> native;
            for (const auto& [limit, name] : rules) {
              native.push_back(Rule{limit, algorithm_argument(name.c_str())});
            }
            self.set_rules(static_cast<Collective>(parsed), std::move(native));
          })
      .def("select",
           [](const Context& self, const char* collective, std::int64_t nbytes) {
             const int parsed = parse_collective(collective);
             if (parsed < 0) {
               throw Error(ErrorKind::kInvalidValue,
                           std::string("unknown collective \"") + collective + "\"");
             }
             return name_of(self.select(static_cast<Collective>(parsed), nbytes));
           })
      .def("allocate", [](const Context&, std::int64_t nbytes) { return allocate(nbytes); })
      .def(
          "close",
          [](Context& self, bool synchronize) {
            bool clean = false;
            {
              const nb::gil_scoped_release no_gil;
              clean = self.close(synchronize);
            }
            release_finished(self);
            return clean;
          },
          nb::arg("synchronize") = true);
}

}  // namespace mpidp
