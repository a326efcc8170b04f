// Bruck's all-gather, for short arrays and any number of ranks. Registered as
// "recursive_doubling": the blocks that a rank holds double in every round.
//
// A block is one rank's input. Before round i, i = 0, 1, ..., ceil(log2 P) - 1, rank r holds the
// 2^i blocks r, r+1, ..., r+2^i-1 (mod P). It sends them to rank r - 2^i and receives as many from
// rank r + 2^i, which are just the ones that follow its own; in the last round only as many as are
// missing. Blocks are kept at their final places, so a run of blocks that passes P - 1 goes on at
// block 0, as a second message; the local rotation at the end of the published form falls away.
//
// Cost: ceil(log2 P) alpha + (P-1)/P n beta, for n bytes of output.
//
// Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
// communications in multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8
// (1997), section 4.
#include "schedule/builder.h"

namespace mpidp {

void bruck_all_gather(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int rank = request.rank;
  const std::int64_t count = request.count;
  builder.copy(input_at(0), output_at(rank * count), count);
  for (int held = 1; held < world_size; held *= 2) {
    const int moved = std::min(held, world_size - held);
    const int to = (rank - held + world_size) % world_size;
    const int from = (rank + held) % world_size;
    // The run of `moved` blocks from `first` on, as one or two pieces.
    const auto piece = [&](int first, bool second) {
      const int before_wrap = std::min(moved, world_size - first);
      return second ? Range{0, (moved - before_wrap) * count}
                    : Range{first * count, before_wrap * count};
    };
    std::vector<Message> messages;
    for (const bool second : {false, true}) {
      const Range sent = piece(rank, second);
      const Range received = piece(from, second);
      const Place source = held == 1 ? input_at(0) : output_at(sent.offset);
      messages.push_back(send_to(to, source, sent.count));
      messages.push_back(receive_from(from, output_at(received.offset), received.count));
    }
    builder.interleave(messages);
  }
}

}  // namespace mpidp
