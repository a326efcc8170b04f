// What Python needs of the GPU beside the collectives: the plugin, memory, copies, DLPack.

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>
#include <vector>

#include "binding/array.h"
#include "binding/module.h"
#include "transport/device_plugin.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

const char* name_of(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kHost:
      return "host";
    case MemoryKind::kPinned:
      return "pinned";
    case MemoryKind::kDevice:
      return "device";
    case MemoryKind::kManaged:
      return "managed";
  }
  return "";
}

void* pointer_of(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void load_plugin(const std::string& path) {
  const nb::gil_scoped_release no_gil;  // the first use of a driver takes a while
  load_device_plugin(path);
}

nb::object runtime_name() {
  const DeviceRuntime* runtime = loaded_device_runtime();
  return runtime == nullptr ? nb::none() : nb::object(nb::str(runtime->name));
}

int device_count() {
  int count = 0;
  MPIDP_DEVICE_CHECK(device_runtime().device_count(&count));
  return count;
}

int current_device() {
  int device = 0;
  MPIDP_DEVICE_CHECK(device_runtime().get_device(&device));
  return device;
}

nb::dict device_info(int device) {
  DeviceInfo info{};
  MPIDP_DEVICE_CHECK(device_runtime().device_info(device, &info));
  std::string uuid;
  for (const std::uint8_t byte : info.uuid) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    uuid += digits;
  }
  nb::dict found;
  found["name"] = nb::str(info.name);
  found["uuid"] = nb::str(uuid.c_str());
  found["multiprocessors"] = info.multiprocessors;
  found["compute_capability"] = info.compute_capability;
  found["memory_bytes"] = info.memory_bytes;
  return found;
}

nb::tuple classify(std::uintptr_t address) {
  PointerInfo info{};
  MPIDP_DEVICE_CHECK(device_runtime().classify(pointer_of(address), &info));
  return nb::make_tuple(name_of(info.kind), info.device, info.exportable != 0);
}

// Uninitialised memory that peers can map, as a Buffer of bytes that gives it back.
Buffer allocate(int device, std::int64_t nbytes) {
  if (nbytes < 0) throw Error(ErrorKind::kInvalidValue, "nbytes must not be negative");
  void* pointer = nullptr;
  int status = kDeviceOk;
  {
    const nb::gil_scoped_release no_gil;
    const DeviceGuard guard(device);
    status = device_runtime().allocate(&pointer,
                                       static_cast<std::size_t>(std::max<std::int64_t>(nbytes, 1)));
  }
  if (status == kOutOfMemory) throw std::bad_alloc();
  MPIDP_DEVICE_CHECK(status);
  nb::capsule owner(pointer, [](void* memory) noexcept {
    // Waits for what the device still does with the memory.
    const nb::gil_scoped_release no_gil;
    loaded_device_runtime()->release(memory);
  });
  return Buffer{pointer,          nbytes, DType::kUInt8, DeviceKind::kCuda,
                std::move(owner), false,  nullptr};
}

void copy(int device, std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes,
          std::uintptr_t stream, bool blocking) {
  const nb::gil_scoped_release no_gil;
  const DeviceGuard guard(device);
  const DeviceRuntime& runtime = device_runtime();
  MPIDP_DEVICE_CHECK(runtime.copy(pointer_of(destination), pointer_of(source),
                                  static_cast<std::size_t>(nbytes), pointer_of(stream)));
  if (blocking) MPIDP_DEVICE_CHECK(runtime.synchronize_stream(pointer_of(stream)));
}

// The kernel itself, for tests and measurements; all pointers are on `device`.
void reduce_on_device(int device, const std::vector<std::uintptr_t>& sources,
                      const std::vector<std::uintptr_t>& destinations, std::int64_t count,
                      const char* dtype, const char* op, std::uintptr_t stream) {
  const int parsed = parse_op(op);
  const auto limit = static_cast<std::size_t>(kMaxDevicePointers);
  if (sources.empty() || destinations.empty() || sources.size() > limit ||
      destinations.size() > limit || count < 0 || parsed < 0 ||
      static_cast<Op>(parsed) == Op::kMean) {
    throw Error(ErrorKind::kInvalidValue, "device_reduce: arguments out of range");
  }
  DeviceReduceArgs args{};
  for (std::size_t i = 0; i < sources.size(); ++i) args.sources[i] = pointer_of(sources[i]);
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    args.destinations[i] = pointer_of(destinations[i]);
  }
  args.num_sources = static_cast<std::int32_t>(sources.size());
  args.num_destinations = static_cast<std::int32_t>(destinations.size());
  args.count = count;
  args.dtype = dtype_argument(dtype);
  args.op = static_cast<Op>(parsed);
  args.divisor = 1.0;
  const nb::gil_scoped_release no_gil;
  const DeviceGuard guard(device);
  MPIDP_DEVICE_CHECK(device_runtime().reduce(&args, pointer_of(stream)));
}

void synchronize(int device, std::uintptr_t stream) {
  const nb::gil_scoped_release no_gil;
  const DeviceGuard guard(device);
  MPIDP_DEVICE_CHECK(device_runtime().synchronize_stream(pointer_of(stream)));
}

// What `later` does from now on comes after what `earlier` has queued.
void order_streams(int device, std::uintptr_t earlier, std::uintptr_t later) {
  if (earlier == later) return;
  const DeviceGuard guard(device);
  const DeviceRuntime& runtime = device_runtime();
  DeviceEvent event = nullptr;
  MPIDP_DEVICE_CHECK(runtime.create_event(&event, 0));
  const int recorded = runtime.record_event(event, pointer_of(earlier));
  const int waited =
      recorded == kDeviceOk ? runtime.wait_event(pointer_of(later), event) : recorded;
  // The wait has captured the record: the event itself may go.
  runtime.destroy_event(event);
  MPIDP_DEVICE_CHECK(waited);
}

nb::dlpack::dtype dlpack_type(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * item_size(dtype));
  auto code = nb::dlpack::dtype_code::UInt;
  switch (dtype) {
    case DType::kBool:
      code = nb::dlpack::dtype_code::Bool;
      break;
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
      code = nb::dlpack::dtype_code::Int;
      break;
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      break;
    case DType::kFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      code = nb::dlpack::dtype_code::Float;
      break;
    case DType::kBFloat16:
      code = nb::dlpack::dtype_code::Bfloat;
      break;
    case DType::kComplex64:
    case DType::kComplex128:
      code = nb::dlpack::dtype_code::Complex;
      break;
  }
  return nb::dlpack::dtype{static_cast<std::uint8_t>(code), bits, 1};
}

// An object with __dlpack__ over the buffer's memory, which it keeps alive.
nb::object dlpack_view(nb::handle object, const std::vector<std::size_t>& shape, int device) {
  const auto* buffer = nb::inst_ptr<Buffer>(object);
  return nb::cast(nb::ndarray<nb::array_api>(buffer->pointer, shape.size(), shape.data(), object,
                                             nullptr, dlpack_type(buffer->dtype),
                                             nb::device::cuda::value, device));
}

}  // namespace

void register_device(nb::module_& module) {
  module.def("load_device_plugin", &load_plugin, nb::arg("path"));
  module.def("device_runtime", &runtime_name);
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("device_info", &device_info, nb::arg("device"));
  module.def("device_classify", &classify, nb::arg("pointer"));
  module.def("device_allocate", &allocate, nb::arg("device"), nb::arg("nbytes"));
  module.def("device_copy", &copy, nb::arg("device"), nb::arg("destination"), nb::arg("source"),
             nb::arg("nbytes"), nb::arg("stream") = 0, nb::arg("blocking") = true);
  module.def("device_reduce", &reduce_on_device, nb::arg("device"), nb::arg("sources"),
             nb::arg("destinations"), nb::arg("count"), nb::arg("dtype"), nb::arg("op") = "sum",
             nb::arg("stream") = 0);
  module.def("device_synchronize", &synchronize, nb::arg("device"), nb::arg("stream") = 0);
  module.def("order_streams", &order_streams, nb::arg("device"), nb::arg("earlier"),
             nb::arg("later"));
  module.def("dlpack_view", &dlpack_view, nb::arg("buffer"), nb::arg("shape"), nb::arg("device"));
}

}  // namespace mpidp
