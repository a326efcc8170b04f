#include "core/device_order.h"

#include <utility>

#include "transport/device_plugin.h"

namespace mpidp {

EventPool::~EventPool() {
  // In a forked child, or once the driver is gone, there is nothing to give back.
  const DeviceRuntime* runtime = loaded_device_runtime();
  for (const DeviceEvent event : free_) runtime->destroy_event(event);
}

DeviceEvent EventPool::take() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      const DeviceEvent event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  DeviceEvent event = nullptr;
  const DeviceGuard guard(device_);
  MPIDP_DEVICE_CHECK(device_runtime().create_event(&event, 0));
  return event;
}

void EventPool::give(DeviceEvent event) {
  if (event == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(event);
}

DeviceOrder::DeviceOrder(std::shared_ptr<EventPool> pool, DeviceStream caller)
    : pool_(std::move(pool)) {
  try {
    ready_ = pool_->take();
    finished_ = pool_->take();
    // The handles of the default streams mean those of the current device.
    const DeviceGuard guard(device());
    MPIDP_DEVICE_CHECK(device_runtime().record_event(ready_, caller));
  } catch (...) {
    pool_->give(ready_);
    pool_->give(finished_);
    throw;
  }
}

DeviceOrder::~DeviceOrder() {
  pool_->give(ready_);
  pool_->give(finished_);
}

void DeviceOrder::start_on(DeviceStream stream) const {
  MPIDP_DEVICE_CHECK(device_runtime().wait_event(stream, ready_));
}

void DeviceOrder::finish_on(DeviceStream stream) {
  MPIDP_DEVICE_CHECK(device_runtime().record_event(finished_, stream));
  issued_.store(true, std::memory_order_release);
}

void DeviceOrder::follow_on(DeviceStream stream) const {
  if (!issued_.load(std::memory_order_acquire)) return;
  const DeviceGuard guard(device());
  MPIDP_DEVICE_CHECK(device_runtime().wait_event(stream, finished_));
}

bool DeviceOrder::reached() const {
  if (!issued_.load(std::memory_order_acquire)) return false;
  int done = 0;
  MPIDP_DEVICE_CHECK(device_runtime().query_event(finished_, &done));
  return done != 0;
}

void DeviceOrder::synchronize(double timeout) const {
  if (issued_.load(std::memory_order_acquire)) {
    wait_for_event(finished_, timeout, "the collective");
  }
}

}  // namespace mpidp
