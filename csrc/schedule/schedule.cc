// The table of algorithms, and the checks before one is asked.
#include "schedule/schedule.h"

#include <string>

#include "common/check.h"
#include "schedule/builder.h"

namespace mpidp {

// One algorithm: emits the steps of request.rank. world_size is at least 2.
using StepsOf = void(const ScheduleRequest& request, Builder& builder);

StepsOf ring_all_reduce, ring_reduce_scatter, ring_all_gather;
StepsOf chain_broadcast, chain_reduce;
StepsOf halving_all_reduce, halving_reduce_scatter;
StepsOf doubling_all_reduce, doubling_all_gather;
StepsOf binomial_broadcast, binomial_reduce;
StepsOf direct_all_reduce, direct_reduce_scatter, direct_reduce;
StepsOf direct_all_gather, direct_broadcast, direct_all_to_all;

namespace {

struct Entry {
  Collective collective;
  Algorithm algorithm;
  StepsOf* steps;
};

constexpr Entry kTable[] = {
    {Collective::kAllReduce, Algorithm::kRing, ring_all_reduce},
    {Collective::kAllReduce, Algorithm::kRecursiveHalving, halving_all_reduce},
    {Collective::kAllReduce, Algorithm::kRecursiveDoubling, doubling_all_reduce},
    {Collective::kAllReduce, Algorithm::kDirect, direct_all_reduce},
    {Collective::kReduceScatter, Algorithm::kRing, ring_reduce_scatter},
    {Collective::kReduceScatter, Algorithm::kRecursiveHalving, halving_reduce_scatter},
    {Collective::kReduceScatter, Algorithm::kDirect, direct_reduce_scatter},
    {Collective::kAllGather, Algorithm::kRing, ring_all_gather},
    {Collective::kAllGather, Algorithm::kRecursiveDoubling, doubling_all_gather},
    {Collective::kAllGather, Algorithm::kDirect, direct_all_gather},
    {Collective::kBroadcast, Algorithm::kRing, chain_broadcast},
    {Collective::kBroadcast, Algorithm::kRecursiveDoubling, binomial_broadcast},
    {Collective::kBroadcast, Algorithm::kDirect, direct_broadcast},
    {Collective::kReduce, Algorithm::kRing, chain_reduce},
    {Collective::kReduce, Algorithm::kRecursiveDoubling, binomial_reduce},
    {Collective::kReduce, Algorithm::kDirect, direct_reduce},
    {Collective::kAllToAll, Algorithm::kDirect, direct_all_to_all},
};

const Entry* find(Collective collective, Algorithm algorithm) {
  for (const Entry& entry : kTable) {
    if (entry.collective == collective && entry.algorithm == algorithm) return &entry;
  }
  return nullptr;
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidValue, "schedule: " + message);
}

void check(const ScheduleRequest& request) {
  if (request.world_size < 1) {
    refuse("world_size must be at least 1, got " + std::to_string(request.world_size));
  }
  const std::string ranks = " must be from 0 to " + std::to_string(request.world_size - 1);
  if (request.rank < 0 || request.rank >= request.world_size) {
    refuse("rank" + ranks + ", got " + std::to_string(request.rank));
  }
  if (request.root < 0 || request.root >= request.world_size) {
    refuse("root" + ranks + ", got " + std::to_string(request.root));
  }
  if (request.count < 0) {
    refuse("count must not be negative, got " + std::to_string(request.count));
  }
  if (request.segment_count < 0) {
    refuse("segment_count must not be negative, got " + std::to_string(request.segment_count));
  }
}

}  // namespace

bool has_schedule(Collective collective, Algorithm algorithm) {
  return find(collective, algorithm) != nullptr;
}

Schedule make_schedule(const ScheduleRequest& request) {
  check(request);
  const Entry* entry = find(request.collective, request.algorithm);
  if (entry == nullptr) {
    refuse(std::string(name_of(request.collective)) + " has no algorithm " +
           name_of(request.algorithm));
  }
  Builder builder(request.segment_count);
  if (request.world_size == 1) {
    builder.copy(input_at(0), output_at(0), request.count);
  } else {
    entry->steps(request, builder);
  }
  return builder.take();
}

}  // namespace mpidp
