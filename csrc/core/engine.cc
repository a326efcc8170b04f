#include "core/engine.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/wait.h"

namespace mpidp {

void Operation::complete(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

bool Operation::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool limited = seconds >= 0;
  const Deadline deadline(limited ? seconds : 0);
  while (!done()) {
    // Short naps, so that Ctrl-C reaches a rank that waits for its own progress
    // thread.
    changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return done(); });
    if (done()) break;
    if (limited && deadline.passed()) return false;
    if (interrupted()) return false;
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

Engine::~Engine() { stop(); }

std::shared_ptr<Operation> Engine::submit(const Call& call, std::vector<void*> owners,
                                          std::shared_ptr<DeviceOrder> order) {
  auto operation = std::make_shared<Operation>(call, std::move(order));
  operation->owners = std::move(owners);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(operation);
    pending_.fetch_add(1, std::memory_order_acq_rel);
    if (!thread_.joinable()) {
      // Signals are for the main thread: Python's handlers run there.
      sigset_t all, old;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &old);
      thread_ = std::thread([this] { loop(); });
      pthread_sigmask(SIG_SETMASK, &old, nullptr);
    }
  }
  changed_.notify_one();
  return operation;
}

std::vector<void*> Engine::take_released() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!lingering_.empty()) collect_lingering();
  return std::exchange(released_, {});
}

void Engine::collect_lingering() {
  const auto ended = [this](Lingering& entry) {
    if (!entry.order->reached()) return false;
    released_.insert(released_.end(), entry.owners.begin(), entry.owners.end());
    return true;
  };
  lingering_.erase(std::remove_if(lingering_.begin(), lingering_.end(), ended), lingering_.end());
}

void Engine::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Engine::loop() {
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      operation = std::move(queue_.front());
      queue_.pop_front();
    }
    perform(*operation);
  }
}

std::shared_ptr<Operation> Engine::run_inline(const Call& call, std::vector<void*> owners,
                                              std::shared_ptr<DeviceOrder> order) {
  auto operation = std::make_shared<Operation>(call, std::move(order));
  operation->owners = std::move(owners);
  pending_.fetch_add(1, std::memory_order_acq_rel);
  perform(*operation);
  return operation;
}

void Engine::perform(Operation& operation) {
  std::exception_ptr error;
  try {
    run_(operation.call());
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // After an error MPI may still read a send buffer: its owner is kept for
    // ever.
    if (!error && operation.order) {
      lingering_.push_back(Lingering{operation.order, operation.owners});
    } else if (!error) {
      released_.insert(released_.end(), operation.owners.begin(), operation.owners.end());
    }
    operation.owners.clear();
    pending_.fetch_sub(1, std::memory_order_acq_rel);
  }
  operation.complete(std::move(error));
}

}  // namespace mpidp
