// C++ errors become the exceptions of mpidp.errors; Ctrl-C reaches long waits.

#include <new>

#include "binding/module.h"
#include "common/check.h"
#include "common/wait.h"

namespace nb = nanobind;

namespace mpidp {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidBuffer:
      return "InvalidBufferError";
    case ErrorKind::kInvalidValue:
      return "InvalidArgumentError";
    case ErrorKind::kMismatch:
      return "MismatchError";
    case ErrorKind::kTimeout:
      return "CollectiveTimeoutError";
    case ErrorKind::kRankFailed:
      return "RankFailedError";
    case ErrorKind::kClosed:
      return "ClosedError";
    case ErrorKind::kMpi:
      return "MpiError";
    case ErrorKind::kCuda:
      return "CudaError";
    case ErrorKind::kMpidp:
    case ErrorKind::kInterrupted:
      break;
  }
  return "MpidpError";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kInterrupted) {
      if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
      return;
    }
    const nb::object type = nb::module_::import_("mpidp.errors").attr(class_name(error.kind()));
    nb::list ranks;
    for (const int rank : error.ranks()) ranks.append(rank);
    const nb::object exception = type(nb::str(error.what()));
    exception.attr("ranks") = ranks;
    PyErr_SetObject(type.ptr(), exception.ptr());
  }
}

// Called without the GIL by a thread that waits. Off the main thread it never
// reports anything.
bool check_signals() {
  if (!Py_IsInitialized()) return false;
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace

void register_errors(nb::module_&) {
  nb::register_exception_translator(translate);
  set_interrupt_hook(check_signals);
}

}  // namespace mpidp
