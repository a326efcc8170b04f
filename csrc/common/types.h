// The vocabulary every layer shares: element types, operators, collectives,
// algorithms.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mpidp {

enum class DType : std::uint8_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};
inline constexpr int kNumDTypes = 15;

// kMean exists for the caller only: below the Communicator it is kSum with a
// divisor.
enum class Op : std::uint8_t { kSum, kMean, kProd, kMin, kMax };
inline constexpr int kNumOps = 5;

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAllToAll,
  kBarrier,
};
inline constexpr int kNumCollectives = 7;

enum class Algorithm : std::uint8_t {
  kAuto,
  kDirect,
  kRing,
  kRecursiveHalving,
  kRecursiveDoubling,
  kHierarchical,
  kMpi,
};
inline constexpr int kNumAlgorithms = 7;

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

// Bytes of one element.
constexpr std::size_t item_size(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

constexpr bool is_complex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

// The names that Python users see; defined in types.cc. The parse functions
// return -1 for an unknown name.
const char* name_of(DType dtype);
const char* name_of(Op op);
const char* name_of(Collective collective);
const char* name_of(Algorithm algorithm);
int parse_dtype(const char* name);
int parse_op(const char* name);
int parse_collective(const char* name);
int parse_algorithm(const char* name);

}  // namespace mpidp
