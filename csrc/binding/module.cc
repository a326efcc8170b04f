#include "binding/module.h"

NB_MODULE(_core, module) {
  mpidp::register_errors(module);
  mpidp::register_buffer(module);
  mpidp::register_work(module);
  mpidp::register_context(module);
  mpidp::register_schedules(module);
  mpidp::register_kernels(module);
  mpidp::register_library(module);
}
