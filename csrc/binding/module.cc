#include "binding/module.h"

NB_MODULE(_core, module) {
  // At interpreter exit a live traceback or global may still hold a communicator: no leak of ours.
  nanobind::set_leak_warnings(false);
  mpidp::register_errors(module);
  mpidp::register_buffer(module);
  mpidp::register_work(module);
  mpidp::register_context(module);
  mpidp::register_schedules(module);
  mpidp::register_kernels(module);
  mpidp::register_device(module);
  mpidp::register_library(module);
}
