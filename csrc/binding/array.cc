#include "binding/array.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "binding/module.h"
#include "common/check.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

// The type of a struct-module format of one native element; false if it is none
// of ours.
bool parse_format(const char* format, Py_ssize_t item_bytes, DType* dtype) {
  if (format == nullptr) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const bool complex = *format == 'Z';
  if (complex) ++format;
  if (format[0] == '\0' || format[1] != '\0') return false;
  int log_bytes = 0;
  while ((Py_ssize_t{1} << log_bytes) < item_bytes) ++log_bytes;
  switch (*format) {
    case '?':
      *dtype = DType::kBool;
      break;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      if (log_bytes > 3) return false;
      *dtype = static_cast<DType>(static_cast<int>(DType::kInt8) + log_bytes);
      break;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      if (log_bytes > 3) return false;
      *dtype = static_cast<DType>(static_cast<int>(DType::kUInt8) + log_bytes);
      break;
    case 'e':
      *dtype = DType::kFloat16;
      break;
    case 'f':
      *dtype = complex ? DType::kComplex64 : DType::kFloat32;
      break;
    case 'd':
      *dtype = complex ? DType::kComplex128 : DType::kFloat64;
      break;
    default:
      return false;
  }
  if (complex && *format != 'f' && *format != 'd') return false;
  return static_cast<Py_ssize_t>(item_size(*dtype)) == item_bytes;
}

}  // namespace

Array::Array(nb::handle object, bool writable) {
  if (nb::isinstance<Buffer>(object)) {
    const auto* buffer = nb::inst_ptr<Buffer>(object);
    if (writable && buffer->read_only) throw nb::type_error("read-only Buffer");
    device_ = buffer->device;
    stream_ = buffer->stream;
    pointer_ = buffer->pointer;
    count_ = buffer->count;
    dtype_ = buffer->dtype;
    owner_.object = object.ptr();
    Py_INCREF(owner_.object);
    return;
  }
  const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &owner_.view, flags) != 0) {
    PyErr_Clear();
    throw nb::type_error("not a simple buffer");
  }
  if (!parse_format(owner_.view.format, owner_.view.itemsize, &dtype_)) {
    PyBuffer_Release(&owner_.view);
    throw nb::type_error("not a simple buffer");
  }
  pointer_ = owner_.view.buf;
  count_ = owner_.view.len / owner_.view.itemsize;
}

Array::~Array() {
  if (owner_.object != nullptr) {
    Py_DECREF(owner_.object);
  } else if (owner_.view.obj != nullptr) {
    PyBuffer_Release(&owner_.view);
  }
}

void* Array::detach() {
  auto* owner = new Owner(owner_);
  owner_ = Owner{};
  return owner;
}

void Array::release_owner(void* pointer) {
  auto* owner = static_cast<Owner*>(pointer);
  if (owner->object != nullptr) {
    Py_DECREF(owner->object);
  } else if (owner->view.obj != nullptr) {
    PyBuffer_Release(&owner->view);
  }
  delete owner;
}

DType dtype_argument(const char* name) {
  const int dtype = parse_dtype(name);
  if (dtype < 0) {
    throw Error(ErrorKind::kInvalidBuffer, std::string("unknown dtype \"") + name + "\"");
  }
  return static_cast<DType>(dtype);
}

void register_buffer(nb::module_& module) {
  nb::class_<Buffer>(module, "Buffer")
      .def(
          "__init__",
          [](Buffer* self, std::uintptr_t pointer, std::int64_t count, const char* dtype,
             const char* device, nb::object owner, bool read_only, std::uintptr_t stream) {
            const DType parsed = dtype_argument(dtype);
            const bool cuda = std::strncmp(device, "cuda", 4) == 0;
            if (count < 0 || (!cuda && std::strcmp(device, "cpu") != 0)) {
              throw Error(ErrorKind::kInvalidBuffer,
                          "a Buffer needs a count >= 0 and the device \"cpu\" "
                          "or \"cuda\"");
            }
            new (self) Buffer{reinterpret_cast<void*>(pointer),
                              count,
                              parsed,
                              cuda ? DeviceKind::kCuda : DeviceKind::kCpu,
                              std::move(owner),
                              read_only,
                              reinterpret_cast<void*>(stream)};
          },
          nb::arg("pointer"), nb::arg("count"), nb::arg("dtype"), nb::arg("device") = "cpu",
          nb::arg("owner") = nb::none(), nb::arg("read_only") = false, nb::arg("stream") = 0)
      .def_prop_ro(
          "pointer",
          [](const Buffer& self) { return reinterpret_cast<std::uintptr_t>(self.pointer); })
      .def_ro("count", &Buffer::count)
      .def_prop_ro("nbytes",
                   [](const Buffer& self) {
                     return self.count * static_cast<std::int64_t>(item_size(self.dtype));
                   })
      .def_prop_ro("dtype", [](const Buffer& self) { return name_of(self.dtype); })
      .def_prop_ro(
          "device",
          [](const Buffer& self) { return self.device == DeviceKind::kCuda ? "cuda" : "cpu"; })
      .def_prop_ro("stream",
                   [](const Buffer& self) { return reinterpret_cast<std::uintptr_t>(self.stream); })
      .def_ro("read_only", &Buffer::read_only);
}

}  // namespace mpidp
