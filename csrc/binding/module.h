// One register function for each class or group of functions; module.cc calls
// them all.
#pragma once

#include <nanobind/nanobind.h>

namespace mpidp {

void register_errors(nanobind::module_& module);
void register_buffer(nanobind::module_& module);
void register_context(nanobind::module_& module);
void register_work(nanobind::module_& module);
void register_schedules(nanobind::module_& module);
void register_kernels(nanobind::module_& module);
void register_device(nanobind::module_& module);
void register_library(nanobind::module_& module);

}  // namespace mpidp
