#include "core/direct.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/partition.h"
#include "reduce/reduce.h"

namespace mpidp {
namespace {

constexpr std::int64_t kCacheLineBytes = 64;
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 10;
constexpr std::uint32_t kStatusFailed = 2;

std::int64_t granule_of(const Call& call) {
  return kCacheLineBytes / static_cast<std::int64_t>(item_size(call.dtype));
}

const char* at(const Call& call, const void* base, std::int64_t element) {
  return static_cast<const char*>(base) + call.bytes_of(element);
}

char* at(const Call& call, void* base, std::int64_t element) {
  return static_cast<char*>(base) + call.bytes_of(element);
}

// Reduced by owners first, then copied out by everybody who wants the result.
bool two_phases(const Call& call) {
  return call.collective == Collective::kAllReduce || call.collective == Collective::kReduce;
}

void copy(const Call& call, void* destination, const void* source, std::int64_t count) {
  if (destination != source && count > 0) copy_bytes(destination, source, call.bytes_of(count));
}

}  // namespace

DirectPath::DirectPath(NodeGroup& group)
    : group_(group),
      inputs_(static_cast<std::size_t>(group.size())),
      sources_(static_cast<std::size_t>(group.size())),
      destinations_(static_cast<std::size_t>(group.size())),
      scales_(static_cast<std::size_t>(group.size())) {}

// For what peers read next.
void DirectPath::publish(const Call& call, void* destination, const void* source,
                         std::int64_t count) const {
  if (count > 0) copy_bytes_by(group_.stores(), destination, source, call.bytes_of(count));
}

bool DirectPath::contributes(const Call& call, int peer) const {
  return call.collective != Collective::kBroadcast || peer == call.root;
}

DirectPath::Plan DirectPath::prepare(const Call& call, bool input_registered) {
  Plan plan;
  if (group_.size() == 1 || call.collective == Collective::kBarrier) return plan;
  const std::int64_t input_bytes = call.bytes_of(call.input_count(group_.size()));
  const bool mine_counts = contributes(call, group_.rank());
  if (input_bytes <= group_.one_shot_bytes()) {
    plan.one_shot = true;
    if (input_bytes <= kPayloadBytes && !input_registered) {
      group_.send_with_entry(call.input, mine_counts ? input_bytes : 0);
      return plan;
    }
    // A registered input goes into the mailbox only when it turns out that zero copy cannot be.
    if (mine_counts && !input_registered) {
      copy_bytes_by(group_.stores(), group_.my_mailbox(), call.input, input_bytes);
    }
    return plan;
  }
  if (group_.has_staging()) {
    plan.staged_set = group_.next_set();
    if (mine_counts && !input_registered) stage(call, block_at(call, 0, plan.staged_set));
  }
  return plan;
}

void DirectPath::load_scales(const Call& call) {
  has_scales_ = call.reduces() && group_.has_scales();
  if (!has_scales_) return;
  for (int peer = 0; peer < group_.size(); ++peer) {
    scales_[static_cast<std::size_t>(peer)] = group_.scale(peer);
  }
}

void DirectPath::execute(const Call& call, const Plan& plan) {
  if (call.collective == Collective::kBarrier || call.count == 0) return;
  const int size = group_.size();
  load_scales(call);
  const bool zero_copy_now = size > 1 && zero_copy_possible(call);
  if (size == 1 || (plan.one_shot && !zero_copy_now)) {
    if (size > 1 && any_input_registered(call)) {
      if (contributes(call, group_.rank()) && group_.input_registered(group_.rank())) {
        copy_bytes_by(group_.stores(), group_.my_mailbox_after_entry(), call.input,
                      call.bytes_of(call.input_count(size)));
      }
      group_.sync(call.timeout);
    }
    for (int peer = 0; peer < size; ++peer) {
      inputs_[static_cast<std::size_t>(peer)] =
          peer == group_.rank() ? static_cast<const char*>(call.input) : group_.mailbox(peer);
    }
    consume_whole(call);
    return;
  }
  try {
    bool exit_owed = false;  // peers read this rank's own array, so it must outlast them
    for (int peer = 0; peer < size; ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      exit_owed |= contributes(call, peer) && group_.input_registered(peer);
      inputs_[index] = peer == group_.rank()     ? static_cast<const char*>(call.input)
                       : contributes(call, peer) ? group_.input(peer)
                                                 : nullptr;
    }
    if (zero_copy_now) {
      zero_copy(call);
      group_.sync(call.timeout);
      return;
    }
    const bool my_input_readable = group_.input_registered(group_.rank());
    staged(call, plan.staged_set, contributes(call, group_.rank()) && !my_input_readable);
    if (exit_owed && !two_phases(call)) group_.sync(call.timeout);
  } catch (const Error& error) {
    // A failure of this rank alone, such as a mapping that the kernel refused:
    // tell the others.
    if (error.kind() == ErrorKind::kMpidp) group_.arrive(kStatusFailed);
    throw;
  }
}

void DirectPath::execute_inner(const Call& call, bool input_is_entry_input) {
  if (call.count == 0) return;
  load_scales(call);
  bool exit_owed = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    exit_owed |= input_is_entry_input && group_.input_registered(peer);
    inputs_[index] = peer == group_.rank()  ? static_cast<const char*>(call.input)
                     : input_is_entry_input ? group_.input(peer)
                                            : nullptr;
  }
  const bool my_input_readable = input_is_entry_input && group_.input_registered(group_.rank());
  if (group_.size() == 1) {
    consume_whole(call);
    return;
  }
  staged(call, -1, !my_input_readable);
  if (exit_owed) group_.sync(call.timeout);
}

bool DirectPath::any_input_registered(const Call& call) const {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (contributes(call, peer) && group_.input_registered(peer)) return true;
  }
  return false;
}

// Agreed by all ranks: it looks only at what they said at the entry.
bool DirectPath::zero_copy_possible(const Call& call) const {
  if (call.collective == Collective::kBroadcast) return group_.input_registered(call.root);
  if (!group_.all_inputs_registered()) return false;
  if (call.collective == Collective::kAllReduce) return group_.all_outputs_registered();
  if (call.collective == Collective::kReduce) return group_.output_registered(call.root);
  return true;
}

void DirectPath::zero_copy(const Call& call) {
  const int size = group_.size();
  if (!two_phases(call)) {
    consume_whole(call);
    return;
  }
  const Range mine = chunk_of(call.count, size, group_.rank(), granule_of(call));
  if (mine.count == 0) return;
  for (int peer = 0; peer < size; ++peer) {
    sources_[static_cast<std::size_t>(peer)] =
        at(call, inputs_[static_cast<std::size_t>(peer)], mine.offset);
  }
  int num_destinations = 0;
  for (int peer = 0; peer < size; ++peer) {
    if (call.collective == Collective::kReduce && peer != call.root) continue;
    void* output = peer == group_.rank() ? call.output : group_.output(peer);
    destinations_[static_cast<std::size_t>(num_destinations++)] = at(call, output, mine.offset);
  }
  reduce_sources(call, num_destinations, mine.count);
}

// Every rank's whole input is readable at inputs_.
void DirectPath::consume_whole(const Call& call) {
  const int size = group_.size();
  const int rank = group_.rank();
  switch (call.collective) {
    case Collective::kReduce:
      if (rank != call.root) return;
      [[fallthrough]];
    case Collective::kAllReduce:
    case Collective::kReduceScatter: {
      const std::int64_t offset =
          call.collective == Collective::kReduceScatter ? rank * call.count : 0;
      for (int peer = 0; peer < size; ++peer) {
        sources_[static_cast<std::size_t>(peer)] =
            at(call, inputs_[static_cast<std::size_t>(peer)], offset);
      }
      destinations_[0] = call.output;
      reduce_sources(call, 1, call.clipped(rank, 0, call.count));
      return;
    }
    case Collective::kBroadcast:
      copy(call, call.output, inputs_[static_cast<std::size_t>(call.root)], call.count);
      return;
    case Collective::kAllGather:
    case Collective::kAllToAll:
      for (int i = 0; i < size; ++i) {
        const int peer = (rank + i) % size;  // staggered: each input has one reader at a time
        const std::int64_t offset =
            call.collective == Collective::kAllToAll ? rank * call.count : 0;
        copy(call, at(call, call.output, peer * call.count),
             at(call, inputs_[static_cast<std::size_t>(peer)], offset),
             call.clipped(peer, 0, call.count));
      }
      return;
    case Collective::kBarrier:
      return;
  }
}

void DirectPath::reduce_sources(const Call& call, int num_destinations, std::int64_t count) {
  if (count == 0) return;
  ReduceArgs args;
  args.sources = sources_.data();
  args.num_sources = group_.size();
  args.destinations = destinations_.data();
  args.num_destinations = num_destinations;
  args.count = count;
  args.dtype = call.dtype;
  args.op = call.op;
  args.divisor = call.divisor;
  args.scales = has_scales_ ? scales_.data() : nullptr;
  reduce(args);
}

// all_reduce and reduce: elements of the array, one slot an owner.
// reduce_scatter and all_to_all: elements of one owner's part. all_gather and
// broadcast: elements of the input, over all slots.
std::int64_t DirectPath::block_elements(const Call& call) const {
  const std::int64_t slot = group_.slot_bytes() / static_cast<std::int64_t>(item_size(call.dtype));
  const bool one_slot =
      call.collective == Collective::kReduceScatter || call.collective == Collective::kAllToAll;
  return one_slot ? slot : slot * group_.size();
}

DirectPath::Block DirectPath::block_at(const Call& call, std::int64_t first, int set) const {
  return Block{first, std::min(block_elements(call), call.count - first), set};
}

void DirectPath::staged(const Call& call, int first_set, bool stages) {
  Block block;
  if (first_set < 0) {
    if (!group_.has_staging()) group_.make_staging(call.timeout);
    block = block_at(call, 0, group_.next_set());
    if (stages) stage(call, block);
    group_.sync(call.timeout);
  } else {
    block = block_at(call, 0, first_set);
  }
  Block previous;
  for (;;) {
    // Here every rank has staged `block`, reduced `previous` and copied out the
    // one before.
    consume(call, block);
    if (two_phases(call) && previous.count > 0) finish(call, previous);
    const std::int64_t next_first = block.first + block.count;
    const bool more = next_first < call.count;
    Block next;
    if (more) {
      next = block_at(call, next_first, group_.next_set());
      if (stages) stage(call, next);
    }
    if (more || two_phases(call)) group_.sync(call.timeout);
    previous = block;
    if (!more) break;
    block = next;
  }
  if (two_phases(call)) finish(call, previous);
}

void DirectPath::stage(const Call& call, const Block& block) {
  const int size = group_.size();
  const int rank = group_.rank();
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      for (int owner = 0; owner < size; ++owner) {
        if (owner == rank) continue;
        const Range part = chunk_of(block.count, size, owner, granule_of(call));
        publish(call, group_.slot(rank, block.set, owner),
                at(call, call.input, block.first + part.offset), part.count);
      }
      return;
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      for (int owner = 0; owner < size; ++owner) {
        if (owner == rank) continue;
        publish(call, group_.slot(rank, block.set, owner),
                at(call, call.input, owner * call.count + block.first),
                call.clipped(owner, block.first, block.count));
      }
      return;
    case Collective::kAllGather:
    case Collective::kBroadcast:
      publish(call, group_.slot(rank, block.set, 0), at(call, call.input, block.first),
              call.clipped(rank, block.first, block.count));
      return;
    case Collective::kBarrier:
      return;
  }
}

// Where peer's elements are: in its own array if that can be read (at
// `offset`), else in the slot that it filled for this rank.
const char* DirectPath::staged_source(const Call& call, const Block& block, int peer,
                                      std::int64_t offset) {
  const char* input = inputs_[static_cast<std::size_t>(peer)];
  if (input != nullptr) return at(call, input, offset);
  const bool shared_slot =
      call.collective == Collective::kAllGather || call.collective == Collective::kBroadcast;
  return group_.slot(peer, block.set, shared_slot ? 0 : group_.rank());
}

void DirectPath::consume(const Call& call, const Block& block) {
  const int size = group_.size();
  const int rank = group_.rank();
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: {
      const Range part = chunk_of(block.count, size, rank, granule_of(call));
      if (part.count == 0) return;
      const std::int64_t offset = block.first + part.offset;
      for (int peer = 0; peer < size; ++peer) {
        sources_[static_cast<std::size_t>(peer)] = staged_source(call, block, peer, offset);
      }
      const bool wants_result = call.collective == Collective::kAllReduce || rank == call.root;
      char* result = group_.result_slot(rank, block.set);
      if (!wants_result) {
        destinations_[0] = result;
        reduce_sources(call, 1, part.count);
        return;
      }
      // By pieces, so that what is published is still in the first-level cache.
      const std::int64_t piece = kPieceBytes / static_cast<std::int64_t>(item_size(call.dtype));
      for (std::int64_t done = 0; done < part.count; done += piece) {
        const std::int64_t count = std::min(piece, part.count - done);
        destinations_[0] = at(call, call.output, offset + done);
        reduce_sources(call, 1, count);
        if (call.collective == Collective::kAllReduce) {
          publish(call, at(call, result, done), destinations_[0], count);
        }
        for (const void*& source : sources_) {
          source = static_cast<const char*>(source) + call.bytes_of(count);
        }
      }
      return;
    }
    case Collective::kReduceScatter:
      for (int peer = 0; peer < size; ++peer) {
        sources_[static_cast<std::size_t>(peer)] =
            staged_source(call, block, peer, rank * call.count + block.first);
      }
      destinations_[0] = at(call, call.output, block.first);
      reduce_sources(call, 1, call.clipped(rank, block.first, block.count));
      return;
    case Collective::kAllToAll:
      for (int i = 0; i < size; ++i) {
        const int peer = (rank + i) % size;
        copy(call, at(call, call.output, peer * call.count + block.first),
             staged_source(call, block, peer, rank * call.count + block.first), block.count);
      }
      return;
    case Collective::kAllGather:
      for (int i = 0; i < size; ++i) {
        const int peer = (rank + i) % size;
        copy(call, at(call, call.output, peer * call.count + block.first),
             staged_source(call, block, peer, block.first),
             call.clipped(peer, block.first, block.count));
      }
      return;
    case Collective::kBroadcast:
      if (rank == call.root) return;
      copy(call, at(call, call.output, block.first),
           staged_source(call, block, call.root, block.first), block.count);
      return;
    case Collective::kBarrier:
      return;
  }
}

void DirectPath::finish(const Call& call, const Block& block) {
  if (call.collective == Collective::kReduce && group_.rank() != call.root) return;
  const int size = group_.size();
  for (int i = 1; i < size; ++i) {
    const int owner = (group_.rank() + i) % size;
    const Range part = chunk_of(block.count, size, owner, granule_of(call));
    copy_bytes_from_peer(at(call, call.output, block.first + part.offset),
                         group_.result_slot(owner, block.set), call.bytes_of(part.count));
  }
}

}  // namespace mpidp
