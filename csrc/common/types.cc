#include "common/types.h"

#include <cstring>

namespace mpidp {
namespace {

constexpr const char* kDTypeNames[kNumDTypes] = {
    "bool",   "int8",    "int16",    "int32",   "int64",   "uint8",     "uint16",     "uint32",
    "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
};
constexpr const char* kOpNames[kNumOps] = {"sum", "mean", "prod", "min", "max"};
constexpr const char* kCollectiveNames[kNumCollectives] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier",
};
constexpr const char* kAlgorithmNames[kNumAlgorithms] = {
    "auto", "direct", "ring", "recursive_halving", "recursive_doubling", "hierarchical", "mpi",
};

template <int N>
int find(const char* const (&names)[N], const char* name) {
  for (int i = 0; i < N; ++i) {
    if (std::strcmp(names[i], name) == 0) return i;
  }
  return -1;
}

}  // namespace

const char* name_of(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
const char* name_of(Op op) { return kOpNames[static_cast<int>(op)]; }
const char* name_of(Collective collective) {
  return kCollectiveNames[static_cast<int>(collective)];
}
const char* name_of(Algorithm algorithm) { return kAlgorithmNames[static_cast<int>(algorithm)]; }

int parse_dtype(const char* name) { return find(kDTypeNames, name); }
int parse_op(const char* name) { return find(kOpNames, name); }
int parse_collective(const char* name) { return find(kCollectiveNames, name); }
int parse_algorithm(const char* name) { return find(kAlgorithmNames, name); }

}  // namespace mpidp
