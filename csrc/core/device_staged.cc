// The staged rung: a collective on GPU arrays as a row of collectives on host memory.
//
// The arrays are cut into segments. While the host runs the collective of segment k, segments k + 1
// and k + 2 are copied to the host and the result of k - 1 to the device. Every rank cuts alike, so
// each segment is an ordinary collective of all ranks, with an entry, a deadline and errors of its
// own; reductions keep their order of terms, so the direct algorithm gives the bits that IPC gives.

#include <algorithm>

#include "core/device_path.h"
#include "transport/device_plugin.h"

namespace mpidp {
namespace {

constexpr std::int64_t kSegmentBytes = std::int64_t{4} << 20;
constexpr std::int64_t kAlignBytes = 64;

}  // namespace

// How one call is cut. Counts are elements of a block: of the whole array where there are no
// blocks.
struct DevicePath::Segments {
  Segments(const Call& call, int world_size, bool loads, bool stores, std::int64_t slot_bytes)
      : call(call), loads(loads), stores(stores) {
    input_blocks = call.input_count(world_size) == call.count ? 1 : world_size;
    output_blocks = call.output_count(world_size) == call.count ? 1 : world_size;
    const std::int64_t blocks = std::max(input_blocks, output_blocks);
    const std::int64_t item = call.bytes_of(1);
    const std::int64_t granule = std::max<std::int64_t>(1, kAlignBytes / item);
    segment = std::max<std::int64_t>(granule, slot_bytes / (item * blocks) / granule * granule);
    segment = std::min(segment, call.count);
    count = (call.count + segment - 1) / segment;
  }

  std::int64_t elements(std::int64_t index) const {
    return std::min(segment, call.count - index * segment);
  }
  std::vector<StagedSlots::Piece> pieces(std::int64_t index, const void* array, int blocks) const {
    std::vector<StagedSlots::Piece> found;
    for (int block = 0; block < blocks; ++block) {
      StagedSlots::Piece piece;
      piece.device = static_cast<char*>(const_cast<void*>(array)) +
                     call.bytes_of(block * call.count + index * segment);
      piece.nbytes = call.bytes_of(elements(index));
      piece.offset = block * piece.nbytes;
      found.push_back(piece);
    }
    return found;
  }

  const Call& call;
  bool loads, stores;
  int input_blocks, output_blocks;
  std::int64_t segment;  // elements of a block
  std::int64_t count;    // segments
};

void DevicePath::run_staged(const Call& call, const RunOnHost& run_on_host) {
  const bool is_root = settings_.rank == call.root;
  const bool broadcast = call.collective == Collective::kBroadcast;
  const Segments cut(call, settings_.world_size, !broadcast || is_root,
                     call.output != nullptr && !(broadcast && is_root),
                     settings_.segment_bytes > 0 ? settings_.segment_bytes : kSegmentBytes);
  // With equal blocks on both sides the host works in place, which halves its traffic.
  const bool in_place = cut.input_blocks == 1 && cut.output_blocks == 1;
  if (!slots_) slots_ = std::make_unique<StagedSlots>();
  const std::int64_t block_bytes = call.bytes_of(cut.segment);
  slots_->reserve(block_bytes * cut.input_blocks, in_place ? 0 : block_bytes * cut.output_blocks,
                  call.timeout);

  call.order->start_on(slots_->load_stream());
  call.order->start_on(slots_->store_stream());
  const auto load = [&](std::int64_t index) {
    if (index >= cut.count) return;
    slots_->load(static_cast<int>(index % StagedSlots::kSlots),
                 cut.loads ? cut.pieces(index, call.input, cut.input_blocks)
                           : std::vector<StagedSlots::Piece>{});
  };
  load(0);
  load(1);
  for (std::int64_t index = 0; index < cut.count; ++index) {
    const int slot = static_cast<int>(index % StagedSlots::kSlots);
    slots_->wait_loaded(slot, call.timeout);
    Call segment = call;
    segment.device = DeviceKind::kCpu;
    segment.order = nullptr;
    segment.count = cut.elements(index);
    segment.input = slots_->input(slot);
    segment.output = call.output == nullptr ? nullptr
                     : in_place             ? slots_->input(slot)
                                            : slots_->output(slot);
    run_on_host(segment);
    slots_->store(slot, in_place,
                  cut.stores ? cut.pieces(index, call.output, cut.output_blocks)
                             : std::vector<StagedSlots::Piece>{});
    load(index + 2);
  }
  call.order->finish_on(slots_->store_stream());
}

}  // namespace mpidp
