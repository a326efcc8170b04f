// Recursive doubling all-reduce, for short arrays: few rounds, each with the
// whole array.
//
// Let K be the largest power of two up to P, and v the ranks that take part,
// counted 0..K-1. In round i, i = 0, 1, ..., log2 K - 1, v and v ^ 2^i exchange
// their whole partial sums and both add them. After it, each holds the sum of
// its 2^(i+1) neighbours.
//
// P other than K. The first 2(P-K) ranks are pairs. Before the rounds the odd
// rank of each pair sends its array to the even one, which takes part for both;
// after them it gets the result. All others take part for themselves. (Halves
// could be exchanged instead, as recursive_halving does, but the messages here
// are short, and a message costs more than what it carries.)
//
// Both partners of a round add the same two operands, the lower rank's first,
// so all ranks compute the same tree, which is over ranks in order: the bits
// are the same everywhere.
//
// Cost, P = 2^L: L (alpha + n beta + n gamma). Other P: two more messages on
// the path, (floor(log2 P) + 2) (alpha + n beta) + (floor(log2 P) + 1) n gamma.
//
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
// communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19
// (2005), on allreduce.
#include "schedule/builder.h"

namespace mpidp {

void doubling_all_reduce(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int rank = request.rank;
  const std::int64_t count = request.count;
  int members = 1;
  while (members * 2 <= world_size) members *= 2;
  const int pairs = world_size - members;

  const bool paired = rank < 2 * pairs;
  if (paired && rank % 2 == 1) {
    builder.interleave({send_to(rank - 1, input_at(0), count)});
    builder.interleave({receive_from(rank - 1, output_at(0), count)});
    return;
  }

  Place partial = input_at(0);
  if (paired) {
    builder.interleave({reduce_from(rank + 1, rank, partial, output_at(0), count, false)});
    partial = output_at(0);
  }
  const int member = paired ? rank / 2 : rank - pairs;
  for (int mask = 1; mask < members; mask *= 2) {
    const int other = member ^ mask;
    const int peer = other < pairs ? 2 * other : other + pairs;
    const bool last = mask * 2 == members;
    builder.interleave({
        send_to(peer, partial, count),
        reduce_from(peer, rank, partial, output_at(0), count, last),
    });
    partial = output_at(0);
  }
  if (paired) builder.interleave({send_to(rank + 1, output_at(0), count)});
}

}  // namespace mpidp
