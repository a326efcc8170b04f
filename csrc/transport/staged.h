// GPU arrays by way of pinned host memory: a few slots, each with room for one segment of the
// input and of the output. Copies to the host, the host's own work and copies to the device of
// neighbouring segments are in flight at the same time, on two streams.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/device_runtime.h"

namespace mpidp {

class StagedSlots {
 public:
  // One is being loaded, one worked on, one stored.
  static constexpr int kSlots = 3;

  // A range of a GPU array, and where in the slot's input or output it goes.
  struct Piece {
    char* device = nullptr;
    std::int64_t offset = 0;  // bytes
    std::int64_t nbytes = 0;
  };

  // Works on the calling thread's device, as do all methods.
  StagedSlots();
  ~StagedSlots();
  StagedSlots(const StagedSlots&) = delete;
  StagedSlots& operator=(const StagedSlots&) = delete;

  // Room in every slot; only while nothing is in flight, or after drain().
  void reserve(std::int64_t input_bytes, std::int64_t output_bytes, double timeout);
  char* input(int slot) const { return slots_[slot].input; }
  char* output(int slot) const { return slots_[slot].output; }

  DeviceStream load_stream() const { return load_stream_; }
  DeviceStream store_stream() const { return store_stream_; }

  // Device to host, once what the slot last held has been stored.
  void load(int slot, const std::vector<Piece>& pieces);
  // Blocks the host until it may read and write the slot.
  void wait_loaded(int slot, double timeout);
  // Host to device, out of the slot's output, or of its input where the host worked in place.
  void store(int slot, bool from_input, const std::vector<Piece>& pieces);
  // Blocks the host until both streams are idle.
  void drain(double timeout);

 private:
  struct Slot {
    char* input = nullptr;
    char* output = nullptr;
    DeviceEvent loaded = nullptr;
    DeviceEvent stored = nullptr;
  };
  void release_memory();

  Slot slots_[kSlots];
  std::int64_t input_bytes_ = 0;
  std::int64_t output_bytes_ = 0;
  DeviceStream load_stream_ = nullptr;
  DeviceStream store_stream_ = nullptr;
};

}  // namespace mpidp
