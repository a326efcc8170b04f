#include "transport/staged.h"

#include <algorithm>

#include "transport/device_plugin.h"

namespace mpidp {
namespace {

const DeviceRuntime& runtime() { return device_runtime(); }

void* allocate_pinned(std::int64_t nbytes) {
  void* pointer = nullptr;
  MPIDP_DEVICE_CHECK(runtime().allocate_pinned(
      &pointer, static_cast<std::size_t>(std::max<std::int64_t>(nbytes, 1))));
  return pointer;
}

}  // namespace

StagedSlots::StagedSlots() {
  MPIDP_DEVICE_CHECK(runtime().create_stream(&load_stream_));
  MPIDP_DEVICE_CHECK(runtime().create_stream(&store_stream_));
  for (Slot& slot : slots_) {
    MPIDP_DEVICE_CHECK(runtime().create_event(&slot.loaded, 0));
    MPIDP_DEVICE_CHECK(runtime().create_event(&slot.stored, 0));
  }
}

StagedSlots::~StagedSlots() {
  release_memory();
  for (Slot& slot : slots_) {
    if (slot.loaded != nullptr) runtime().destroy_event(slot.loaded);
    if (slot.stored != nullptr) runtime().destroy_event(slot.stored);
  }
  if (load_stream_ != nullptr) runtime().destroy_stream(load_stream_);
  if (store_stream_ != nullptr) runtime().destroy_stream(store_stream_);
}

void StagedSlots::release_memory() {
  for (Slot& slot : slots_) {
    if (slot.input != nullptr) runtime().release_pinned(slot.input);
    if (slot.output != nullptr) runtime().release_pinned(slot.output);
    slot.input = slot.output = nullptr;
  }
  input_bytes_ = output_bytes_ = 0;
}

void StagedSlots::reserve(std::int64_t input_bytes, std::int64_t output_bytes, double timeout) {
  if (input_bytes <= input_bytes_ && output_bytes <= output_bytes_) return;
  const std::int64_t input = std::max(input_bytes, input_bytes_);
  const std::int64_t output = std::max(output_bytes, output_bytes_);
  drain(timeout);
  release_memory();
  for (Slot& slot : slots_) {
    slot.input = static_cast<char*>(allocate_pinned(input));
    slot.output = static_cast<char*>(allocate_pinned(output));
  }
  input_bytes_ = input;
  output_bytes_ = output;
}

void StagedSlots::load(int slot, const std::vector<Piece>& pieces) {
  Slot& into = slots_[slot];
  MPIDP_DEVICE_CHECK(runtime().wait_event(load_stream_, into.stored));
  for (const Piece& piece : pieces) {
    MPIDP_DEVICE_CHECK(runtime().copy(into.input + piece.offset, piece.device,
                                      static_cast<std::size_t>(piece.nbytes), load_stream_));
  }
  MPIDP_DEVICE_CHECK(runtime().record_event(into.loaded, load_stream_));
}

void StagedSlots::wait_loaded(int slot, double timeout) {
  wait_for_event(slots_[slot].loaded, timeout, "copying to host memory");
}

void StagedSlots::store(int slot, bool from_input, const std::vector<Piece>& pieces) {
  Slot& from = slots_[slot];
  const char* host = from_input ? from.input : from.output;
  for (const Piece& piece : pieces) {
    MPIDP_DEVICE_CHECK(runtime().copy(piece.device, host + piece.offset,
                                      static_cast<std::size_t>(piece.nbytes), store_stream_));
  }
  MPIDP_DEVICE_CHECK(runtime().record_event(from.stored, store_stream_));
}

void StagedSlots::drain(double timeout) {
  for (Slot& slot : slots_) {
    wait_for_event(slot.loaded, timeout, "copying to host memory");
    wait_for_event(slot.stored, timeout, "copying to the device");
  }
}

}  // namespace mpidp
