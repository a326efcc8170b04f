// How a collective on GPU memory is ordered with the caller's stream.
//
// At the call an event is recorded on the caller's stream; the collective starts after it. When the
// collective has been issued, a second one is recorded behind it; whoever waits for the collective
// makes a stream wait for that one. The host waits for neither.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/device_runtime.h"

namespace mpidp {

// Events of one device, for reuse: creating one is slower than a small collective. Thread-safe.
class EventPool {
 public:
  explicit EventPool(int device) : device_(device) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  int device() const { return device_; }
  DeviceEvent take();
  // May still be pending: recording it anew does not disturb waits that were issued before.
  void give(DeviceEvent event);

 private:
  const int device_;
  std::mutex mutex_;
  std::vector<DeviceEvent> free_;
};

class DeviceOrder {
 public:
  // Records what `caller` has queued so far.
  DeviceOrder(std::shared_ptr<EventPool> pool, DeviceStream caller);
  ~DeviceOrder();
  DeviceOrder(const DeviceOrder&) = delete;
  DeviceOrder& operator=(const DeviceOrder&) = delete;

  int device() const { return pool_->device(); }
  // Makes `stream` wait for what the caller had queued.
  void start_on(DeviceStream stream) const;
  // Behind the collective's last piece of work, which went to `stream`.
  void finish_on(DeviceStream stream);
  // Makes `stream` wait for the collective, which must have been issued.
  void follow_on(DeviceStream stream) const;
  // Whether the collective has been issued and has ended on the device.
  bool reached() const;
  // Blocks the host until it has. Throws CollectiveTimeoutError.
  void synchronize(double timeout) const;

 private:
  std::shared_ptr<EventPool> pool_;
  DeviceEvent ready_ = nullptr;
  DeviceEvent finished_ = nullptr;
  std::atomic<bool> issued_{false};
};

}  // namespace mpidp
