// The entry of every collective: the ranks meet, and find out whether they mean
// the same call.
//
// Inside a group the meeting is one sync point in shared memory. Between groups
// the leaders (the first rank of each) exchange their fingerprints by
// dissemination: in round k leader g sends to g + 2^k and receives from g -
// 2^k, so that after ceil(log2 G) rounds each has heard, directly or not, from
// all (Hensgen, Finkel, Manber: Two algorithms for barrier synchronization,
// 1988, 3.1). Whoever hears a fingerprint other than its own, or of one that
// did, disagrees; that spreads.

#include <algorithm>
#include <map>
#include <tuple>

#include "common/check_mpi.h"
#include "core/context.h"

namespace mpidp {
namespace {

constexpr int kEntryTag = 1;
constexpr std::uint32_t kStatusDisagree = 4;

struct Verdict {
  std::uint64_t fingerprint = 0;
  std::uint64_t agrees = 1;
};

std::string row_of(const Fingerprint& detail) {
  const auto collective = static_cast<Collective>(detail.collective);
  std::string text = name_of(collective);
  if (collective == Collective::kBarrier) return text;
  text += "  count=" + std::to_string(detail.count) +
          "  dtype=" + name_of(static_cast<DType>(detail.dtype));
  if (collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
      collective == Collective::kReduce) {
    text += std::string("  op=") + name_of(static_cast<Op>(detail.op));
  }
  if (collective == Collective::kBroadcast || collective == Collective::kReduce) {
    text += "  root=" + std::to_string(detail.root);
  }
  text += std::string("  algorithm=") + name_of(static_cast<Algorithm>(detail.algorithm));
  if (detail.deterministic != 0) text += "  deterministic";
  if (static_cast<DeviceKind>(detail.device) == DeviceKind::kCuda) text += "  on a GPU";
  return text;
}

// "0-3, 7"
std::string ranges_of(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace

Fingerprint Context::fingerprint_of(const Call& call) const {
  Fingerprint detail;
  detail.sequence = sequence_;
  detail.count = call.count;
  detail.root = call.root;
  detail.collective = static_cast<std::uint8_t>(call.collective);
  detail.op = static_cast<std::uint8_t>(call.divisor != 1.0 ? Op::kMean : call.op);
  detail.dtype = static_cast<std::uint8_t>(call.dtype);
  detail.device = static_cast<std::uint8_t>(call.device);
  detail.algorithm = static_cast<std::uint8_t>(call.algorithm);
  detail.deterministic = call.deterministic ? 1 : 0;
  return detail;
}

void Context::enter(const Call& call, EntryMessage& message, const Fingerprint& detail) {
  group_->arrive_at_entry(message, detail);
  group_->wait(call.timeout);
  bool agrees = group_->entries_agree();
  if (!single_group()) agrees = groups_agree(agrees, message.fingerprint, call.timeout);
  if (!agrees) throw_mismatch(call, detail);
}

bool Context::groups_agree(bool mine, std::uint64_t fingerprint, double timeout) {
  if (group_->rank() == 0) mine = leaders_agree(mine, fingerprint, timeout);
  if (group_->size() == 1) return mine;
  group_->arrive(mine ? 0 : kStatusDisagree);
  return (group_->wait_status(timeout) & kStatusDisagree) == 0;
}

bool Context::leaders_agree(bool mine, std::uint64_t fingerprint, double timeout) {
  Verdict verdict{fingerprint, mine ? 1U : 0U};
  for (int distance = 1; distance < num_groups_; distance *= 2) {
    const int to = (group_index_ + distance) % num_groups_;
    const int from = (group_index_ - distance + num_groups_) % num_groups_;
    Verdict heard;
    MPI_Request requests[2];
    MPIDP_MPI_CHECK(MPI_Irecv(&heard, sizeof(heard), MPI_BYTE,
                              groups_[static_cast<std::size_t>(from)][0], kEntryTag, comm_,
                              &requests[0]));
    MPIDP_MPI_CHECK(MPI_Isend(&verdict, sizeof(verdict), MPI_BYTE,
                              groups_[static_cast<std::size_t>(to)][0], kEntryTag, comm_,
                              &requests[1]));
    try {
      wait_request(requests[0], timeout, policy_);
      wait_request(requests[1], timeout, policy_);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kTimeout) {
        if (requests[0] != MPI_REQUEST_NULL) {
          MPI_Cancel(&requests[0]);
          MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
        }
        if (requests[1] != MPI_REQUEST_NULL) MPI_Request_free(&requests[1]);
        // Silence in this round means that the sender, or one that it waits
        // for, is missing: those 2^k leaders and their nodes' ranks.
        std::vector<int> suspects;
        for (int back = distance; back < 2 * distance && back < num_groups_; ++back) {
          const int group = (group_index_ - back + num_groups_) % num_groups_;
          const auto& ranks = groups_[static_cast<std::size_t>(group)];
          suspects.insert(suspects.end(), ranks.begin(), ranks.end());
        }
        std::sort(suspects.begin(), suspects.end());
        throw Error(ErrorKind::kTimeout,
                    "at least one of rank(s) " + ranges_of(suspects) + " did not arrive within " +
                        std::to_string(timeout) + " s",
                    suspects);
      }
      throw;
    }
    if (heard.agrees == 0 || heard.fingerprint != fingerprint) verdict.agrees = 0;
  }
  return verdict.agrees != 0;
}

std::vector<Fingerprint> Context::gather_details(const Fingerprint& detail, double timeout) {
  std::vector<Fingerprint> details(static_cast<std::size_t>(world_size_));
  if (single_group()) {
    for (int peer = 0; peer < world_size_; ++peer) {
      details[static_cast<std::size_t>(group_->global_rank(peer))] = group_->detail(peer);
    }
    return details;
  }
  MPI_Request request = MPI_REQUEST_NULL;
  MPIDP_MPI_CHECK(MPI_Iallgather(&detail, sizeof(detail), MPI_BYTE, details.data(), sizeof(detail),
                                 MPI_BYTE, comm_, &request));
  wait_request(request, timeout, policy_);
  return details;
}

void Context::throw_mismatch(const Call& call, const Fingerprint& detail) {
  const std::vector<Fingerprint> details = gather_details(detail, call.timeout);
  group_->recover(call.timeout);
  std::map<std::string, std::vector<int>> rows;
  for (int rank = 0; rank < world_size_; ++rank) {
    rows[row_of(details[static_cast<std::size_t>(rank)])].push_back(rank);
  }
  // The odd ones out are those that differ from the largest group (the first of
  // them, in a tie).
  const auto largest = std::max_element(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return std::make_tuple(a.second.size(), -a.second.front()) <
           std::make_tuple(b.second.size(), -b.second.front());
  });
  std::vector<std::pair<int, std::string>> lines;
  std::vector<int> odd;
  for (const auto& [row, ranks] : rows) {
    lines.emplace_back(ranks.front(), (ranks.size() == 1 ? "\n  rank " : "\n  ranks ") +
                                          ranges_of(ranks) + ": " + row);
    if (&row != &largest->first) odd.insert(odd.end(), ranks.begin(), ranks.end());
  }
  std::sort(lines.begin(), lines.end());
  std::sort(odd.begin(), odd.end());
  std::string text = "the ranks disagree on collective #" + std::to_string(sequence_) + ":";
  for (const auto& line : lines) text += line.second;
  text +=
      "\nMake every rank call the same collective with the same count, "
      "dtype, op and root.";
  throw Error(ErrorKind::kMismatch, text, odd);
}

}  // namespace mpidp
