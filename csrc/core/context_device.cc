// A communicator's collectives on GPU memory: which GPU, and how they are ordered and queued. What
// they do there is DevicePath's.

#include <algorithm>

#include "common/check_mpi.h"
#include "core/context.h"
#include "transport/device_plugin.h"

namespace mpidp {
namespace {

constexpr std::uint32_t kStatusFailed = 2;
constexpr double kDrainSeconds = 30.0;

int device_of_pointer(const void* pointer, const char* name) {
  PointerInfo info{};
  MPIDP_DEVICE_CHECK(device_runtime().classify(pointer, &info));
  if (info.kind == MemoryKind::kHost || info.device < 0) {
    throw Error(ErrorKind::kInvalidBuffer,
                std::string(name) +
                    " says that it lies in GPU memory, but the CUDA runtime does not know its "
                    "address: was it freed, or is it host memory?");
  }
  return info.device;
}

}  // namespace

int Context::device_index() const {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  return device_ ? device_->device() : -1;
}

std::string Context::device_transport() const {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  return device_ ? device_->transport() : "undecided";
}

std::string Context::device_reason() const {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  return device_ ? device_->reason() : "";
}

DevicePath& Context::device_path(int device) {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  if (closed()) throw Error(ErrorKind::kClosed, "the communicator is closed");
  if (!device_) {
    DevicePathSettings settings;
    settings.transport = settings_.device_transport;
    settings.segment_bytes = settings_.device_segment_bytes;
    settings.rank = rank_;
    settings.world_size = world_size_;
    settings.single_group = single_group();
    const auto exchange = [this](const void* mine, void* all, std::size_t nbytes) {
      gather_in_group(mine, all, nbytes);
    };
    device_ = std::make_unique<DevicePath>(device, *group_, exchange, settings);
  }
  if (device_->device() != device) {
    throw Error(ErrorKind::kInvalidBuffer,
                "the array lies on GPU " + std::to_string(device) +
                    ", but this communicator works on GPU " + std::to_string(device_->device()) +
                    ": a communicator uses one GPU a rank; make another for the other GPU");
  }
  return *device_;
}

// Only where all ranks share one group, in which local ranks are global ranks.
void Context::gather_in_group(const void* mine, void* all, std::size_t nbytes) {
  const int bytes = static_cast<int>(nbytes);
  MPI_Request request = MPI_REQUEST_NULL;
  MPIDP_MPI_CHECK(MPI_Iallgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, comm_, &request));
  wait_request(request, device_timeout_, policy_);
}

// An empty array may have no address: it lies wherever the communicator works.
int Context::device_of(const Call& call) const {
  const int input = call.input != nullptr ? device_of_pointer(call.input, "x") : -1;
  const int output = call.output == call.input || call.output == nullptr
                         ? input
                         : device_of_pointer(call.output, "out");
  if (input >= 0 && output >= 0 && input != output) {
    throw Error(ErrorKind::kInvalidBuffer, "x lies on GPU " + std::to_string(input) +
                                               " and out on GPU " + std::to_string(output) +
                                               ": give arrays on one GPU");
  }
  const int found = std::max(input, output);
  if (found >= 0) return found;
  const int mine = device_index();
  if (mine >= 0) return mine;
  int current = 0;
  MPIDP_DEVICE_CHECK(device_runtime().get_device(&current));
  return current;
}

std::shared_ptr<DeviceOrder> Context::begin_on_device(Call& call) {
  auto order = device_path(device_of(call)).begin(call.stream);
  call.order = order.get();
  return order;
}

void Context::run_on_device(Call& call) {
  const std::shared_ptr<DeviceOrder> order = begin_on_device(call);
  if (engine_.idle()) {
    execute(call, false);
  } else {
    const auto operation = engine_.submit(call, {}, order);
    if (!operation->wait(-1)) throw Error(ErrorKind::kInterrupted, "interrupted");
  }
  order->follow_on(call.stream);
}

std::shared_ptr<Operation> Context::submit_on_device(const Call& call, std::vector<void*> owners) {
  Call placed = call;
  const std::shared_ptr<DeviceOrder> order = begin_on_device(placed);
  if (thread_multiple_) return engine_.submit(placed, std::move(owners), order);
  return engine_.run_inline(placed, std::move(owners), order);
}

void Context::perform_on_device(Call& call, bool on_progress_thread) {
  DevicePath& path = *device_;
  const DeviceGuard guard(path.device(), !on_progress_thread);
  device_timeout_ = call.timeout;
  const Fingerprint detail = fingerprint_of(call);
  EntryMessage message;
  message.fingerprint = detail.hash();
  message.scale = call.has_scale ? call.scale : 1.0;
  try {
    path.prepare(call, message);
  } catch (const Error&) {
    group_->arrive(kStatusFailed);  // the others wait at the entry
    throw;
  }
  enter(call, message, detail);
  path.execute(call, [this](Call& segment) { perform(segment); });
}

// Whether nothing of this rank's is in flight on the GPU any more.
bool Context::leave_device() {
  if (!device_) return true;
  try {
    device_->drain(std::min(settings_.timeout, kDrainSeconds));
    return true;
  } catch (const Error&) {
    return false;  // what is in flight keeps its memory
  }
}

}  // namespace mpidp
