// Direct reductions: every term goes straight to the rank that sums it, in rank
// order.
//
// The array is P chunks, one per rank. reduce_scatter: every rank sends chunk j
// to rank j, receives the P - 1 other terms of its own chunk into scratch, and
// adds all P in rank order, rank 0 first. all_reduce: then it sends its
// finished chunk to everybody. reduce: then it sends it to the root.
//
// Peers are taken in turn, rank+1, rank+2, ..., so that at any time each rank
// receives from one other and none is hot. Arrays longer than P segments go
// block by block, a block being one segment per rank, so scratch stays at (P-1)
// segments.
//
// The sum of an element is x_0 op x_1 op ... op x_{P-1}, whatever the count,
// the segments and the owner: the canonical order that deterministic=True
// promises. One owner computes it.
//
// Cost: all_reduce 2(P-1) alpha + 2(P-1)/P n beta + (P-1)/P n gamma, as the
// ring, but with only two messages on the longest path: better where messages
// overlap and ranks are few. reduce_scatter: half of the first two terms.
// reduce: P alpha + 2(P-1)/P n beta + (P-1)/P n gamma.
//
// Source: the reduce-scatter is the pairwise exchange of Thakur, Rabenseifner
// and Gropp, "Optimization of collective communication operations in MPICH",
// Int. J. High Perform. Comput. Appl. 19 (2005), on reduce-scatter, with the sum put
// off until all terms are there.
#include "schedule/builder.h"

namespace mpidp {
namespace {

struct Peers {
  explicit Peers(const ScheduleRequest& request)
      : world_size(request.world_size), rank(request.rank) {}
  int to(int turn) const { return (rank + turn) % world_size; }
  int from(int turn) const { return (rank + world_size - turn) % world_size; }
  // The scratch slot of a term: rank order without this rank.
  int slot(int source) const { return source < rank ? source : source - 1; }

  int world_size, rank;
};

// Sends every rank its chunk and reduces this rank's own. `chunk(j)` says where
// chunk j lies in the input. No chunk is longer than a segment.
template <class Chunk>
void reduce_block(const Peers& peers, Builder& builder, Chunk chunk, Place result) {
  const Range own = chunk(peers.rank);
  builder.need_scratch((peers.world_size - 1) * own.count);
  for (int turn = 1; turn < peers.world_size; ++turn) {
    const Range sent = chunk(peers.to(turn));
    const int source = peers.from(turn);
    builder.add(send_to(peers.to(turn), input_at(sent.offset), sent.count));
    builder.add(receive_from(source, scratch_at(peers.slot(source) * own.count), own.count));
  }
  builder.reduce_ordered(peers.rank, input_at(own.offset), result, own.count, own.count);
}

// Calls `block(chunk)` for one block after another of an array of `count`
// elements.
template <class Block>
void for_blocks(const Peers& peers, const Builder& builder, std::int64_t count, Block block) {
  const std::int64_t longest_chunk = chunk_of(count, peers.world_size, 0).count;
  const int num_blocks = builder.num_segments(longest_chunk);
  for (int i = 0; i < num_blocks; ++i) {
    const Range whole = chunk_of(count, num_blocks, i);
    block([&peers, whole](int index) {
      const Range part = chunk_of(whole.count, peers.world_size, index);
      return Range{whole.offset + part.offset, part.count};
    });
  }
}

}  // namespace

void direct_all_reduce(const ScheduleRequest& request, Builder& builder) {
  const Peers peers(request);
  for_blocks(peers, builder, request.count, [&](const auto& chunk) {
    const Range own = chunk(peers.rank);
    reduce_block(peers, builder, chunk, output_at(own.offset));
    for (int turn = 1; turn < peers.world_size; ++turn) {
      const Range received = chunk(peers.from(turn));
      builder.add(send_to(peers.to(turn), output_at(own.offset), own.count));
      builder.add(receive_from(peers.from(turn), output_at(received.offset), received.count));
    }
  });
}

void direct_reduce_scatter(const ScheduleRequest& request, Builder& builder) {
  const Peers peers(request);
  for (int i = 0; i < builder.num_segments(request.count); ++i) {
    const Range segment = builder.segment(request.count, i);
    const auto chunk = [&](int index) {
      return Range{index * request.count + segment.offset, segment.count};
    };
    reduce_block(peers, builder, chunk, output_at(segment.offset));
  }
}

void direct_reduce(const ScheduleRequest& request, Builder& builder) {
  const Peers peers(request);
  const bool is_root = peers.rank == request.root;
  for_blocks(peers, builder, request.count, [&](const auto& chunk) {
    const Range own = chunk(peers.rank);
    // The other ranks have no output: the result lies in scratch, after the
    // terms.
    const Place result =
        is_root ? output_at(own.offset) : scratch_at((peers.world_size - 1) * own.count);
    if (!is_root) builder.need_scratch(peers.world_size * own.count);
    reduce_block(peers, builder, chunk, result);
    if (!is_root) {
      builder.add(send_to(request.root, result, own.count));
      return;
    }
    for (int turn = 1; turn < peers.world_size; ++turn) {
      const Range received = chunk(peers.from(turn));
      builder.add(receive_from(peers.from(turn), output_at(received.offset), received.count));
    }
  });
}

}  // namespace mpidp
