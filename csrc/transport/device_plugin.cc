#include "transport/device_plugin.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

#include "common/wait.h"

namespace mpidp {
namespace {

using PluginEntry = const DeviceRuntime* (*)(std::uint32_t);

// Codes of cudaGetDeviceCount that mean "nothing is there" rather than "something is wrong".
constexpr int kNoDevice = 100;
constexpr int kInsufficientDriver = 35;  // what a runtime says where there is none, too
constexpr int kPollsBeforeYield = 200;
constexpr std::int64_t kYieldUs = 2000;
constexpr int kNapUs = 50;

std::atomic<const DeviceRuntime*> loaded{nullptr};
std::atomic<bool> forked{false};

[[noreturn]] void throw_no_device(const std::string& reason) {
  throw Error(ErrorKind::kCuda, reason);
}

void check_devices(const DeviceRuntime& runtime) {
  int count = 0;
  const int status = runtime.device_count(&count);
  if (status == kNoDevice || (status == kDeviceOk && count == 0)) {
    throw_no_device(
        "no GPU is visible to this process: see what `nvidia-smi -L` lists, and whether "
        "CUDA_VISIBLE_DEVICES or the batch system hides it");
  }
  if (status == kInsufficientDriver) {
    throw_no_device(
        "there is no GPU driver here, or it is older than the CUDA version of this build: install "
        "a newer driver (`nvidia-smi` shows what it supports), or build with an older CUDA");
  }
  if (status != kDeviceOk) {
    throw_no_device(std::string("the GPU driver cannot be used: ") + runtime.error_string(status));
  }
}

}  // namespace

const DeviceRuntime& load_device_plugin(const std::string& path) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded.load() != nullptr) return device_runtime();
  // Never closed again: a runtime with live threads and device state cannot be.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw_no_device(std::string("the CUDA part of mpidp cannot be loaded: ") +
                    (reason == nullptr ? path.c_str() : reason));
  }
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(library, "mpidp_device_runtime"));
  const DeviceRuntime* runtime = entry == nullptr ? nullptr : entry(kDeviceAbi);
  if (runtime == nullptr || runtime->abi != kDeviceAbi) {
    throw_no_device(path + " belongs to another version of mpidp: reinstall mpidp");
  }
  check_devices(*runtime);
  pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  loaded.store(runtime);
  return *runtime;
}

const DeviceRuntime* loaded_device_runtime() noexcept { return loaded.load(); }

const DeviceRuntime& device_runtime() {
  if (forked.load(std::memory_order_relaxed)) {
    throw_no_device(
        "CUDA does not survive a fork, and the parent of this process had used it: start workers "
        "with the \"spawn\" or \"forkserver\" method");
  }
  const DeviceRuntime* runtime = loaded.load(std::memory_order_acquire);
  if (runtime == nullptr) throw_no_device("the CUDA part of mpidp is not loaded");
  return *runtime;
}

void throw_device_error(int status, const char* call) {
  std::string name(call);
  // "runtime.copy(...)" -> "copy"
  name = name.substr(0, name.find('('));
  for (const char* separator : {".", "->"}) {
    const std::size_t at = name.rfind(separator);
    if (at != std::string::npos) name = name.substr(at + std::string(separator).size());
  }
  const DeviceRuntime* runtime = loaded_device_runtime();
  const char* reason = runtime == nullptr ? nullptr : runtime->error_string(status);
  throw Error(ErrorKind::kCuda, "the device's " + name + " failed: " +
                                    (reason == nullptr ? std::to_string(status) : reason));
}

DeviceGuard::DeviceGuard(int device, bool put_back) {
  const DeviceRuntime& runtime = device_runtime();
  int before = -1;
  MPIDP_DEVICE_CHECK(runtime.get_device(&before));
  if (before == device) return;
  MPIDP_DEVICE_CHECK(runtime.set_device(device));
  if (put_back) before_ = before;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) loaded_device_runtime()->set_device(before_);
}

void wait_for_event(DeviceEvent event, double timeout, const char* what) {
  const DeviceRuntime& runtime = device_runtime();
  int done = 0;
  for (int i = 0; i < kPollsBeforeYield; ++i) {
    MPIDP_DEVICE_CHECK(runtime.query_event(event, &done));
    if (done != 0) return;
    cpu_relax();
  }
  const Deadline deadline(timeout);
  const std::int64_t start = now_us();
  for (;;) {
    MPIDP_DEVICE_CHECK(runtime.query_event(event, &done));
    if (done != 0) return;
    if (now_us() - start < kYieldUs) {
      yield_core();
      continue;
    }
    if (interrupted()) throw Error(ErrorKind::kInterrupted, "interrupted");
    if (deadline.passed()) {
      throw Error(ErrorKind::kTimeout, std::string(what) + " did not end on the GPU within " +
                                           std::to_string(timeout) + " s");
    }
    sleep_us(kNapUs);
  }
}

}  // namespace mpidp
