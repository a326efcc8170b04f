#include "binding/work.h"

#include <nanobind/stl/optional.h>

#include "binding/array.h"
#include "binding/module.h"
#include "common/check.h"

namespace nb = nanobind;

namespace mpidp {

void release_finished(Context& context) {
  for (void* owner : context.engine().take_released()) Array::release_owner(owner);
}

void register_work(nb::module_& module) {
  nb::class_<Work>(module, "Work")
      .def("done", [](const Work& self) { return self.operation->done(); })
      .def(
          "wait",
          [](Work& self, std::optional<double> timeout) {
            bool finished = false;
            {
              const nb::gil_scoped_release no_gil;
              finished = self.operation->wait(timeout.value_or(-1.0));
            }
            release_finished(*self.context);
            if (finished) return;
            if (PyErr_Occurred()) throw nb::python_error();
            PyErr_SetString(PyExc_TimeoutError,
                            "the collective is still running; it can be waited for again");
            throw nb::python_error();
          },
          nb::arg("timeout") = nb::none());
}

}  // namespace mpidp
