// Chain: the ring's broadcast and reduce, for long arrays. Registered as
// "ring": like the ring it sends to rank + 1 and receives from rank - 1 only,
// with the link into (broadcast) or out of (reduce) the root left unused.
//
// The array travels as S segments. Broadcast: root, root+1, ..., root-1, every
// rank passing on a segment while it receives the next. Reduce: the other way
// about, root+1, root+2, ..., root, every rank adding its own term to a segment
// before it passes it on.
//
// Cost, for n bytes in segments of n/S: broadcast (P-2+S) (alpha + n/S beta),
// reduce the same with n/S gamma in the bracket. With S much larger than P it
// nears n beta, the least that any broadcast or reduce can take; with S = 1 it
// is the slowest of all, so callers give segment_count.
//
// A segment's terms are added along the one chain; no second rank computes the
// result.
//
// Source: van de Geijn and Watts, "SUMMA: scalable universal matrix
// multiplication algorithm", Concurrency: Pract. Exper. 9 (1997), which
// broadcasts and sums along rings, in segments.
#include "schedule/builder.h"

namespace mpidp {

void chain_broadcast(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int next = (request.rank + 1) % world_size;
  const int previous = (request.rank + world_size - 1) % world_size;
  const std::int64_t count = request.count;
  if (request.rank == request.root) {
    builder.interleave({send_to(next, input_at(0), count)});
    builder.copy(input_at(0), output_at(0), count);
  } else if (next == request.root) {
    builder.interleave({receive_from(previous, output_at(0), count)});
  } else {
    builder.interleave(
        {receive_from(previous, output_at(0), count), send_to(next, output_at(0), count)});
  }
}

void chain_reduce(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int next = (request.rank + 1) % world_size;
  const int previous = (request.rank + world_size - 1) % world_size;
  const std::int64_t count = request.count;
  if (request.rank == request.root) {
    builder.interleave(
        {reduce_from(previous, request.rank, input_at(0), output_at(0), count, true)});
    return;
  }
  if (previous == request.root) {
    builder.interleave({send_to(next, input_at(0), count)});
    return;
  }
  // A partial sum is needed only until it is sent, so a few slots of scratch,
  // used in turn, do: they stay in cache, and their number is how many segments
  // can be in flight.
  constexpr int kSlots = 8;
  const int num_segments = builder.num_segments(count);
  const std::int64_t slot_count = builder.longest_segment(count);
  builder.need_scratch(slot_count * std::min(kSlots, num_segments));
  for (int i = 0; i < num_segments; ++i) {
    const Range segment = builder.segment(count, i);
    const Place slot = scratch_at(slot_count * (i % kSlots));
    builder.add(
        reduce_from(previous, request.rank, input_at(segment.offset), slot, segment.count, false));
    builder.add(send_to(next, slot, segment.count));
  }
}

}  // namespace mpidp
