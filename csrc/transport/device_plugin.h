// The one way to the GPU: loads the plugin of device_runtime.h on first use, turns its codes into
// errors, and waits for its events with a deadline.
#pragma once

#include <string>

#include "common/check.h"
#include "transport/device_runtime.h"

namespace mpidp {

// Loads the plugin at `path`, once in a process: later calls return what is loaded, whatever the
// path. Throws Error(kCuda) where there is no plugin, no driver or no GPU, each in its own words.
const DeviceRuntime& load_device_plugin(const std::string& path);
// What is loaded, or null.
const DeviceRuntime* loaded_device_runtime() noexcept;
// The same, but throws where nothing is, and in a forked child, whose driver state is the parent's.
const DeviceRuntime& device_runtime();

[[noreturn]] void throw_device_error(int status, const char* call);

// Makes `device` the calling thread's, and puts back what was. Not so on a thread of our own, which
// had no use for another: putting back device 0 would create a context there, of some hundred MB.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device, bool put_back = true);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;
};

// Waits on the host until what the event recorded is done. Polls, since the runtime's own wait has
// no deadline. Throws Error(kTimeout).
void wait_for_event(DeviceEvent event, double timeout, const char* what);

}  // namespace mpidp

#define MPIDP_DEVICE_CHECK(call)                               \
  do {                                                         \
    const int mpidp_device_status = (call);                    \
    if (mpidp_device_status != ::mpidp::kDeviceOk) {           \
      ::mpidp::throw_device_error(mpidp_device_status, #call); \
    }                                                          \
  } while (0)
