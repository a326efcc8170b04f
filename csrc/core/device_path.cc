#include "core/device_path.h"

#include <algorithm>
#include <utility>

#include "common/partition.h"
#include "transport/device_plugin.h"

namespace mpidp {
namespace {

constexpr std::uint32_t kStatusFailed = 2;
// Chunks of different ranks share no memory sector of a GPU.
constexpr std::int64_t kSectorBytes = 128;

const DeviceRuntime& runtime() { return device_runtime(); }

char* at(const Call& call, const void* base, std::int64_t element) {
  return static_cast<char*>(const_cast<void*>(base)) + call.bytes_of(element);
}

}  // namespace

DevicePath::DevicePath(int device, NodeGroup& group, DeviceIpc::Exchange exchange,
                       const DevicePathSettings& settings)
    : device_(device),
      group_(group),
      exchange_(std::move(exchange)),
      settings_(settings),
      events_(std::make_shared<EventPool>(device)),
      sides_(static_cast<std::size_t>(group.size())) {
  const DeviceGuard guard(device_);
  MPIDP_DEVICE_CHECK(runtime().create_stream(&stream_));
}

DevicePath::~DevicePath() = default;

std::string DevicePath::transport() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  switch (rung_) {
    case Rung::kUndecided:
      break;
    case Rung::kLocal:
      return "local";
    case Rung::kIpc:
      return "ipc";
    case Rung::kStaged:
      return "staged";
  }
  return "undecided";
}

std::string DevicePath::reason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

std::shared_ptr<DeviceOrder> DevicePath::begin(DeviceStream caller) const {
  return std::make_shared<DeviceOrder>(events_, caller);
}

bool DevicePath::direct(const Call& call) const {
  return call.algorithm == Algorithm::kDirect && settings_.single_group;
}

void DevicePath::prepare(const Call& call, EntryMessage& message) {
  ready_recorded_ = false;
  if (rung_ != Rung::kIpc || !direct(call)) return;
  message.input = ipc_->locate(call.input, call.bytes_of(call.input_count(settings_.world_size)));
  if (call.output != nullptr) {
    message.output =
        ipc_->locate(call.output, call.bytes_of(call.output_count(settings_.world_size)));
  }
  // Before the entry, so that the entry is the meeting after which the peers may wait for it.
  call.order->start_on(stream_);
  ipc_->record_ready(set_);
  ready_recorded_ = true;
}

void DevicePath::execute(const Call& call, const RunOnHost& run_on_host) {
  if (call.count == 0) {
    finish_empty(call);
    return;
  }
  try {
    if (rung_ == Rung::kUndecided) decide(call);
    if (rung_ == Rung::kLocal && direct(call)) {
      run_alone(call);
    } else if (rung_ == Rung::kIpc && direct(call) && can_go_by_ipc(call)) {
      run_by_ipc(call);
    } else {
      run_staged(call, run_on_host);
    }
  } catch (const Error& error) {
    // A failure of this rank alone: tell the others, who wait for it at their next meeting.
    if (error.kind() == ErrorKind::kCuda && settings_.single_group) group_.arrive(kStatusFailed);
    throw;
  }
}

void DevicePath::finish_empty(const Call& call) {
  call.order->start_on(stream_);
  call.order->finish_on(stream_);
}

// The first collective of all ranks, so all come here together.
void DevicePath::decide(const Call& call) {
  Rung rung = Rung::kStaged;
  std::string reason;
  if (settings_.world_size == 1) {
    rung = Rung::kLocal;
  } else if (settings_.transport == DeviceTransport::kStaged) {
    reason = "asked for";
  } else if (!settings_.single_group) {
    reason = "the ranks do not all share one node's memory";
  } else if (group_.size() > DeviceIpc::kMaxRanks) {
    reason = "more than " + std::to_string(DeviceIpc::kMaxRanks) + " ranks on one node";
  } else {
    ipc_ = std::make_unique<DeviceIpc>(group_, stream_, exchange_);
    reason = ipc_->connect(call.timeout);
    if (reason.empty()) {
      rung = Rung::kIpc;
    } else {
      ipc_->release();
      ipc_.reset();
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  rung_ = rung;
  reason_ = std::move(reason);
}

// The peers' messages stand only until this rank goes on to the next meeting.
void DevicePath::read_entry(const Call& call) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    Side& side = sides_[static_cast<std::size_t>(peer)];
    side.input = group_.input_location(peer);
    side.output = group_.output_location(peer);
    side.reads = call.collective != Collective::kBroadcast || peer == call.root;
    side.writes = call.collective == Collective::kAllReduce ||
                  (call.collective == Collective::kReduce && peer == call.root);
    side.scale = group_.scale(peer);
  }
}

// Looks only at what all ranks have said, so all find the same.
bool DevicePath::can_go_by_ipc(const Call& call) {
  if (!ready_recorded_) {
    // The entry that led to the choice: meet once more, now with what the choice needs. The
    // mismatch check has been passed, so the message carries the arrays only.
    EntryMessage message;
    prepare(call, message);
    message.scale = call.has_scale ? call.scale : 1.0;
    group_.arrive_at_entry(message, group_.detail(group_.rank()));
    group_.wait(call.timeout);
  }
  read_entry(call);
  bool news = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    const Side& side = sides_[static_cast<std::size_t>(peer)];
    news |= ipc_->is_news(peer, side.input) || ipc_->is_news(peer, side.output);
  }
  if (news) ipc_->exchange_news(call.timeout);
  for (int peer = 0; peer < group_.size(); ++peer) {
    const Side& side = sides_[static_cast<std::size_t>(peer)];
    if (side.reads && !ipc_->reachable(peer, side.input)) return false;
    if (side.writes && !ipc_->reachable(peer, side.output)) return false;
  }
  return true;
}

void DevicePath::run_alone(const Call& call) {
  call.order->start_on(stream_);
  sides_[0].input_here = at(call, call.input, 0);
  sides_[0].scale = call.has_scale ? call.scale : 1.0;
  if (call.reduces()) {
    reduce_chunk(call, 0, call.count, {at(call, call.output, 0)});
  } else {
    copy(call, at(call, call.output, 0), sides_[0].input_here, call.count);
  }
  call.order->finish_on(stream_);
}

void DevicePath::run_by_ipc(const Call& call) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    Side& side = sides_[static_cast<std::size_t>(peer)];
    const bool mine = peer == group_.rank();
    side.input_here = mine         ? at(call, call.input, 0)
                      : side.reads ? ipc_->resolve(peer, side.input)
                                   : nullptr;
    side.output_here = mine          ? at(call, call.output, 0)
                       : side.writes ? ipc_->resolve(peer, side.output)
                                     : nullptr;
  }
  const int set = set_;
  set_ = (set_ + 1) % DeviceIpc::kSets;
  // Every rank has recorded `ready` before this point of the host program, and `done` before the
  // next one; so the waits are for this collective and not for the one before.
  ipc_->wait_ready(set);
  launch(call);
  ipc_->record_done(set);
  group_.sync(call.timeout);
  ipc_->wait_done(set);
  call.order->finish_on(stream_);
}

void DevicePath::launch(const Call& call) {
  const int size = group_.size();
  const int rank = group_.rank();
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: {
      const std::int64_t granule = kSectorBytes / static_cast<std::int64_t>(item_size(call.dtype));
      const Range mine = chunk_of(call.count, size, rank, granule);
      std::vector<char*> destinations;
      for (int peer = 0; peer < size; ++peer) {
        if (call.collective == Collective::kReduce && peer != call.root) continue;
        destinations.push_back(
            at(call, sides_[static_cast<std::size_t>(peer)].output_here, mine.offset));
      }
      reduce_chunk(call, mine.offset, mine.count, destinations);
      return;
    }
    case Collective::kReduceScatter:
      reduce_chunk(call, rank * call.count, call.count, {at(call, call.output, 0)});
      return;
    case Collective::kBroadcast:
      copy(call, at(call, call.output, 0), sides_[static_cast<std::size_t>(call.root)].input_here,
           call.count);
      return;
    case Collective::kAllGather:
    case Collective::kAllToAll:
      for (int i = 0; i < size; ++i) {
        const int peer = (rank + i) % size;  // staggered: each input has one reader at a time
        const std::int64_t offset =
            call.collective == Collective::kAllToAll ? rank * call.count : 0;
        copy(call, at(call, call.output, peer * call.count),
             at(call, sides_[static_cast<std::size_t>(peer)].input_here, offset), call.count);
      }
      return;
    case Collective::kBarrier:
      return;
  }
}

void DevicePath::reduce_chunk(const Call& call, std::int64_t offset, std::int64_t count,
                              const std::vector<char*>& destinations) {
  if (count == 0) return;
  const int size = group_.size();
  DeviceReduceArgs args{};
  args.num_sources = size;
  args.num_destinations = static_cast<std::int32_t>(destinations.size());
  args.count = count;
  args.dtype = call.dtype;
  args.op = call.op;
  args.divisor = call.divisor;
  for (int peer = 0; peer < size; ++peer) {
    const Side& side = sides_[static_cast<std::size_t>(peer)];
    args.sources[peer] = at(call, side.input_here, offset);
    args.scales[peer] = side.scale;
    args.has_scales = args.has_scales || side.scale != 1.0;
  }
  std::copy(destinations.begin(), destinations.end(), args.destinations);
  MPIDP_DEVICE_CHECK(runtime().reduce(&args, stream_));
}

void DevicePath::copy(const Call& call, char* destination, const char* source, std::int64_t count) {
  if (destination == source || count == 0) return;
  MPIDP_DEVICE_CHECK(
      runtime().copy(destination, source, static_cast<std::size_t>(call.bytes_of(count)), stream_));
}

void DevicePath::drain(double timeout) {
  const DeviceGuard guard(device_);
  const DeviceEvent event = events_->take();
  MPIDP_DEVICE_CHECK(runtime().record_event(event, stream_));
  wait_for_event(event, timeout, "a collective");
  events_->give(event);
  if (slots_) slots_->drain(timeout);
}

void DevicePath::release() {
  const DeviceGuard guard(device_);
  if (ipc_) ipc_->release();
  ipc_.reset();
  slots_.reset();
  if (stream_ != nullptr) runtime().destroy_stream(stream_);
  stream_ = nullptr;
}

}  // namespace mpidp
