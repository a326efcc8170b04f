// Checks the arguments of a reduction, takes the copies out of it, and hands
// the rest to the kernels of the instruction set in force.
#include <atomic>
#include <cstring>
#include <string>

#include "common/check.h"
#include "reduce/cpu_kernels.h"
#include "reduce/reduce.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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
    refuse(
        "reduce: mean is not a kernel operator; use sum with the number of "
        "terms as divisor");
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

// A single term that nothing is done to. bool is not one: its output is
// normalised.
bool is_plain_copy(const ReduceArgs& args) {
  return args.num_sources == 1 && args.divisor == 1.0 && args.dtype != DType::kBool &&
         (args.scales == nullptr || args.scales[0] == 1.0);
}

void copy_to_all(const ReduceArgs& args) {
  // With several destinations the source is read from memory once: a piece
  // stays in L1 between one destination and the next.
  constexpr std::int64_t kPieceBytes = 8192;
  const auto* source = static_cast<const unsigned char*>(args.sources[0]);
  const std::int64_t nbytes = args.count * static_cast<std::int64_t>(item_size(args.dtype));
  const std::int64_t piece = args.num_destinations == 1 ? nbytes : kPieceBytes;
  for (std::int64_t begin = 0; begin < nbytes; begin += piece) {
    const std::int64_t length = nbytes - begin < piece ? nbytes - begin : piece;
    for (int d = 0; d < args.num_destinations; ++d) {
      auto* destination = static_cast<unsigned char*>(args.destinations[d]);
      if (destination == source) continue;
      copy_bytes(destination + begin, source + begin, length);
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

#if defined(__SSE2__)
namespace {

constexpr std::int64_t kLine = 64;

// Whole lines of [from, from + nbytes) to `to`; returns the bytes that it
// copied.
template <bool streaming>
std::int64_t copy_lines(char* to, const char* from, std::int64_t nbytes) {
  std::int64_t at = 0;
  for (; at + kLine <= nbytes; at += kLine) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i) {
      line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
    }
    for (int i = 0; i < 4; ++i) {
      auto* target = reinterpret_cast<__m128i*>(to + at) + i;
      if constexpr (streaming) {
        _mm_stream_si128(target, line[i]);
      } else {
        _mm_storeu_si128(target, line[i]);
      }
    }
  }
  return at;
}

}  // namespace
#endif

void copy_bytes(void* destination, const void* source, std::int64_t nbytes) {
  // An empty range may come with null pointers, which memcpy does not allow.
  if (nbytes <= 0 || destination == source) return;
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  std::int64_t done = 0;
#if defined(__SSE2__)
  // Not memcpy: the C library uses "rep movsb" for these sizes, which on AMD
  // Zen 3 was measured at a tenth of the speed of a plain loop (64 KiB in 35
  // us) when source and destination have nearly equal offsets in their pages,
  // as a slot and an array often do.
  done = copy_lines<false>(to, from, nbytes);
#endif
  std::memcpy(to + done, from + done, static_cast<std::size_t>(nbytes - done));
}

namespace {

// Up to here a copy that a peer reads is quicker (1.5 against 1.2 us at 2 KiB) when its lines are
// claimed together beforehand: stores retire in order, each waiting until the peer gives its line
// up. Beyond, the copy loops keep enough lines in flight.
constexpr std::int64_t kClaimedAhead = 8192;

void claim_lines([[maybe_unused]] void* destination, [[maybe_unused]] std::int64_t nbytes) {
#if defined(__SSE2__)
  // Not __builtin_prefetch, which is no write prefetch without -mprfchw.
  for (std::int64_t at = 0; at < nbytes; at += kLine) {
    asm volatile("prefetchw %0" ::"m"(*(static_cast<char*>(destination) + at)));
  }
#endif
}

}  // namespace

namespace {
constexpr const char* kStoresNames[kNumStores] = {"streaming", "loop", "library"};
}

const char* name_of(Stores stores) { return kStoresNames[static_cast<int>(stores)]; }

int parse_stores(const char* name) {
  for (int i = 0; i < kNumStores; ++i) {
    if (std::strcmp(name, kStoresNames[i]) == 0) return i;
  }
  return -1;
}

void copy_bytes_by(Stores stores, void* destination, const void* source, std::int64_t nbytes) {
  if (stores != Stores::kStreaming && nbytes <= kClaimedAhead) claim_lines(destination, nbytes);
  if (stores == Stores::kLibrary) {
    if (nbytes > 0) std::memcpy(destination, source, static_cast<std::size_t>(nbytes));
    return;
  }
#if defined(__SSE2__)
  // Below this the fence costs more than the lines.
  constexpr std::int64_t kMinimum = 1024;
  if (stores == Stores::kLoop || nbytes < kMinimum) {
    copy_bytes(destination, source, nbytes);
    return;
  }
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % kLine);
  const std::int64_t head = misaligned == 0 ? 0 : kLine - misaligned;
  std::memcpy(to, from, static_cast<std::size_t>(head));
  const std::int64_t done = head + copy_lines<true>(to + head, from + head, nbytes - head);
  std::memcpy(to + done, from + done, static_cast<std::size_t>(nbytes - done));
  // Streaming stores are weakly ordered: a flag stored after them must not
  // overtake them.
  _mm_sfence();
#else
  copy_bytes(destination, source, nbytes);
#endif
}

void copy_bytes_from_peer(void* destination, const void* source, std::int64_t nbytes) {
  constexpr std::int64_t kWays = 4;
  constexpr std::int64_t kPage = 4096;  // where the prefetcher's streams end
  constexpr std::int64_t kPiece = 256;
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  const std::int64_t share = nbytes >= 2 * kWays * kPage ? nbytes / kWays / kPage * kPage : 0;
  for (std::int64_t at = 0; at < share; at += kPiece) {
    for (std::int64_t way = 0; way < kWays; ++way) {
      copy_bytes(to + way * share + at, from + way * share + at, kPiece);
    }
  }
  copy_bytes(to + kWays * share, from + kWays * share, nbytes - kWays * share);
}

const char* instruction_set() { return active_kernels().load(std::memory_order_acquire)->name; }

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
