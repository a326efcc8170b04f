// Checks the arguments of a reduction, takes the copies out of it, and hands the rest to the
// kernels of the instruction set in force.
#include <atomic>
#include <cstring>
#include <string>

#include "common/check.h"
#include "reduce/cpu_kernels.h"
#include "reduce/reduce.h"

namespace mpidp {
namespace {

// Best first; the baseline is always there.
const CpuKernels* best_kernels() {
  if (const CpuKernels* kernels = avx512_kernels()) return kernels;
  if (const CpuKernels* kernels = avx2_kernels()) return kernels;
  if (const CpuKernels* kernels = neon_kernels()) return kernels;
  return baseline_kernels();
}

std::atomic<const CpuKernels*>& active_kernels() {
  static std::atomic<const CpuKernels*> active{best_kernels()};
  return active;
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidValue, message);
}

void check(const ReduceArgs& args) {
  if (args.num_sources < 1) refuse("reduce: needs at least one source");
  if (args.num_destinations < 1) refuse("reduce: needs at least one destination");
  if (args.count < 0) {
    refuse("reduce: count must not be negative, got " + std::to_string(args.count));
  }
  const std::string dtype = name_of(args.dtype);
  if (args.op == Op::kMean) {
    refuse("reduce: mean is not a kernel operator; use sum with the number of terms as divisor");
  }
  if (is_complex(args.dtype) && (args.op == Op::kMin || args.op == Op::kMax)) {
    refuse(std::string("reduce: ") + name_of(args.op) + " is not defined for " + dtype +
           ": complex numbers have no order");
  }
  if (!is_floating(args.dtype) && !is_complex(args.dtype)) {
    if (args.scales != nullptr) refuse("reduce: scales need a floating dtype, got " + dtype);
    if (args.divisor != 1.0) refuse("reduce: a divisor needs a floating dtype, got " + dtype);
  }
}

// A single term that nothing is done to. bool is not one: its output is normalised.
bool is_plain_copy(const ReduceArgs& args) {
  return args.num_sources == 1 && args.divisor == 1.0 && args.dtype != DType::kBool &&
         (args.scales == nullptr || args.scales[0] == 1.0);
}

void copy_to_all(const ReduceArgs& args) {
  // With several destinations the source is read from memory once: a piece stays in L1 between
  // one destination and the next.
  constexpr std::int64_t kPieceBytes = 8192;
  const auto* source = static_cast<const unsigned char*>(args.sources[0]);
  const std::int64_t nbytes = args.count * static_cast<std::int64_t>(item_size(args.dtype));
  const std::int64_t piece = args.num_destinations == 1 ? nbytes : kPieceBytes;
  for (std::int64_t begin = 0; begin < nbytes; begin += piece) {
    const std::int64_t length = nbytes - begin < piece ? nbytes - begin : piece;
    for (int d = 0; d < args.num_destinations; ++d) {
      auto* destination = static_cast<unsigned char*>(args.destinations[d]);
      if (destination == source) continue;
      std::memcpy(destination + begin, source + begin, static_cast<std::size_t>(length));
    }
  }
}

}  // namespace

void reduce(const ReduceArgs& args) {
  check(args);
  if (args.count == 0) return;
  if (is_plain_copy(args)) {
    copy_to_all(args);
    return;
  }
  active_kernels().load(std::memory_order_acquire)->reduce(args);
}

void copy_bytes(void* destination, const void* source, std::int64_t nbytes) {
  // An empty range may come with null pointers, which memcpy does not allow.
  if (nbytes <= 0 || destination == source) return;
  std::memcpy(destination, source, static_cast<std::size_t>(nbytes));
}

const char* instruction_set() {
  return active_kernels().load(std::memory_order_acquire)->name;
}

bool set_instruction_set(const char* name) {
  for (const CpuKernels* kernels :
       {baseline_kernels(), avx2_kernels(), avx512_kernels(), neon_kernels()}) {
    if (kernels != nullptr && std::strcmp(kernels->name, name) == 0) {
      active_kernels().store(kernels, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace mpidp
