// Multi-source reduction: the arithmetic of every collective, on host memory.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace mpidp {

// destinations[d][i] = round((scales[0]*sources[0][i]) op
// (scales[1]*sources[1][i]) op ...) / divisor
//
// Terms are combined strictly from source 0 upwards, element by element, so the
// bits do not depend on count, alignment, blocking or the instruction set.
// float16 and bfloat16 accumulate in float32 and round once, at the store; the
// division comes before that rounding. No contraction to FMA. min and max
// propagate NaN. bool: sum and max are OR, prod and min are AND.
//
// A destination may equal a source exactly; otherwise they must not overlap.
// Pointers need only the alignment of a byte. num_sources >= 1,
// num_destinations >= 1. op is never kMean.
struct ReduceArgs {
  const void* const* sources = nullptr;
  int num_sources = 0;
  void* const* destinations = nullptr;
  int num_destinations = 0;
  std::int64_t count = 0;  // elements
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  const double* scales = nullptr;  // one per source, or null for none; floating and complex only
  double divisor = 1.0;            // 1 means none; floating and complex only
};

void reduce(const ReduceArgs& args);

// Copies nbytes; the streaming copy of the staged paths. Non-overlapping.
void copy_bytes(void* destination, const void* source, std::int64_t nbytes);

// How memory that another core reads next is written. Which is fastest depends on how the cores'
// caches are joined, by a factor of two either way, so it is measured (NodeGroup::choose_stores).
enum class Stores : std::uint8_t {
  // Past this core's caches: the reader need not fetch dirty lines out of them, nor the writer
  // claim lines that the reader still holds.
  kStreaming,
  kLoop,     // as copy_bytes
  kLibrary,  // the C library's memcpy
};
inline constexpr int kNumStores = 3;
const char* name_of(Stores stores);
int parse_stores(const char* name);  // -1 for an unknown name

// As copy_bytes, by the given stores. A flag stored afterwards is seen after the data.
void copy_bytes_by(Stores stores, void* destination, const void* source, std::int64_t nbytes);

// As copy_bytes, for what another core has just written: from several places at once, so that
// several streams of the hardware prefetcher are at work.
void copy_bytes_from_peer(void* destination, const void* source, std::int64_t nbytes);

// "baseline", "avx2", "avx512" or "neon": chosen once, at first use, from what
// the CPU offers.
const char* instruction_set();

// Test hook: forces an instruction set that the CPU and the build have; false
// if they lack it.
bool set_instruction_set(const char* name);

}  // namespace mpidp
