// The direct path: collectives of ranks that share a node, through each other's
// memory.
//
// Three ways, by size and kind of memory:
//   one shot   small arrays. Every rank copies its input to its mailbox, all
//   meet once, and every
//              rank works on all the mailboxes: one sync point, P n bytes read
//              by each rank. Registered arrays of some KiB go by zero copy instead, where
//              the second sync point costs less than the copies.
//   zero copy  registered arrays. In all_reduce rank r loads chunk r of all
//   inputs, reduces it in
//              registers and stores it to all outputs: 2n bytes of memory
//              traffic a rank, the lower bound, and safe in place, since a
//              chunk has one owner.
//   staged     plain arrays. Blocks go through staging slots that stay in
//   cache, one sync point a
//              block: while block k is reduced, block k + 1 is staged and block
//              k - 1 copied out.
// Reductions run in rank order on every way, so all give the same bits.
#pragma once

#include <vector>

#include "core/call.h"
#include "transport/node_group.h"

namespace mpidp {

class DirectPath {
 public:
  // What prepare() did before the entry.
  struct Plan {
    bool one_shot = false;
    int staged_set = -1;  // the slots of the first block, or -1 when it is not staged yet
  };

  explicit DirectPath(NodeGroup& group);

  // Before the entry sync point: puts the first data where peers will find it.
  Plan prepare(const Call& call, bool input_registered);
  // After it, when all ranks agree on the call. The arrays are the caller's
  // again on return.
  void execute(const Call& call, const Plan& plan);
  // A phase of a larger collective: reduce_scatter or all_gather, after the
  // entry of the whole. The input is the entry's (peers may read it if it is
  // registered), or memory that only this rank can read.
  void execute_inner(const Call& call, bool input_is_entry_input);

 private:
  struct Block {
    std::int64_t first = 0;
    std::int64_t count = 0;
    int set = 0;  // of slots
  };

  void publish(const Call& call, void* destination, const void* source, std::int64_t count) const;
  void load_scales(const Call& call);
  bool contributes(const Call& call, int peer) const;
  bool any_input_registered(const Call& call) const;
  bool zero_copy_possible(const Call& call) const;
  void zero_copy(const Call& call);
  void staged(const Call& call, int first_set, bool stages);
  void consume_whole(const Call& call);
  std::int64_t block_elements(const Call& call) const;
  Block block_at(const Call& call, std::int64_t first, int set) const;
  void stage(const Call& call, const Block& block);
  void consume(const Call& call, const Block& block);
  void finish(const Call& call, const Block& block);
  const char* staged_source(const Call& call, const Block& block, int peer, std::int64_t offset);
  void reduce_sources(const Call& call, int num_destinations, std::int64_t count);

  NodeGroup& group_;
  // Reused, so that a call allocates nothing.
  std::vector<const char*> inputs_;  // each rank's whole input, where it can be read
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
  std::vector<double> scales_;  // by rank; meaningful if has_scales_
  bool has_scales_ = false;
};

}  // namespace mpidp
