// Streams, events and kernel launches.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "emulated_cuda.h"

namespace emulated {
namespace {

// A launch runs this many logical threads a block, and blocks: kernels stride over their range.
constexpr int kThreadsPerBlock = 3;
constexpr int kMostBlocks = 2;
constexpr unsigned kDelayedOneIn = 4;
constexpr int kLongestDelayUs = 300;

thread_local std::int64_t thread_index = 0;
thread_local std::int64_t thread_count = 1;

unsigned seed() {
  static const unsigned value = [] {
    const char* text = std::getenv("MPIDP_EMULATED_SEED");
    return text == nullptr ? 1u : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  }();
  return value;
}

}  // namespace

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

// What its thread and its owner share; the thread may outlive cudaStreamDestroy.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> operations;
  bool running = false;  // an operation that was taken off the queue
  bool closing = false;

  void run(unsigned stream_seed) {
    std::minstd_rand random(stream_seed);
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return closing || !operations.empty(); });
      if (operations.empty()) return;
      const std::function<void()> operation = std::move(operations.front());
      operations.pop_front();
      running = true;
      lock.unlock();
      if (random() % kDelayedOneIn == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % kLongestDelayUs));
      }
      operation();
      lock.lock();
      running = false;
      changed.notify_all();
    }
  }
  bool idle_within(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_until(lock, deadline, [this] { return operations.empty() && !running; });
  }
};

struct Stream {
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
};

namespace {

// Never destroyed: threads may run until the process ends.
struct Streams {
  std::mutex mutex;
  std::set<Stream*> live;
  std::set<std::shared_ptr<Queue>> queues;
  unsigned made = 0;

  Stream* make() {
    const std::lock_guard<std::mutex> lock(mutex);
    auto* stream = new Stream;
    const unsigned own_seed =
        seed() * 7919u + 104729u * ++made + static_cast<unsigned>(getpid()) % 1009u + 1u;
    std::thread([queue = stream->queue, own_seed] { queue->run(own_seed); }).detach();
    live.insert(stream);
    queues.insert(stream->queue);
    return stream;
  }
};

Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

Stream* default_stream() {
  static Stream* stream = streams().make();
  return stream;
}

std::shared_ptr<Queue> queue_of(Stream* stream) {
  if (stream == nullptr) stream = default_stream();
  const std::lock_guard<std::mutex> lock(streams().mutex);
  return streams().live.count(stream) == 0 ? nullptr : stream->queue;
}

}  // namespace

bool enqueue(Stream* stream, std::function<void()> operation) {
  const std::shared_ptr<Queue> queue = queue_of(stream);
  if (queue == nullptr) return false;
  const std::lock_guard<std::mutex> lock(queue->mutex);
  queue->operations.push_back(std::move(operation));
  queue->changed.notify_all();
  return true;
}

void drain(Stream* stream) {
  const std::shared_ptr<Queue> queue = queue_of(stream);
  if (queue != nullptr) queue->idle_within(std::chrono::steady_clock::time_point::max());
}

void drain_all(double seconds) {
  std::set<std::shared_ptr<Queue>> queues;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    queues = streams().queues;
  }
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::microseconds(static_cast<std::int64_t>(seconds * 1e6));
  for (const auto& queue : queues) queue->idle_within(deadline);
}

std::int64_t this_thread() { return thread_index; }
std::int64_t threads_of_launch() { return thread_count; }

cudaError_t launch(std::function<void()> kernel, int blocks, cudaStream_t stream) {
  if (fault("launch")) return cudaErrorLaunchOutOfResources;
  if (blocks < 1) return cudaErrorInvalidValue;
  const std::int64_t threads = kThreadsPerBlock * (blocks < kMostBlocks ? blocks : kMostBlocks);
  const bool known = enqueue(stream, [kernel = std::move(kernel), threads] {
    thread_count = threads;
    // Backwards: no kernel may rely on the order of its threads.
    for (thread_index = threads - 1; thread_index >= 0; --thread_index) kernel();
  });
  return known ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

// Records are numbered. A wait is for the last one made before it, whatever is recorded later; the
// slot of a record is reused only by the one kRecords later.
struct EventState {
  static constexpr std::uint64_t kRecords = 64;
  std::atomic<std::uint64_t> recorded;
  std::atomic<std::uint64_t> reached[kRecords];

  bool has_reached(std::uint64_t record) const {
    return record == 0 || reached[record % kRecords].load(std::memory_order_acquire) >= record;
  }
};

namespace {

constexpr std::size_t kEventBytes = 4096;
static_assert(sizeof(EventState) <= kEventBytes);

// Unmaps with the last operation that refers to it.
struct SharedState {
  EventState* state = nullptr;
  int fd = -1;
  ~SharedState() {
    if (state != nullptr) munmap(state, kEventBytes);
    if (fd >= 0) close(fd);
  }
};

std::shared_ptr<SharedState> map_state(int fd) {
  void* memory = mmap(nullptr, kEventBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto shared = std::make_shared<SharedState>();
  shared->state = static_cast<EventState*>(memory);
  shared->fd = fd;
  return shared;
}

struct EventTicket {
  std::int32_t pid, fd;
  std::uint64_t inode;
};

}  // namespace

struct Event {
  std::shared_ptr<SharedState> shared;
  bool interprocess = false;
  bool opened = false;
};

}  // namespace emulated

using emulated::Event;
using emulated::EventState;

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  emulated::default_stream();
  *stream = emulated::streams().make();
  emulated::count("streams", 1);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const auto queue = stream == nullptr ? nullptr : emulated::queue_of(stream);
  if (queue == nullptr) return cudaErrorInvalidResourceHandle;
  {
    const std::lock_guard<std::mutex> lock(emulated::streams().mutex);
    emulated::streams().live.erase(stream);
  }
  emulated::enqueue(nullptr, [] {});
  {
    // What is queued still runs; then the thread ends.
    const std::lock_guard<std::mutex> lock(queue->mutex);
    queue->closing = true;
    queue->changed.notify_all();
  }
  delete stream;
  emulated::count("streams", -1);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (emulated::queue_of(stream) == nullptr) return cudaErrorInvalidResourceHandle;
  emulated::drain(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const int fd = memfd_create("mpidp-emulated-event", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, emulated::kEventBytes) != 0) return cudaErrorMemoryAllocation;
  auto shared = emulated::map_state(fd);
  if (shared == nullptr) return cudaErrorMemoryAllocation;
  *event = new Event{shared, (flags & cudaEventInterprocess) != 0, false};
  emulated::count("events", 1);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  emulated::count(event->opened ? "opened_events" : "events", -1);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  const std::uint64_t record = event->shared->state->recorded.fetch_add(1) + 1;
  const bool known = emulated::enqueue(stream, [shared = event->shared, record] {
    shared->state->reached[record % EventState::kRecords].store(record, std::memory_order_release);
  });
  return known ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  if (emulated::fault(event->interprocess ? "drop_peer_waits" : "drop_own_waits")) {
    return cudaSuccess;
  }
  const std::uint64_t record = event->shared->state->recorded.load();
  const bool known = emulated::enqueue(stream, [shared = event->shared, record] {
    while (!shared->state->has_reached(record)) emulated::nap();
  });
  return known ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  const EventState& state = *event->shared->state;
  return state.has_reached(state.recorded.load()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  const EventState& state = *event->shared->state;
  const std::uint64_t record = state.recorded.load();
  while (!state.has_reached(record)) emulated::nap();
  return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  if (event == nullptr || !event->interprocess || event->opened) {
    return cudaErrorInvalidResourceHandle;
  }
  const emulated::EventTicket ticket{getpid(), event->shared->fd,
                                     emulated::inode_of(event->shared->fd)};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &ticket, sizeof(ticket));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  emulated::EventTicket ticket;
  std::memcpy(&ticket, &handle, sizeof(ticket));
  if (ticket.pid == getpid()) return cudaErrorDeviceUninitialized;
  if (emulated::fault("ipc_event_open")) return cudaErrorMapBufferObjectFailed;
  const int fd = emulated::open_foreign(ticket.pid, ticket.fd, ticket.inode);
  if (fd < 0) return cudaErrorMapBufferObjectFailed;
  auto shared = emulated::map_state(fd);
  if (shared == nullptr) {
    close(fd);
    return cudaErrorMemoryAllocation;
  }
  *event = new Event{shared, true, true};
  emulated::count("opened_events", 1);
  return cudaSuccess;
}
