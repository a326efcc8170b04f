// What the algorithm files write their steps with: cutting into segments,
// skipping what is empty.
//
// A message longer than segment_count is cut into segments of equal size (to
// one element), as many as needed for none to be longer, or 2^14. Sender and
// receiver cut by the message's length alone, so both cut alike. A message of
// no elements is no step on either side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/partition.h"
#include "schedule/schedule.h"

namespace mpidp {

struct Place {
  BufferId buffer = BufferId::kInput;
  std::int64_t offset = 0;  // elements
};
constexpr Place operator+(Place place, std::int64_t offset) {
  return Place{place.buffer, place.offset + offset};
}
constexpr Place input_at(std::int64_t offset) { return Place{BufferId::kInput, offset}; }
constexpr Place output_at(std::int64_t offset) { return Place{BufferId::kOutput, offset}; }
constexpr Place scratch_at(std::int64_t offset) { return Place{BufferId::kScratch, offset}; }

// One message as this rank sees it. A sent one has a source, a received one a
// destination, one that is reduced on arrival both.
struct Message {
  StepKind kind = StepKind::kSend;
  int peer = -1;
  Place source;
  Place destination;
  std::int64_t count = 0;
  bool final = false;
  bool received_first = false;
};

inline Message send_to(int peer, Place source, std::int64_t count) {
  return Message{StepKind::kSend, peer, source, {}, count, false, false};
}
inline Message receive_from(int peer, Place destination, std::int64_t count) {
  return Message{StepKind::kReceive, peer, {}, destination, count, false, false};
}
// destination = source op received, the lower rank's operand first.
inline Message reduce_from(int peer, int rank, Place source, Place destination, std::int64_t count,
                           bool final) {
  return Message{StepKind::kReceiveReduce, peer, source, destination, count, final, peer < rank};
}

class Builder {
 public:
  explicit Builder(std::int64_t segment_count) : segment_count_(segment_count) {}

  // Emits the segments of all messages in turns: first segment of each, second
  // of each, and so on. Given as (send, receive, ...) this keeps traffic in
  // both directions in flight, and because every send is beside its round's
  // receive, ranks that wait for each other's sends to be taken always have the
  // receive in sight: no schedule relies on the transport to buffer.
  void interleave(const std::vector<Message>& messages) {
    int most = 0;
    for (const Message& message : messages) most = std::max(most, num_segments(message.count));
    for (int i = 0; i < most; ++i) {
      for (const Message& message : messages) {
        if (i < num_segments(message.count)) emit(message, segment(message.count, i));
      }
    }
  }

  void copy(Place source, Place destination, std::int64_t count) {
    emit(Message{StepKind::kCopy, -1, source, destination, count, false, false}, Range{0, count});
  }

  // One message whole, for those who cut by themselves.
  void add(const Message& message) { emit(message, Range{0, message.count}); }

  // The other ranks' terms lie in scratch from element 0, `stride` apart.
  // `peer` of the step is the rank itself, so that its own term can be put in
  // its place.
  void reduce_ordered(int rank, Place source, Place destination, std::int64_t count,
                      std::int64_t stride) {
    emit(Message{StepKind::kReduceOrdered, rank, source, destination, count, true, false},
         Range{0, count}, stride);
  }

  int num_segments(std::int64_t count) const {
    if (count == 0) return 0;
    if (segment_count_ == 0) return 1;
    return static_cast<int>(
        std::min<std::int64_t>((count - 1) / segment_count_ + 1, kMostSegments));
  }
  Range segment(std::int64_t count, int index) const {
    return chunk_of(count, num_segments(count), index);
  }
  // Elements of the longest segment of a message of `count` elements.
  std::int64_t longest_segment(std::int64_t count) const {
    return count == 0 ? 0 : segment(count, 0).count;
  }

  void need_scratch(std::int64_t count) {
    schedule_.scratch_count = std::max(schedule_.scratch_count, count);
  }
  Schedule take() { return std::move(schedule_); }

 private:
  // Per message. Bounds the list of steps where segments are tiny beside the
  // array.
  static constexpr int kMostSegments = 1 << 14;

  void emit(const Message& message, Range range, std::int64_t stride = 0) {
    if (range.count == 0) return;
    Step step;
    step.kind = message.kind;
    step.source_buffer = message.source.buffer;
    step.destination_buffer = message.destination.buffer;
    step.final = message.final ? 1 : 0;
    step.received_first = message.received_first ? 1 : 0;
    step.peer = message.peer;
    step.source_offset = message.source.offset + range.offset;
    step.destination_offset = message.destination.offset + range.offset;
    step.count = range.count;
    step.stride = stride;
    schedule_.steps.push_back(step);
  }

  std::int64_t segment_count_;
  Schedule schedule_;
};

}  // namespace mpidp
