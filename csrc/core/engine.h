// Asynchronous collectives: a queue and a progress thread for each
// communicator.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/call.h"
#include "core/device_order.h"

namespace mpidp {

class Operation {
 public:
  Operation(const Call& call, std::shared_ptr<DeviceOrder> order)
      : order(std::move(order)), call_(call) {}

  Call& call() { return call_; }
  // On GPU memory this means that the collective was issued; `order` tells when it has ended.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Of an operation that is done.
  bool succeeded() const { return error_ == nullptr; }
  void complete(std::exception_ptr error);
  // False when `seconds` passed first; negative means no limit. Rethrows the
  // collective's error.
  bool wait(double seconds);

  // What must live until the collective is done. Opaque here: the binding keeps
  // Python objects.
  std::vector<void*> owners;
  // Null for host memory.
  const std::shared_ptr<DeviceOrder> order;

 private:
  Call call_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Engine {
 public:
  // `run` executes one call on the progress thread and throws its errors.
  explicit Engine(std::function<void(Call&)> run) : run_(std::move(run)) {}
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues the call; operations run in the order of submission.
  std::shared_ptr<Operation> submit(const Call& call, std::vector<void*> owners,
                                    std::shared_ptr<DeviceOrder> order = nullptr);
  // Runs the call now, on the calling thread.
  std::shared_ptr<Operation> run_inline(const Call& call, std::vector<void*> owners,
                                        std::shared_ptr<DeviceOrder> order = nullptr);
  bool idle() const { return pending_.load(std::memory_order_acquire) == 0; }
  // Owners of operations that are done, for the caller to release (with the
  // GIL).
  std::vector<void*> take_released();
  // Waits for what is queued and ends the thread.
  void stop();

 private:
  // Memory that the GPU may still work on when its operation has been issued.
  struct Lingering {
    std::shared_ptr<DeviceOrder> order;
    std::vector<void*> owners;
  };

  void loop();
  void perform(Operation& operation);
  void collect_lingering();

  std::function<void(Call&)> run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::vector<void*> released_;
  std::vector<Lingering> lingering_;
  std::atomic<int> pending_{0};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace mpidp
