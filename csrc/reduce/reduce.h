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

// As copy_bytes, for memory that another core reads next: the stores bypass
// this core's caches, so that the reader does not have to fetch dirty lines out
// of them, nor the writer to claim lines that the reader still holds. The data
// are globally visible on return.
void copy_bytes_streaming(void* destination, const void* source, std::int64_t nbytes);

// "baseline", "avx2", "avx512" or "neon": chosen once, at first use, from what
// the CPU offers.
const char* instruction_set();

// Test hook: forces an instruction set that the CPU and the build have; false
// if they lack it.
bool set_instruction_set(const char* name);

}  // namespace mpidp
