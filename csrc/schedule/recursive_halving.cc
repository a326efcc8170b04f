// Recursive halving: reduce-scatter by halving the array and all-gather by
// doubling it again.
//
// Let K be the largest power of two up to P, and call the K parties that take
// part members.
//
// Reduce-scatter, log2 K rounds. Before a round a member has partial sums of a
// range that it shares with others. It keeps one half, sends the other to a
// partner that keeps that one, and adds what the partner sends. Afterwards
// every member has the complete sum of 1/K of the array. All-gather, the same
// rounds backwards: partners exchange all that they have finished.
//
// all_reduce goes from near partners (v ^ 1) to far (v ^ K/2): the longest
// messages stay between neighbours, likely of one node. reduce_scatter goes
// from far to near, which leaves the parts in the order of the ranks.
//
// P other than K. The first 2(P-K) ranks are pairs, each one member. A pair
// first exchanges halves, such that the even rank has the pair's sum of the
// first half and the odd rank of the second. In the first round a member needs
// only the half that it keeps: the rank that has it goes on for the pair (the
// keeper), while the other sends its half straight to the partner and is done.
// All-gather mirrors it: the partner's half goes straight to the rank that was
// done, then the pair exchanges halves. So a pair costs one round more each
// way, of half the array; sending the whole array to the keeper and back would
// cost twice that, and as much again in additions.
//
// Each part is reduced by one owner, with the lower rank's operand first, and
// then only copied: all ranks hold the same bits.
//
// Cost of all_reduce, P = 2^L: 2 L alpha + 2(P-1)/P n beta + (P-1)/P n gamma.
// Other P: (2 log2 K + 2) alpha + (2(K-1)/K + 1) n beta + ((K-1)/K + 1/2) n
// gamma. reduce_scatter, n bytes of input, P = 2^L: L alpha + (P-1)/P n (beta +
// gamma). Other P: (log2 K + 2) alpha, and up to twice the volume: the ranks of
// pairs deal with the larger half.
//
// Source: Rabenseifner, "Optimization of collective reduction operations", ICCS
// 2004, on halving and doubling; pairs that share the work: Rabenseifner and Traeff, "More
// efficient reduction algorithms for non-power-of-two number of processors in
// message-passing parallel systems", EuroPVM/MPI 2004.
#include "schedule/builder.h"

namespace mpidp {
namespace {

// A range of members' parts, [first, last).
struct Parts {
  int first = 0;
  int last = 0;
  Parts half(bool upper) const {
    const int middle = first + (last - first) / 2;
    return upper ? Parts{middle, last} : Parts{first, middle};
  }
};

struct Members {
  Members(const ScheduleRequest& request, bool near_first) : rank(request.rank) {
    while (size * 2 <= request.world_size) size *= 2;
    pairs = request.world_size - size;
    paired = rank < 2 * pairs;
    member = paired ? rank / 2 : rank - pairs;
    for (int mask = 1; mask < size; mask *= 2) masks.push_back(mask);
    if (!near_first) std::reverse(masks.begin(), masks.end());
  }
  // Which half of its range member v keeps in a round.
  bool keeps_upper(int v, std::size_t round) const { return (v & masks[round]) != 0; }
  int first_rank_of(int v) const { return v < pairs ? 2 * v : v + pairs; }
  // The rank that has the lower or upper half of member v's sums when the first
  // round begins.
  int holder(int v, bool upper) const {
    return v < pairs ? 2 * v + (upper ? 1 : 0) : first_rank_of(v);
  }
  int keeper(int v) const { return holder(v, keeps_upper(v, 0)); }
  int mate() const { return rank ^ 1; }
  bool holds_upper() const { return rank % 2 == 1; }  // of a pair

  int rank;
  int size = 1;   // K
  int pairs = 0;  // P - K
  bool paired = false;
  int member = 0;
  std::vector<int> masks;  // by round
};

// The reduce-scatter rounds. `range_of(parts)` says which elements some parts
// are, `partial(parts)` where sums of them are kept, `result(parts)` where the
// complete sums go.
template <class RangeOf, class Partial, class Result>
void reduce_phase(const Members& members, Builder& builder, RangeOf range_of, Partial partial,
                  Result result) {
  const int rank = members.rank;
  Parts parts{0, members.size};
  bool fresh = true;  // no sums yet, only the input
  const auto source = [&](Parts of) { return fresh ? input_at(range_of(of).offset) : partial(of); };
  const auto send = [&](int peer, Parts of) {
    return send_to(peer, source(of), range_of(of).count);
  };
  const auto add = [&](int peer, Parts of, bool final) {
    const Place destination = final ? result(of) : partial(of);
    return reduce_from(peer, rank, source(of), destination, range_of(of).count, final);
  };
  if (members.paired) {
    const bool upper = members.holds_upper();
    builder.interleave(
        {send(members.mate(), parts.half(!upper)), add(members.mate(), parts.half(upper), false)});
    fresh = false;
  }
  for (std::size_t round = 0; round < members.masks.size(); ++round) {
    const int partner = members.member ^ members.masks[round];
    const bool last = round + 1 == members.masks.size();
    const bool kept = members.keeps_upper(members.member, round);
    std::vector<Message> messages;
    if (round == 0) {
      // A rank of a pair has one of the halves only: the one to send, or the
      // one to keep.
      const bool has_sent = !members.paired || members.holds_upper() != kept;
      const bool has_kept = !members.paired || members.holds_upper() == kept;
      if (has_sent) messages.push_back(send(members.holder(partner, !kept), parts.half(!kept)));
      if (has_kept) messages.push_back(add(members.holder(partner, kept), parts.half(kept), last));
      builder.interleave(messages);
      if (!has_kept) return;
    } else {
      const int peer = members.keeper(partner);
      builder.interleave({send(peer, parts.half(!kept)), add(peer, parts.half(kept), last)});
    }
    fresh = false;
    parts = parts.half(kept);
  }
}

}  // namespace

void halving_all_reduce(const ScheduleRequest& request, Builder& builder) {
  const Members members(request, true);
  const auto range_of = [&](Parts parts) {
    const std::int64_t begin = chunk_of(request.count, members.size, parts.first).offset;
    const Range last = chunk_of(request.count, members.size, parts.last - 1);
    return Range{begin, last.offset + last.count - begin};
  };
  const auto send = [&](int peer, Parts parts) {
    const Range range = range_of(parts);
    return send_to(peer, output_at(range.offset), range.count);
  };
  const auto receive = [&](int peer, Parts parts) {
    const Range range = range_of(parts);
    return receive_from(peer, output_at(range.offset), range.count);
  };

  const auto place = [&](Parts parts) { return output_at(range_of(parts).offset); };
  reduce_phase(members, builder, range_of, place, place);

  // The parts that this rank's member shared before each round, whether or not
  // it took part.
  std::vector<Parts> before{{0, members.size}};
  for (std::size_t round = 0; round < members.masks.size(); ++round) {
    before.push_back(before[round].half(members.keeps_upper(members.member, round)));
  }
  const bool is_keeper = members.rank == members.keeper(members.member);
  if (is_keeper) {
    for (std::size_t round = members.masks.size() - 1; round > 0; --round) {
      const int peer = members.keeper(members.member ^ members.masks[round]);
      const bool kept = members.keeps_upper(members.member, round);
      builder.interleave(
          {send(peer, before[round].half(kept)), receive(peer, before[round].half(!kept))});
    }
  }
  // The first round backwards: a member's finished half goes to whoever of the
  // partner lacks it.
  const int partner = members.member ^ members.masks[0];
  const bool kept = members.keeps_upper(members.member, 0);
  std::vector<Message> messages;
  if (is_keeper) messages.push_back(send(members.holder(partner, kept), before[0].half(kept)));
  if (!members.paired || !is_keeper) {
    messages.push_back(receive(members.keeper(partner), before[0].half(!kept)));
  }
  builder.interleave(messages);
  if (members.paired) {
    builder.interleave({send(members.mate(), before[0].half(members.holds_upper())),
                        receive(members.mate(), before[0].half(!members.holds_upper()))});
  }
}

void halving_reduce_scatter(const ScheduleRequest& request, Builder& builder) {
  const Members members(request, false);
  const int rank = members.rank;
  const std::int64_t count = request.count;
  const auto range_of = [&](Parts parts) {
    const int begin = members.first_rank_of(parts.first);
    return Range{begin * count, (members.first_rank_of(parts.last) - begin) * count};
  };
  // Sums of chunks of other ranks have no room in the output: scratch takes the
  // half of the array that this rank deals with from the first round on. The
  // complete sum of a rank without a mate is its own chunk alone, which goes
  // into the output.
  const bool upper =
      members.paired ? members.holds_upper() : members.keeps_upper(members.member, 0);
  const Range dealt_with = range_of(Parts{0, members.size}.half(upper));
  if (members.paired || members.size > 2) builder.need_scratch(dealt_with.count);
  const auto partial = [&](Parts parts) {
    return scratch_at(range_of(parts).offset - dealt_with.offset);
  };
  const auto result = [&](Parts parts) { return members.paired ? partial(parts) : output_at(0); };
  reduce_phase(members, builder, range_of, partial, result);

  if (!members.paired) return;
  if (rank == members.keeper(members.member)) {
    const auto sum_of = [&](int of) { return scratch_at(of * count - dealt_with.offset); };
    builder.interleave({send_to(members.mate(), sum_of(members.mate()), count)});
    builder.copy(sum_of(rank), output_at(0), count);
  } else {
    builder.interleave({receive_from(members.mate(), output_at(0), count)});
  }
}

}  // namespace mpidp
