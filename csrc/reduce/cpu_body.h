// The kernels, written once over compiler vectors and built once per
// instruction set.
//
// The including file sets MPIDP_KERNELS_NAMESPACE, MPIDP_VECTOR_BYTES and, to
// have float16 converted by the CPU, MPIDP_KERNELS_<NAME>; it opens its target
// pragma first. Nothing here may call an inline function of the standard
// library: the linker could keep this file's copy of it, with this file's
// instructions, for the whole program.
//
// A kernel walks its range in blocks of a few vectors. Each block is
// accumulated in registers over all sources and stored to all destinations, so
// every byte is loaded and stored once. The last, partial vector goes through a
// zero-filled buffer and the same vector operations: no element's result
// depends on where it lies.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "reduce/cpu_elements.h"
#include "reduce/reduce.h"

namespace mpidp {
namespace MPIDP_KERNELS_NAMESPACE {

void reduce(const ReduceArgs& args);

namespace {

// Division by a power of two is exact multiplication by its reciprocal: same
// bits, a tenth of the time.
enum class Finish { kNone, kMultiply, kDivide };

template <class E>
struct Plan {
  const void* const* sources;
  void* const* destinations;
  int num_sources;
  int num_destinations;
  std::int64_t count;
  const double* scales;
  Finish finish;
  typename E::Scalar factor;
};

template <class E>
MPIDP_INLINE const unsigned char* source_at(const Plan<E>& plan, int s, std::int64_t offset) {
  return static_cast<const unsigned char*>(plan.sources[s]) + offset;
}

template <class E>
MPIDP_INLINE unsigned char* destination_at(const Plan<E>& plan, int d, std::int64_t offset) {
  return static_cast<unsigned char*>(plan.destinations[d]) + offset;
}

template <class E>
MPIDP_INLINE typename E::Acc finished(const Plan<E>& plan, typename E::Acc acc) {
  if constexpr (E::kReal) {
    if (plan.finish == Finish::kMultiply) return E::scale(acc, plan.factor);
    if (plan.finish == Finish::kDivide) return E::divide(acc, plan.factor);
  }
  return acc;
}

template <class E, bool kScaled>
MPIDP_INLINE typename E::Acc load_term(const Plan<E>& plan, int s, const unsigned char* from) {
  typename E::Acc term = E::load(from);
  if constexpr (kScaled) {
    term = E::scale(term, static_cast<typename E::Scalar>(plan.scales[s]));
  }
  return term;
}

// kVectors vectors at byte `offset` of every source and destination.
template <class E, class O, int kSources, bool kScaled, int kVectors>
MPIDP_INLINE void reduce_block(const Plan<E>& plan, std::int64_t offset) {
  typename E::Acc acc[kVectors];
  const int num_sources = kSources > 0 ? kSources : plan.num_sources;
  const unsigned char* first = source_at(plan, 0, offset);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    acc[v] = load_term<E, kScaled>(plan, 0, first + v * E::kBytes);
  }
  for (int s = 1; s < num_sources; ++s) {
    const unsigned char* source = source_at(plan, s, offset);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[v] =
          E::template combine<O>(acc[v], load_term<E, kScaled>(plan, s, source + v * E::kBytes));
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) acc[v] = finished<E>(plan, acc[v]);
  for (int d = 0; d < plan.num_destinations; ++d) {
    unsigned char* destination = destination_at(plan, d, offset);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) E::store(destination + v * E::kBytes, acc[v]);
  }
}

template <class E, class O, bool kScaled>
void reduce_partial(const Plan<E>& plan, std::int64_t offset, std::int64_t nbytes) {
  unsigned char buffer[E::kBytes] = {};
  copy_small(buffer, source_at(plan, 0, offset), nbytes);
  typename E::Acc acc = load_term<E, kScaled>(plan, 0, buffer);
  for (int s = 1; s < plan.num_sources; ++s) {
    copy_small(buffer, source_at(plan, s, offset), nbytes);
    acc = E::template combine<O>(acc, load_term<E, kScaled>(plan, s, buffer));
  }
  E::store(buffer, finished<E>(plan, acc));
  for (int d = 0; d < plan.num_destinations; ++d) {
    copy_small(destination_at(plan, d, offset), buffer, nbytes);
  }
}

template <class E, class O, int kSources, bool kScaled>
void reduce_range(const Plan<E>& plan) {
  constexpr std::int64_t kBlockBytes = E::kBytes * E::kVectors;
  const std::int64_t nbytes = plan.count * E::kItemBytes;
  std::int64_t offset = 0;
  for (; nbytes - offset >= kBlockBytes; offset += kBlockBytes) {
    reduce_block<E, O, kSources, kScaled, E::kVectors>(plan, offset);
  }
  for (; nbytes - offset >= E::kBytes; offset += E::kBytes) {
    reduce_block<E, O, kSources, kScaled, 1>(plan, offset);
  }
  if (offset < nbytes) reduce_partial<E, O, kScaled>(plan, offset, nbytes - offset);
}

template <class E, class O>
void reduce_as(const ReduceArgs& args, std::int64_t count) {
  using Scalar = typename E::Scalar;
  Plan<E> plan{args.sources, args.destinations, args.num_sources, args.num_destinations,
               count,        args.scales,       Finish::kNone,    Scalar{1}};
  if constexpr (E::kReal) {
    if (args.divisor != 1.0) {
      plan.factor = static_cast<Scalar>(args.divisor);
      plan.finish = Finish::kDivide;
      if (has_exact_reciprocal(plan.factor)) {
        plan.factor = Scalar{1} / plan.factor;
        plan.finish = Finish::kMultiply;
      }
    }
    if (args.scales != nullptr) return reduce_range<E, O, 0, true>(plan);
  }
  // The ring and the two-process node: the case that decides most benchmarks.
  if (args.num_sources == 2) return reduce_range<E, O, 2, false>(plan);
  reduce_range<E, O, 0, false>(plan);
}

template <class E>
void reduce_floating(const ReduceArgs& args) {
  switch (args.op) {
    case Op::kProd:
      return reduce_as<E, Product>(args, args.count);
    case Op::kMin:
      return reduce_as<E, FloatMin>(args, args.count);
    case Op::kMax:
      return reduce_as<E, FloatMax>(args, args.count);
    default:
      return reduce_as<E, Sum>(args, args.count);
  }
}

// Sums and scales of complex numbers are those of their parts.
template <class Part, class E>
void reduce_complex(const ReduceArgs& args) {
  if (args.op == Op::kProd) return reduce_as<E, Product>(args, args.count);
  reduce_as<Part, Sum>(args, 2 * args.count);
}

// Sums and products wrap, which in two's complement is the same for signed and
// unsigned.
template <class T, class Unsigned>
void reduce_integer(const ReduceArgs& args) {
  switch (args.op) {
    case Op::kProd:
      return reduce_as<Integer<Unsigned>, Product>(args, args.count);
    case Op::kMin:
      return reduce_as<Integer<T>, Min>(args, args.count);
    case Op::kMax:
      return reduce_as<Integer<T>, Max>(args, args.count);
    default:
      return reduce_as<Integer<Unsigned>, Sum>(args, args.count);
  }
}

void reduce_bool(const ReduceArgs& args) {
  if (args.op == Op::kProd || args.op == Op::kMin) return reduce_as<Bool, And>(args, args.count);
  reduce_as<Bool, Or>(args, args.count);
}

}  // namespace

void reduce(const ReduceArgs& args) {
  switch (args.dtype) {
    case DType::kBool:
      return reduce_bool(args);
    case DType::kInt8:
      return reduce_integer<std::int8_t, std::uint8_t>(args);
    case DType::kInt16:
      return reduce_integer<std::int16_t, std::uint16_t>(args);
    case DType::kInt32:
      return reduce_integer<std::int32_t, std::uint32_t>(args);
    case DType::kInt64:
      return reduce_integer<std::int64_t, std::uint64_t>(args);
    case DType::kUInt8:
      return reduce_integer<std::uint8_t, std::uint8_t>(args);
    case DType::kUInt16:
      return reduce_integer<std::uint16_t, std::uint16_t>(args);
    case DType::kUInt32:
      return reduce_integer<std::uint32_t, std::uint32_t>(args);
    case DType::kUInt64:
      return reduce_integer<std::uint64_t, std::uint64_t>(args);
    case DType::kFloat16:
      return reduce_floating<Float16>(args);
    case DType::kBFloat16:
      return reduce_floating<BFloat16>(args);
    case DType::kFloat32:
      return reduce_floating<Floating<float>>(args);
    case DType::kFloat64:
      return reduce_floating<Floating<double>>(args);
    case DType::kComplex64:
      return reduce_complex<Floating<float>, Complex<float>>(args);
    case DType::kComplex128:
      return reduce_complex<Floating<double>, Complex<double>>(args);
  }
}

}  // namespace MPIDP_KERNELS_NAMESPACE
}  // namespace mpidp
