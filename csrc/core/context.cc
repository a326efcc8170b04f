#include "core/context.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "common/check_mpi.h"
#include "reduce/reduce.h"

namespace mpidp {
namespace {

constexpr std::int64_t kSlotBytes = std::int64_t{64} << 10;
// Largest registered array that goes through the mailbox where each rank has a core.
constexpr std::int64_t kMailboxBytes = std::int64_t{8} << 10;
constexpr std::int64_t kInlineBytes = std::int64_t{16} << 10;
constexpr double kConnectSeconds = 30.0;
constexpr std::int64_t kSegmentBytes = std::int64_t{256} << 10;
constexpr std::int64_t kLeastSegmentBytes = std::int64_t{64} << 10;
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 30;
constexpr double kLeaveSeconds = 30.0;
constexpr double kLeaveBrokenSeconds = 5.0;

void fill_defaults(Settings& settings) {
  if (settings.slot_bytes <= 0) settings.slot_bytes = kSlotBytes;
  if (settings.inline_bytes <= 0) settings.inline_bytes = kInlineBytes;
  if (settings.segment_bytes <= 0) settings.segment_bytes = kSegmentBytes;
  if (settings.piece_bytes <= 0) settings.piece_bytes = kPieceBytes;
  // Mailboxes hold whole cache lines, messages whole elements.
  settings.inline_bytes = (settings.inline_bytes + 63) / 64 * 64;
  settings.piece_bytes = std::max<std::int64_t>(16, settings.piece_bytes / 16 * 16);
}

}  // namespace

Context::Context(MPI_Comm comm, const Settings& settings)
    : comm_(comm), settings_(settings), engine_([this](Call& call) { execute(call, true); }) {
  MPIDP_MPI_CHECK(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  MPIDP_MPI_CHECK(MPI_Comm_rank(comm_, &rank_));
  MPIDP_MPI_CHECK(MPI_Comm_size(comm_, &world_size_));
  int thread_level = MPI_THREAD_SINGLE;
  MPIDP_MPI_CHECK(MPI_Query_thread(&thread_level));
  thread_multiple_ = thread_level == MPI_THREAD_MULTIPLE;

  fill_defaults(settings_);
  const std::int64_t node_id = settings_.node_id;
  MPIDP_MPI_CHECK(MPI_Bcast(&settings_, sizeof(settings_), MPI_BYTE, 0, comm_));
  settings_.node_id = node_id;

  // Ranks with equal keys are on one node: the first rank there, and the
  // caller's own division.
  MPI_Comm node_comm = MPI_COMM_NULL;
  MPIDP_MPI_CHECK(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node_comm));
  int first_rank = rank_;
  MPIDP_MPI_CHECK(MPI_Allreduce(&rank_, &first_rank, 1, MPI_INT, MPI_MIN, node_comm));
  MPIDP_MPI_CHECK(MPI_Comm_free(&node_comm));
  const NodeKey mine{first_rank, node_id, static_cast<std::int64_t>(machine_id())};
  std::vector<NodeKey> node_keys(static_cast<std::size_t>(world_size_));
  MPIDP_MPI_CHECK(MPI_Allgather(&mine, 3, MPI_INT64_T, node_keys.data(), 3, MPI_INT64_T, comm_));

  find_topology(node_keys);
  connect_shared_memory();
  direct_ = std::make_unique<DirectPath>(*group_);
  transport_ = std::make_unique<MpiTransport>(comm_, settings_.piece_bytes);
  executor_ = std::make_unique<Executor>(*transport_, std::vector<int>{});
  native_ = std::make_unique<NativeCollectives>(comm_);
  policy_ = group_->policy_for(1);
}

Context::~Context() {
  if (!closed()) close(false);
}

void Context::find_topology(const std::vector<NodeKey>& node_keys) {
  std::map<std::pair<std::int64_t, std::int64_t>, int> nodes;
  std::vector<int> sizes;
  std::vector<int> node_of(static_cast<std::size_t>(world_size_));
  for (int rank = 0; rank < world_size_; ++rank) {
    const NodeKey& said = node_keys[static_cast<std::size_t>(rank)];
    if (said.machine != 0 && said.machine == node_keys[static_cast<std::size_t>(rank_)].machine) {
      ++machine_ranks_;
    }
    const auto key = std::make_pair(said.first_rank, said.node_id);
    const auto [entry, is_new] = nodes.emplace(key, static_cast<int>(nodes.size()));
    if (is_new) {
      sizes.push_back(0);
      groups_.emplace_back();
    }
    const int node = entry->second;
    node_of[static_cast<std::size_t>(rank)] = node;
    if (rank == rank_) local_rank_ = sizes[static_cast<std::size_t>(node)];
    ++sizes[static_cast<std::size_t>(node)];
    groups_[static_cast<std::size_t>(node)].push_back(rank);
  }
  node_rank_ = node_of[static_cast<std::size_t>(rank_)];
  num_nodes_ = static_cast<int>(sizes.size());
  local_size_ = sizes[static_cast<std::size_t>(node_rank_)];
  min_local_size_ = *std::min_element(sizes.begin(), sizes.end());
  max_local_size_ = *std::max_element(sizes.begin(), sizes.end());
}

bool Context::all_ranks(bool mine) const {
  int value = mine ? 1 : 0;
  MPIDP_MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MIN, comm_));
  return value != 0;
}

void Context::connect_shared_memory() {
  NodeGroupSettings group_settings;
  group_settings.machine_ranks = machine_ranks_;
  group_settings.timeout = settings_.timeout;
  group_settings.inline_bytes = settings_.inline_bytes;
  group_settings.slot_bytes = settings_.slot_bytes;
  group_settings.spin_us = settings_.spin_us;
  group_settings.stores = settings_.stores;
  group_ = std::make_unique<NodeGroup>(group_settings);

  shared_memory_ = false;
  if (settings_.shared_memory != 0) {
    std::vector<NodeGroup::Card> all(static_cast<std::size_t>(world_size_));
    const NodeGroup::Card mine = group_->card(rank_);
    MPIDP_MPI_CHECK(
        MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, comm_));
    std::vector<NodeGroup::Card> cards;
    for (const int peer : groups_[static_cast<std::size_t>(node_rank_)]) {
      cards.push_back(all[static_cast<std::size_t>(peer)]);
    }
    bool mapped = true;
    try {
      group_->connect(cards, local_rank_);
    } catch (const Error&) {
      mapped = false;  // a container or a security policy forbids it; all ranks
                       // then do without
    }
    // Advertised is not proven: look at real data before the first collective
    // relies on it.
    if (all_ranks(mapped)) {
      group_->write_probe();
      MPIDP_MPI_CHECK(MPI_Barrier(comm_));
      shared_memory_ = all_ranks(group_->check_probe());
      // Not the caller's deadline alone: one of milliseconds is meant for collectives.
      if (shared_memory_) group_->choose_stores(std::max(settings_.timeout, kConnectSeconds));
    }
  }
  if (shared_memory_) {
    group_index_ = node_rank_;
    num_groups_ = num_nodes_;
  } else {
    group_->connect_alone(rank_);
    group_index_ = rank_;
    num_groups_ = world_size_;
    groups_.clear();
    for (int rank = 0; rank < world_size_; ++rank) groups_.push_back({rank});
  }
}

void Context::set_rules(Collective collective, std::vector<Rule> rules) {
  rules_[static_cast<int>(collective)] = std::move(rules);
}

Algorithm Context::select(Collective collective, std::int64_t nbytes) const {
  for (const Rule& rule : rules_[static_cast<int>(collective)]) {
    if (nbytes <= rule.limit) return rule.algorithm;
  }
  return Algorithm::kDirect;
}

void Context::resolve(Call& call) const {
  if (call.timeout < 0) call.timeout = settings_.timeout;
  if (call.deterministic) {
    if (call.algorithm != Algorithm::kAuto && call.algorithm != Algorithm::kDirect) {
      throw Error(ErrorKind::kInvalidValue,
                  std::string("deterministic=True accumulates in rank order, "
                              "which algorithm \"") +
                      name_of(call.algorithm) + "\" does not: leave algorithm at \"auto\"");
    }
    call.algorithm = Algorithm::kDirect;
  }
  if (call.root < 0 || call.root >= world_size_) {
    throw Error(ErrorKind::kInvalidValue, "root " + std::to_string(call.root) +
                                              " is not a rank of this communicator (0 to " +
                                              std::to_string(world_size_ - 1) + ")");
  }
  // The table was measured on host memory; a GPU's own path on one node beats staging at any size.
  if (call.algorithm == Algorithm::kAuto && call.device != DeviceKind::kCpu && single_group()) {
    call.algorithm = Algorithm::kDirect;
  }
  if (call.algorithm == Algorithm::kAuto) {
    call.algorithm = select(call.collective, call.message_bytes(world_size_));
  }
  const bool available =
      call.collective == Collective::kBarrier || call.algorithm == Algorithm::kMpi ||
      (call.algorithm == Algorithm::kHierarchical && call.collective == Collective::kAllReduce) ||
      (call.algorithm == Algorithm::kDirect && single_group()) ||
      has_schedule(call.collective, call.algorithm);
  if (!available) {
    throw Error(ErrorKind::kInvalidValue, std::string(name_of(call.collective)) +
                                              " has no algorithm \"" + name_of(call.algorithm) +
                                              "\": use algorithm=\"auto\"");
  }
}

std::string Context::describe(const Call& call) const {
  std::string text = std::string(name_of(call.collective)) + " #" + std::to_string(sequence_);
  if (call.collective != Collective::kBarrier) {
    text += std::string(" of ") + std::to_string(call.count) + " " + name_of(call.dtype);
  }
  return text;
}

void Context::run(Call& call) {
  if (call.device != DeviceKind::kCpu) {
    run_on_device(call);
    return;
  }
  if (engine_.idle()) {
    execute(call, false);
    return;
  }
  const auto operation = engine_.submit(call, {});
  // Not call.timeout: the engine's own deadlines bound this wait.
  if (!operation->wait(-1)) throw Error(ErrorKind::kInterrupted, "interrupted");
}

std::shared_ptr<Operation> Context::submit(const Call& call, std::vector<void*> owners) {
  if (call.device != DeviceKind::kCpu) return submit_on_device(call, std::move(owners));
  if (thread_multiple_) return engine_.submit(call, std::move(owners));
  // Without MPI_THREAD_MULTIPLE no second thread may call MPI: run here and
  // hand over the outcome.
  return engine_.run_inline(call, std::move(owners));
}

void Context::execute(Call& call, bool on_progress_thread) {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  if (closed()) throw Error(ErrorKind::kClosed, "the communicator is closed");
  if (!broken_.empty()) {
    throw Error(ErrorKind::kMpidp, "the communicator cannot be used any more since " + broken_ +
                                       ": close it and make a new one");
  }
  ++sequence_;
  // The progress thread shares the cores with this process's own computing.
  policy_ = group_->policy_for(on_progress_thread ? 2 : 1);
  group_->use_policy(policy_);
  try {
    if (call.device == DeviceKind::kCpu) {
      perform(call);
    } else {
      perform_on_device(call, on_progress_thread);
    }
  } catch (const Error& error) {
    const bool harmless =
        error.kind() == ErrorKind::kMismatch || error.kind() == ErrorKind::kInvalidValue;
    if (!harmless) {
      broken_ = describe(call) + " failed (" + error.what() + ")";
      executor_->abandon();
    }
    if (error.kind() == ErrorKind::kMismatch || error.kind() == ErrorKind::kInterrupted) throw;
    throw Error(error.kind(), describe(call) + ": " + error.what(), error.ranks());
  }
}

void Context::perform(Call& call) {
  const Fingerprint detail = fingerprint_of(call);
  EntryMessage message;
  message.fingerprint = detail.hash();
  message.scale = call.has_scale ? call.scale : 1.0;

  const bool direct = call.algorithm == Algorithm::kDirect && single_group();
  const bool in_memory = direct || call.algorithm == Algorithm::kHierarchical;
  // Below, the mailbox is quicker; and a sync point more costs most where ranks share cores.
  const std::int64_t mailbox_limit = group_->oversubscribed()
                                         ? group_->inline_bytes()
                                         : std::min(group_->inline_bytes(), kMailboxBytes);
  if (in_memory && group_->size() > 1 &&
      call.bytes_of(call.input_count(world_size_)) > std::max(mailbox_limit, kPayloadBytes)) {
    MemoryRegistry& registry = MemoryRegistry::instance();
    message.input = registry.locate(
        call.input, static_cast<std::size_t>(call.bytes_of(call.input_count(world_size_))));
    if (call.output != nullptr) {
      message.output = registry.locate(
          call.output, static_cast<std::size_t>(call.bytes_of(call.output_count(world_size_))));
    }
  }
  DirectPath::Plan plan;
  if (direct) plan = direct_->prepare(call, message.input.generation != 0);
  enter(call, message, detail);
  if (call.collective != Collective::kBarrier && call.count > 0) dispatch(call, plan);
}

void Context::dispatch(Call& call, const DirectPath::Plan& plan) {
  if (call.algorithm == Algorithm::kDirect && single_group()) {
    direct_->execute(call, plan);
  } else if (call.algorithm == Algorithm::kHierarchical) {
    run_hierarchical(call);
  } else if (call.algorithm == Algorithm::kMpi) {
    if (call.has_scale) call.input = scaled_input(call);
    native_->run(call, rank_, world_size_, policy_);
  } else {
    run_schedule(call);
  }
}

// The input times the scale: in the output where the collective allows it, else
// in scratch memory.
const void* Context::scaled_input(const Call& call) {
  void* destination = call.output;
  const std::int64_t count = call.input_count(world_size_);
  if (call.collective != Collective::kAllReduce) {
    const auto nbytes = static_cast<std::size_t>(call.bytes_of(count));
    if (scaled_.size() < nbytes) scaled_.resize(nbytes);
    destination = scaled_.data();
  }
  ReduceArgs args;
  args.sources = &call.input;
  args.num_sources = 1;
  args.destinations = &destination;
  args.num_destinations = 1;
  args.count = count;
  args.dtype = call.dtype;
  args.scales = &call.scale;
  reduce(args);
  return destination;
}

const Schedule& Context::cached_schedule(const ScheduleRequest& request) {
  constexpr std::size_t kCached = 32;
  for (const auto& [known, schedule] : schedules_) {
    if (known.collective == request.collective && known.algorithm == request.algorithm &&
        known.world_size == request.world_size && known.root == request.root &&
        known.count == request.count && known.segment_count == request.segment_count) {
      return *schedule;
    }
  }
  if (schedules_.size() == kCached) schedules_.erase(schedules_.begin());
  schedules_.emplace_back(request, std::make_unique<Schedule>(make_schedule(request)));
  return *schedules_.back().second;
}

// At least two segments to a chunk, so that one is on the wire while another is reduced, but none
// so short that its latency counts.
std::int64_t Context::segment_count(const Call& call, int parties) const {
  std::int64_t nbytes = settings_.segment_bytes;
  if (call.collective == Collective::kAllReduce) {
    const std::int64_t half_chunk = call.bytes_of(call.count) / (std::int64_t{2} * parties);
    nbytes = std::min(nbytes, std::max(kLeastSegmentBytes, half_chunk));
  }
  return nbytes / static_cast<std::int64_t>(item_size(call.dtype));
}

void Context::run_schedule(Call& call) {
  if (call.has_scale) call.input = scaled_input(call);
  ScheduleRequest request;
  request.collective = call.collective;
  request.algorithm = call.algorithm;
  request.world_size = world_size_;
  request.rank = rank_;
  request.root = call.root;
  request.count = call.count;
  request.segment_count = segment_count(call, world_size_);
  executor_->run(cached_schedule(request), rank_, world_size_, call, policy_);
}

bool Context::close(bool synchronize) {
  if (closed()) return false;
  engine_.stop();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  closed_.store(true);
  const bool device_idle = leave_device();
  if (synchronize) {
    try {
      // Through MPI, since a peer may look at this rank's shared memory until it has passed the
      // last meeting there: only then may the pages go.
      MPI_Request request = MPI_REQUEST_NULL;
      MPIDP_MPI_CHECK(MPI_Ibarrier(comm_, &request));
      // Broken here does not mean broken everywhere: the others may wait for this rank.
      const double limit = broken_.empty() ? kLeaveSeconds : kLeaveBrokenSeconds;
      wait_request(request, std::min(settings_.timeout, limit), policy_);
      group_->release();
      // Not before: until the meeting a peer's kernel may work on memory that it maps from here.
      if (device_ && device_idle) device_->release();
      return broken_.empty();
    } catch (const Error&) {
      // Some peer did not come. The memory stays: it may still be read.
    }
  }
  return false;
}

}  // namespace mpidp
