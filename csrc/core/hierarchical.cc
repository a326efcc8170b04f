// all_reduce over several nodes, in the nodes' memory and between them.

#include <algorithm>
#include <utility>
#include <vector>

#include "core/context.h"
#include "reduce/reduce.h"

namespace mpidp {

// Reduce-scatter inside the node, all-reduce of each shard between the nodes by
// its owners, all at once, all-gather inside the node. A link between nodes
// carries n/m from each of the m owners.
void Context::run_hierarchical(const Call& call) {
  const int owners = static_cast<int>(
      std::min_element(groups_.begin(), groups_.end(), [](const auto& a, const auto& b) {
        return a.size() < b.size();
      })->size());
  const std::int64_t granule = 64 / static_cast<std::int64_t>(item_size(call.dtype));
  const std::int64_t shard = ((call.count + owners - 1) / owners + granule - 1) / granule * granule;
  const int local = group_->rank();
  const std::int64_t first = std::min(local * shard, call.count);
  char* my_shard = static_cast<char*>(call.output) + call.bytes_of(first);

  Call phase = call;
  phase.collective = Collective::kReduceScatter;
  phase.count = shard;
  phase.ragged_total = call.count;
  phase.output = my_shard;
  phase.divisor = 1.0;
  direct_->execute_inner(phase, true);

  if (num_groups_ > 1 && first < call.count) {
    if (!shard_executor_) {
      std::vector<int> peers;
      for (const auto& group : groups_) peers.push_back(group[static_cast<std::size_t>(local)]);
      shard_executor_ = std::make_unique<Executor>(*transport_, std::move(peers));
    }
    Call between = call;
    between.input = between.output = my_shard;
    between.count = std::min(shard, call.count - first);
    const std::int64_t nbytes = between.bytes_of(between.count);
    ScheduleRequest request;
    request.algorithm = nbytes <= (8 << 10)     ? Algorithm::kRecursiveDoubling
                        : nbytes <= (256 << 10) ? Algorithm::kRecursiveHalving
                                                : Algorithm::kRing;
    request.world_size = num_groups_;
    request.rank = group_index_;
    request.count = between.count;
    request.segment_count = segment_count(between, num_groups_);
    shard_executor_->run(cached_schedule(request), group_index_, num_groups_, between, policy_);
  } else if (num_groups_ == 1 && call.divisor != 1.0 && first < call.count) {
    const void* source = my_shard;
    void* destination = my_shard;
    ReduceArgs args;
    args.sources = &source;
    args.num_sources = 1;
    args.destinations = &destination;
    args.num_destinations = 1;
    args.count = std::min(shard, call.count - first);
    args.dtype = call.dtype;
    args.divisor = call.divisor;
    reduce(args);
  }

  phase.collective = Collective::kAllGather;
  phase.input = my_shard;
  phase.output = call.output;
  direct_->execute_inner(phase, false);
}

}  // namespace mpidp
