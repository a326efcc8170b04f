#include "core/executor.h"

#include <algorithm>
#include <string>

#include "common/check.h"
#include "reduce/reduce.h"

namespace mpidp {
namespace {

// Steps looked at together. Enough for four segments in flight each way in a
// ring, whose segment is a send and a receive.
constexpr std::size_t kWindow = 16;
// Memory for messages that were received but not reduced yet.
constexpr std::int64_t kTemporaryBytes = std::int64_t{8} << 20;
constexpr int kMinTemporaries = 2;
constexpr int kMaxTemporaries = 8;
// Tags below are the context's own (see context.cc).
constexpr int kFirstTag = 64;
constexpr int kTags = 16384;
// Idle polling: how long a nap is.
constexpr int kNapUs = 50;
// A poll of the window takes about as long as this many pauses.
constexpr std::uint32_t kPausesPerPoll = 16;

}  // namespace

Executor::Executor(Transport& transport, std::vector<int> peers)
    : transport_(transport), peers_(std::move(peers)) {}

void Executor::abandon() {
  transport_.abandon();
  window_.clear();
  for (Temporary& temporary : temporaries_) temporary.in_use = false;
}

char* Executor::address(BufferId buffer, std::int64_t offset, const Call& call) {
  switch (buffer) {
    case BufferId::kInput:
      // Never written through: the schedules promise it, the simulation proves
      // it.
      return const_cast<char*>(static_cast<const char*>(call.input)) + call.bytes_of(offset);
    case BufferId::kOutput:
      return static_cast<char*>(call.output) + call.bytes_of(offset);
    case BufferId::kScratch:
      return scratch_.data() + call.bytes_of(offset);
  }
  return nullptr;
}

void Executor::activate(const Step& step, const Call& call) {
  Active active;
  active.step = &step;
  const std::int64_t nbytes = call.bytes_of(step.count);
  const bool has_source = step.kind != StepKind::kReceive;
  const bool has_destination = step.kind != StepKind::kSend;
  if (has_source) {
    const char* begin = address(step.source_buffer, step.source_offset, call);
    active.reads = Span{begin, begin + nbytes};
  }
  if (has_destination) {
    const char* begin = address(step.destination_buffer, step.destination_offset, call);
    active.writes = Span{begin, begin + nbytes};
  }
  if (step.kind == StepKind::kReduceOrdered) {
    active.reads_too = Span{scratch_.data(), scratch_.data() + scratch_.size()};
  }
  const auto peer = static_cast<std::size_t>(std::max(step.peer, 0));
  if (step.kind == StepKind::kSend) {
    active.tag = kFirstTag + next_send_tag_[peer]++ % kTags;
  } else if (step.kind == StepKind::kReceive || step.kind == StepKind::kReceiveReduce) {
    active.tag = kFirstTag + next_receive_tag_[peer]++ % kTags;
  }
  window_.push_back(active);
}

bool Executor::blocked(std::size_t index) const {
  const Active& later = window_[index];
  for (std::size_t i = 0; i < index; ++i) {
    const Active& earlier = window_[i];
    if (earlier.done) continue;
    if (earlier.writes.overlaps(later.reads) || earlier.writes.overlaps(later.reads_too) ||
        earlier.writes.overlaps(later.writes) || earlier.reads.overlaps(later.writes) ||
        earlier.reads_too.overlaps(later.writes)) {
      return true;
    }
  }
  return false;
}

int Executor::acquire_temporary(std::int64_t nbytes) {
  std::size_t in_use = 0;
  for (std::size_t i = 0; i < temporaries_.size(); ++i) {
    if (temporaries_[i].in_use) {
      ++in_use;
      continue;
    }
    temporaries_[i].in_use = true;
    if (temporaries_[i].bytes.size() < static_cast<std::size_t>(nbytes)) {
      temporaries_[i].bytes.resize(static_cast<std::size_t>(nbytes));
    }
    return static_cast<int>(i);
  }
  if (in_use >= static_cast<std::size_t>(temporary_limit_)) return -1;
  temporaries_.emplace_back();
  temporaries_.back().bytes.resize(static_cast<std::size_t>(nbytes));
  temporaries_.back().in_use = true;
  return static_cast<int>(temporaries_.size() - 1);
}

// Takes the step as far as it can go now; true if anything happened.
bool Executor::advance(std::size_t index, const Call& call) {
  Active& active = window_[index];
  const Step& step = *active.step;
  const int peer =
      step.peer < 0 || peers_.empty() ? step.peer : peers_[static_cast<std::size_t>(step.peer)];
  const std::int64_t nbytes = call.bytes_of(step.count);
  switch (step.kind) {
    case StepKind::kSend:
    case StepKind::kReceive:
      if (!active.posted) {
        if (blocked(index)) return false;
        active.handle = step.kind == StepKind::kSend
                            ? transport_.send(active.reads.begin, nbytes, peer, active.tag)
                            : transport_.receive(const_cast<char*>(active.writes.begin), nbytes,
                                                 peer, active.tag);
        active.posted = true;
      }
      active.done = transport_.test(active.handle);
      return active.done;
    case StepKind::kReceiveReduce:
      if (!active.posted) {
        // The message lands in a temporary, so it may come before the destination
        // is free.
        active.temporary = acquire_temporary(nbytes);
        if (active.temporary < 0) return false;
        active.handle = transport_.receive(
            temporaries_[static_cast<std::size_t>(active.temporary)].bytes.data(), nbytes, peer,
            active.tag);
        active.posted = true;
      }
      if (!active.received) active.received = transport_.test(active.handle);
      if (!active.received || blocked(index)) return false;
      reduce_received(active, call);
      temporaries_[static_cast<std::size_t>(active.temporary)].in_use = false;
      active.done = true;
      return true;
    case StepKind::kReduceOrdered:
    case StepKind::kCopy:
      if (blocked(index)) return false;
      if (step.kind == StepKind::kReduceOrdered) {
        reduce_ordered(active, call);
      } else if (active.reads.begin != active.writes.begin) {
        copy_bytes(const_cast<char*>(active.writes.begin), active.reads.begin, nbytes);
      }
      active.done = true;
      return true;
  }
  return false;
}

void Executor::reduce_received(const Active& active, const Call& call) {
  const void* received = temporaries_[static_cast<std::size_t>(active.temporary)].bytes.data();
  const void* sources[2] = {active.reads.begin, received};
  if (active.step->received_first != 0) std::swap(sources[0], sources[1]);
  void* destination = const_cast<char*>(active.writes.begin);
  ReduceArgs args;
  args.sources = sources;
  args.num_sources = 2;
  args.destinations = &destination;
  args.num_destinations = 1;
  args.count = active.step->count;
  args.dtype = call.dtype;
  args.op = call.op;
  args.divisor = active.step->final != 0 ? call.divisor : 1.0;
  reduce(args);
}

void Executor::reduce_ordered(const Active& active, const Call& call) {
  const Step& step = *active.step;
  ordered_sources_.resize(static_cast<std::size_t>(world_size_));
  for (int source = 0, slot = 0; source < world_size_; ++source) {
    ordered_sources_[static_cast<std::size_t>(source)] =
        source == rank_ ? active.reads.begin
                        : scratch_.data() + call.bytes_of(step.stride * slot++);
  }
  void* destination = const_cast<char*>(active.writes.begin);
  ReduceArgs args;
  args.sources = ordered_sources_.data();
  args.num_sources = world_size_;
  args.destinations = &destination;
  args.num_destinations = 1;
  args.count = step.count;
  args.dtype = call.dtype;
  args.op = call.op;
  args.divisor = step.final != 0 ? call.divisor : 1.0;
  reduce(args);
}

void Executor::run(const Schedule& schedule, int rank, int world_size, const Call& call,
                   const WaitPolicy& policy) {
  rank_ = rank;
  world_size_ = world_size;
  std::int64_t longest = 1;
  for (const Step& step : schedule.steps) {
    if (step.kind == StepKind::kReceiveReduce)
      longest = std::max(longest, call.bytes_of(step.count));
  }
  temporary_limit_ =
      std::clamp<std::int64_t>(kTemporaryBytes / longest, kMinTemporaries, kMaxTemporaries);
  const auto scratch_bytes = static_cast<std::size_t>(call.bytes_of(schedule.scratch_count));
  if (scratch_.size() < scratch_bytes) scratch_.resize(scratch_bytes);
  next_send_tag_.assign(static_cast<std::size_t>(world_size), 0);
  next_receive_tag_.assign(static_cast<std::size_t>(world_size), 0);
  window_.clear();

  const Deadline deadline(call.timeout);
  std::size_t next = 0;
  std::uint32_t idle_rounds = 0;
  std::int64_t idle_since = 0;
  while (next < schedule.steps.size() || !window_.empty()) {
    while (next < schedule.steps.size() && window_.size() < kWindow) {
      activate(schedule.steps[next++], call);
    }
    bool progressed = false;
    for (std::size_t i = 0; i < window_.size(); ++i) progressed |= advance(i, call);
    window_.erase(std::remove_if(window_.begin(), window_.end(),
                                 [](const Active& active) { return active.done; }),
                  window_.end());
    if (progressed) {
      idle_rounds = 0;
      continue;
    }
    // MPI moves data only while somebody calls it, so an idle rank polls, ever
    // more slowly.
    if (idle_rounds == 0) idle_since = now_us();
    if (idle_rounds++ < policy.spins / kPausesPerPoll) continue;
    if (now_us() - idle_since < static_cast<std::int64_t>(policy.poll_us)) {
      yield_core();
      continue;
    }
    sleep_us(kNapUs);
    if (interrupted()) throw Error(ErrorKind::kInterrupted, "interrupted");
    if (deadline.passed()) throw_timeout(call);
  }
}

void Executor::throw_timeout(const Call& call) const {
  std::vector<int> ranks;
  for (const Active& active : window_) {
    const int peer = active.step->peer;
    if (!active.posted || active.received || peer < 0) continue;
    const int rank = peers_.empty() ? peer : peers_[static_cast<std::size_t>(peer)];
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  std::string names;
  for (const int rank : ranks) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  throw Error(ErrorKind::kTimeout,
              std::string("messages with rank(s) ") + names + " are outstanding after " +
                  std::to_string(call.timeout) + " s",
              ranks);
}

}  // namespace mpidp
