// Algorithms as data: what one rank sends, receives and reduces, in order.
// Pure; no MPI, no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"

namespace mpidp {

// The arrays a step can name. For an in-place call kInput and kOutput are the
// same memory, and every schedule is right in that case too.
enum class BufferId : std::uint8_t { kInput, kOutput, kScratch };

enum class StepKind : std::uint8_t {
  kSend,           // send source to peer
  kReceive,        // receive from peer into destination
  kReceiveReduce,  // receive from peer, then destination = received op source
                   // (or source op received where received_first is 0)
  kReduceOrdered,  // destination = x_0 op ... op x_{P-1}, in rank order; x_rank
                   // is source, the others lie in kScratch, `stride` elements
                   // apart, in rank order without rank
  kCopy,           // destination = source
};

// A step means what it would mean if all steps of the rank ran one after
// another, with sends buffered. The executor overlaps steps whose ranges do not
// conflict. The k-th send from a to b matches the k-th receive at b from a, in
// this order.
struct Step {
  StepKind kind = StepKind::kCopy;
  BufferId source_buffer = BufferId::kInput;
  BufferId destination_buffer = BufferId::kOutput;
  std::uint8_t final = 0;           // 1: this reduction completes its range; mean divides here
  std::uint8_t received_first = 0;  // operand order of kReceiveReduce
  std::int32_t peer = -1;           // rank, for sends and receives; kReduceOrdered: the rank itself
  std::int64_t source_offset = 0;   // elements
  std::int64_t destination_offset = 0;  // elements
  std::int64_t count = 0;               // elements; never 0
  std::int64_t stride = 0;              // kReduceOrdered only, elements
};

struct Schedule {
  std::vector<Step> steps;
  std::int64_t scratch_count = 0;  // elements of kScratch
};

struct ScheduleRequest {
  Collective collective = Collective::kAllReduce;
  Algorithm algorithm = Algorithm::kRing;
  int world_size = 1;
  int rank = 0;
  int root = 0;
  // Elements. all_reduce, broadcast, reduce: of the array. all_gather: of one
  // rank's input (the output has world_size times as many). reduce_scatter: of
  // one rank's output. all_to_all: of one block (input and output have
  // world_size blocks).
  std::int64_t count = 0;
  // Elements of a pipelined segment; messages longer than this are cut. 0 means
  // uncut.
  std::int64_t segment_count = 0;
};

// Throws Error(kInvalidValue) where the collective has no such algorithm. kMpi,
// kHierarchical and kAuto are not schedules. kBarrier has none: the entry
// exchange is the barrier.
Schedule make_schedule(const ScheduleRequest& request);

// Whether make_schedule has this pair.
bool has_schedule(Collective collective, Algorithm algorithm);

}  // namespace mpidp
