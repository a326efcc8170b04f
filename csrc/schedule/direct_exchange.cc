// Direct exchanges: all_gather, broadcast and all_to_all with one message from
// every source to every destination.
//
// Peers are taken in turn: a rank sends to rank+1, rank+2, ... while it
// receives from rank-1, rank-2, ..., so each has one sender and one receiver at
// a time and none is hot.
//
// Cost, for n bytes of the larger buffer: all_gather and all_to_all (P-1) alpha
// + (P-1)/P n beta, the least volume; the messages are independent of each
// other, so they overlap as far as the transport lets them. broadcast: the root
// sends P - 1 messages, (P-1) (alpha + n beta); for few ranks, or where the
// root can send to all at once.
//
// Source: the pairwise exchange of Thakur, Rabenseifner and Gropp,
// "Optimization of collective communication operations in MPICH", Int. J. High
// Perform. Comput. Appl. 19 (2005), on all-to-all.
#include "schedule/builder.h"

namespace mpidp {

void direct_all_gather(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int rank = request.rank;
  const std::int64_t count = request.count;
  builder.copy(input_at(0), output_at(rank * count), count);
  for (int turn = 1; turn < world_size; ++turn) {
    const int to = (rank + turn) % world_size;
    const int from = (rank + world_size - turn) % world_size;
    builder.interleave(
        {send_to(to, input_at(0), count), receive_from(from, output_at(from * count), count)});
  }
}

void direct_broadcast(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const std::int64_t count = request.count;
  if (request.rank != request.root) {
    builder.interleave({receive_from(request.root, output_at(0), count)});
    return;
  }
  std::vector<Message> messages;
  for (int turn = 1; turn < world_size; ++turn) {
    messages.push_back(send_to((request.root + turn) % world_size, input_at(0), count));
  }
  builder.interleave(messages);
  builder.copy(input_at(0), output_at(0), count);
}

void direct_all_to_all(const ScheduleRequest& request, Builder& builder) {
  const int world_size = request.world_size;
  const int rank = request.rank;
  const std::int64_t count = request.count;
  builder.copy(input_at(rank * count), output_at(rank * count), count);
  for (int turn = 1; turn < world_size; ++turn) {
    const int to = (rank + turn) % world_size;
    const int from = (rank + world_size - turn) % world_size;
    builder.interleave({send_to(to, input_at(to * count), count),
                        receive_from(from, output_at(from * count), count)});
  }
}

}  // namespace mpidp
