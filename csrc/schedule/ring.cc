// Ring: every rank sends to rank + 1 and receives from rank - 1, and to nobody
// else.
//
// The array is P chunks (P = world_size), one per rank. A chunk longer than a
// segment travels as several segments, so that one is on the wire while another
// is reduced.
//
// Phase 1, reduce-scatter, P - 1 rounds. In round t rank r sends chunk r-t-1
// and receives chunk r-t-2 (mod P), to which it adds its own term. So chunk c
// starts at rank c+1, collects a term at every hop, and is complete when it
// reaches rank c. Phase 2, all-gather, P - 1 rounds. In round t rank r passes
// on chunk r-t and receives chunk r-t-1, finished.
//
// Each chunk is summed along one chain, c+1, c+2, ..., c, and then only copied:
// all ranks hold the same bits. Cost, for n bytes: all-reduce 2(P-1) alpha +
// 2(P-1)/P n beta + (P-1)/P n gamma; each phase alone has half of the first two
// terms. The volume is the lower bound of any all-reduce.
//
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
// clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).
#include "schedule/builder.h"

namespace mpidp {
namespace {

struct Ring {
  explicit Ring(const ScheduleRequest& request)
      : world_size(request.world_size),
        rank(request.rank),
        next(wrap(rank + 1)),
        previous(wrap(rank - 1)) {}
  int wrap(int index) const { return (index + world_size) % world_size; }

  int world_size, rank, next, previous;
};

// `chunk(c)` says where chunk c lies in the whole array. It is already finished
// at this rank.
template <class Chunk>
void gather_phase(const Ring& ring, Builder& builder, Chunk chunk, Place own) {
  for (int t = 0; t < ring.world_size - 1; ++t) {
    const Range sent = chunk(ring.wrap(ring.rank - t));
    const Range received = chunk(ring.wrap(ring.rank - t - 1));
    builder.interleave({
        send_to(ring.next, t == 0 ? own : output_at(sent.offset), sent.count),
        receive_from(ring.previous, output_at(received.offset), received.count),
    });
  }
}

// `partial(t)` says where the sum that round t makes is kept.
template <class Chunk, class Partial>
void reduce_phase(const Ring& ring, Builder& builder, Chunk chunk, Partial partial) {
  for (int t = 0; t < ring.world_size - 1; ++t) {
    const Range sent = chunk(ring.wrap(ring.rank - t - 1));
    const Range received = chunk(ring.wrap(ring.rank - t - 2 + ring.world_size));
    const bool last = t == ring.world_size - 2;
    builder.interleave({
        send_to(ring.next, t == 0 ? input_at(sent.offset) : partial(t - 1, sent), sent.count),
        reduce_from(ring.previous, ring.rank, input_at(received.offset), partial(t, received),
                    received.count, last),
    });
  }
}

}  // namespace

void ring_all_reduce(const ScheduleRequest& request, Builder& builder) {
  const Ring ring(request);
  const auto chunk = [&](int index) { return chunk_of(request.count, ring.world_size, index); };
  reduce_phase(ring, builder, chunk, [](int, Range range) { return output_at(range.offset); });
  gather_phase(ring, builder, chunk, output_at(chunk(ring.rank).offset));
}

void ring_reduce_scatter(const ScheduleRequest& request, Builder& builder) {
  const Ring ring(request);
  const auto chunk = [&](int index) { return Range{index * request.count, request.count}; };
  // A partial sum lives for one round. The rounds use the output and one chunk
  // of scratch in turn, such that the last one's is the output.
  const int last = ring.world_size - 2;
  if (last > 0) builder.need_scratch(request.count);
  reduce_phase(ring, builder, chunk, [last](int round, Range) {
    return (last - round) % 2 == 0 ? output_at(0) : scratch_at(0);
  });
}

void ring_all_gather(const ScheduleRequest& request, Builder& builder) {
  const Ring ring(request);
  const auto chunk = [&](int index) { return Range{index * request.count, request.count}; };
  builder.copy(input_at(0), output_at(chunk(ring.rank).offset), request.count);
  gather_phase(ring, builder, chunk, input_at(0));
}

}  // namespace mpidp
