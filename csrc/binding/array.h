// Array arguments: a Buffer, or any object with a simple buffer-protocol
// export.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "common/types.h"

namespace mpidp {

// What Python sees as mpidp._core.Buffer.
struct Buffer {
  void* pointer = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::kUInt8;
  DeviceKind device = DeviceKind::kCpu;
  nanobind::object owner;
  bool read_only = false;
  void* stream = nullptr;  // of a GPU buffer: the one that its contents are ordered with
};

// A view of an argument for as long as this object lives. Needs the GIL to make
// and to destroy.
class Array {
 public:
  // Throws TypeError where the object is no Buffer and exports no simple,
  // contiguous buffer (or none that is writable, if asked): the Python layer
  // then finds out why.
  Array(nanobind::handle object, bool writable);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void* pointer() const { return pointer_; }
  std::int64_t count() const { return count_; }
  DType dtype() const { return dtype_; }
  DeviceKind device() const { return device_; }
  void* stream() const { return stream_; }
  std::int64_t nbytes() const { return count_ * static_cast<std::int64_t>(item_size(dtype_)); }

  // Gives up the view to an asynchronous operation; release_owner() ends it,
  // with the GIL.
  void* detach();
  static void release_owner(void* owner);

 private:
  void* pointer_ = nullptr;
  std::int64_t count_ = 0;
  DType dtype_ = DType::kUInt8;
  DeviceKind device_ = DeviceKind::kCpu;
  void* stream_ = nullptr;
  struct Owner {
    Py_buffer view{};
    PyObject* object = nullptr;
  };
  Owner owner_;
};

// By its Python name, else TypeError or InvalidArgumentError.
DType dtype_argument(const char* name);

}  // namespace mpidp
