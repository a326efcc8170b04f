// All-gather by recursive doubling, for short arrays: the blocks that a rank
// holds double in every round. A block is one rank's input.
//
// P = 2^L. In round i rank r holds the 2^i blocks of the aligned group of ranks
// that it is in, and exchanges them for those of rank r ^ 2^i's group.
//
// Other P: Bruck's algorithm. Before round i, i = 0, ..., L - 1 with L =
// ceil(log2 P), rank r holds the 2^i blocks r, r+1, ..., r+2^i-1 (mod P). It
// sends them to rank r - 2^i and receives as many from rank r + 2^i, which are
// just the ones that follow its own; in the last round only as many as are
// missing. Blocks are kept at their final places, so a run of blocks that
// passes P - 1 goes on at block 0, as a second message; the local rotation at
// the end of the published form falls away.
//
// Cost: L alpha + (P-1)/P n beta, for n bytes of output; for P that is no power
// of two a rank has one alpha more in the rounds where its run passes P - 1.
//
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
// communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19
// (2005), on allgather; Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient
// algorithms for all-to-all communications in multiport message-passing
// systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997), on concatenation.
#include "schedule/builder.h"

namespace mpidp {
namespace {

// `moved` blocks from block `first` on, cyclically: one or two runs.
std::vector<Range> runs_of(int first, int moved, int world_size, std::int64_t count) {
  const int before_wrap = std::min(moved, world_size - first);
  return {{first * count, before_wrap * count}, {0, (moved - before_wrap) * count}};
}

}  // namespace

void doubling_all_gather(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int rank = request.rank;
  const std::int64_t count = request.count;
  const bool power_of_two = (world_size & (world_size - 1)) == 0;
  builder.copy(input_at(0), output_at(rank * count), count);
  for (int held = 1; held < world_size; held *= 2) {
    const int moved = std::min(held, world_size - held);
    int to = (rank - held + world_size) % world_size;
    int from = (rank + held) % world_size;
    int sent_first = rank;
    int received_first = from;
    if (power_of_two) {
      to = from = rank ^ held;
      sent_first = rank & ~(held - 1);
      received_first = from & ~(held - 1);
    }
    const auto sent = runs_of(sent_first, moved, world_size, count);
    const auto received = runs_of(received_first, moved, world_size, count);
    std::vector<Message> messages;
    for (std::size_t run = 0; run < sent.size(); ++run) {
      const Place source = held == 1 ? input_at(0) : output_at(sent[run].offset);
      messages.push_back(send_to(to, source, sent[run].count));
      messages.push_back(receive_from(from, output_at(received[run].offset), received[run].count));
    }
    builder.interleave(messages);
  }
}

}  // namespace mpidp
