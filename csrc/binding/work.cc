#include "binding/work.h"

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "binding/array.h"
#include "binding/module.h"
#include "common/check.h"

namespace nb = nanobind;

namespace mpidp {

void release_finished(Context& context) {
  for (void* owner : context.engine().take_released()) Array::release_owner(owner);
}

namespace {

// False where `timeout` seconds passed first; Python's TimeoutError is then set, or what a signal
// handler raised.
bool wait_until_issued(Work& self, std::optional<double> timeout) {
  bool finished = false;
  {
    const nb::gil_scoped_release no_gil;
    finished = self.operation->wait(timeout.value_or(-1.0));
  }
  release_finished(*self.context);
  if (finished) return true;
  if (!PyErr_Occurred()) {
    PyErr_SetString(PyExc_TimeoutError,
                    "the collective is still running; it can be waited for again");
  }
  return false;
}

}  // namespace

void register_work(nb::module_& module) {
  nb::class_<Work>(module, "Work")
      .def_prop_ro("on_device", [](const Work& self) { return self.operation->order != nullptr; })
      .def("done",
           [](const Work& self) {
             const auto& order = self.operation->order;
             return self.operation->done() &&
                    (!order || !self.operation->succeeded() || order->reached());
           })
      .def(
          "wait",
          [](Work& self, std::optional<double> timeout, std::uintptr_t stream) {
            if (!wait_until_issued(self, timeout)) throw nb::python_error();
            const auto& order = self.operation->order;
            if (!order) return;
            const nb::gil_scoped_release no_gil;
            order->follow_on(reinterpret_cast<void*>(stream));
          },
          nb::arg("timeout") = nb::none(), nb::arg("stream") = 0)
      .def(
          "synchronize",
          [](Work& self, std::optional<double> timeout) {
            if (!wait_until_issued(self, timeout)) throw nb::python_error();
            const auto& order = self.operation->order;
            if (!order) return;
            {
              const nb::gil_scoped_release no_gil;
              order->synchronize(timeout.value_or(self.context->timeout()));
            }
            release_finished(*self.context);
          },
          nb::arg("timeout") = nb::none());
}

}  // namespace mpidp
