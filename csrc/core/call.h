// One collective call, resolved: what the layers below the binding work on.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace mpidp {

class DeviceOrder;

struct Call {
  Collective collective = Collective::kBarrier;
  Algorithm algorithm = Algorithm::kAuto;
  Op op = Op::kSum;      // never kMean: see divisor
  double divisor = 1.0;  // world_size for a mean
  DType dtype = DType::kUInt8;
  DeviceKind device = DeviceKind::kCpu;
  bool deterministic = false;
  bool has_scale = false;
  double scale = 1.0;
  int root = 0;
  // Elements, by the meaning of ScheduleRequest::count in schedule/schedule.h.
  std::int64_t count = 0;
  // reduce_scatter and all_gather inside the hierarchical path split an array
  // that world_size need not divide: elements of the whole array, or -1.
  std::int64_t ragged_total = -1;
  const void* input = nullptr;
  void* output = nullptr;  // null on the ranks of `reduce` other than the root
  double timeout = 0.0;    // seconds
  // GPU memory only: the stream that the caller works on, and what orders the collective with it.
  void* stream = nullptr;
  DeviceOrder* order = nullptr;

  std::int64_t bytes_of(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(item_size(dtype));
  }
  std::int64_t input_count(int world_size) const {
    const bool blocks =
        collective == Collective::kReduceScatter || collective == Collective::kAllToAll;
    return blocks ? count * world_size : count;
  }
  std::int64_t output_count(int world_size) const {
    const bool blocks = collective == Collective::kAllGather || collective == Collective::kAllToAll;
    return blocks ? count * world_size : count;
  }
  // How many of `elements` from `first` on of `owner`'s part exist.
  std::int64_t clipped(int owner, std::int64_t first, std::int64_t elements) const {
    if (ragged_total < 0) return elements;
    const std::int64_t left = ragged_total - (owner * count + first);
    return left <= 0 ? 0 : (left < elements ? left : elements);
  }
  // The message size by which algorithms are chosen: the larger of input and
  // output.
  std::int64_t message_bytes(int world_size) const {
    const std::int64_t input_elements = input_count(world_size);
    const std::int64_t output_elements = output_count(world_size);
    return bytes_of(input_elements > output_elements ? input_elements : output_elements);
  }
  bool reduces() const {
    return collective == Collective::kAllReduce || collective == Collective::kReduce ||
           collective == Collective::kReduceScatter;
  }
};

}  // namespace mpidp
