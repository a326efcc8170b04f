// The proof that IPC works here: every rank reads every other's memory and writes to it, by a
// kernel and by a copy, ordered by the very events that collectives use. Driver and container may
// both say yes and yet hand out garbage, or nothing that a peer's writes ever reach.

#include <memory>

#include "transport/device_ipc.h"
#include "transport/device_plugin.h"

namespace mpidp {
namespace {

constexpr std::int64_t kWords = 512;  // of one area
constexpr std::int64_t kAreaBytes = kWords * static_cast<std::int64_t>(sizeof(std::int32_t));
// Areas of a rank's probe: its own pattern, then one for each writer by kernel, one by copy.
constexpr int kAreas = 1 + 2 * DeviceIpc::kMaxRanks;

const DeviceRuntime& runtime() { return device_runtime(); }

std::int32_t word(int owner, int writer, std::int64_t index) {
  return static_cast<std::int32_t>((owner + 1) * 1'000'003 + (writer + 1) * 7919 + index * 31);
}

std::vector<std::int32_t> pattern(int owner, int writer) {
  std::vector<std::int32_t> words(static_cast<std::size_t>(kWords));
  for (std::int64_t i = 0; i < kWords; ++i) {
    words[static_cast<std::size_t>(i)] = word(owner, writer, i);
  }
  return words;
}

void copy_by_kernel(const char* source, char* destination, DeviceStream stream) {
  DeviceReduceArgs args{};
  args.sources[0] = source;
  args.destinations[0] = destination;
  args.num_sources = args.num_destinations = 1;
  args.count = kWords;
  args.dtype = DType::kInt32;
  args.op = Op::kSum;
  args.divisor = 1.0;
  MPIDP_DEVICE_CHECK(runtime().reduce(&args, stream));
}

void copy_plain(const void* source, void* destination, DeviceStream stream) {
  MPIDP_DEVICE_CHECK(
      runtime().copy(destination, source, static_cast<std::size_t>(kAreaBytes), stream));
}

class Allocation {
 public:
  explicit Allocation(std::int64_t nbytes) {
    MPIDP_DEVICE_CHECK(runtime().allocate(&pointer_, static_cast<std::size_t>(nbytes)));
  }
  ~Allocation() {
    if (pointer_ != nullptr) runtime().release(pointer_);
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  char* get() const { return static_cast<char*>(pointer_); }

 private:
  void* pointer_ = nullptr;
};

}  // namespace

// Every rank's copies must have ended before any buffer goes: `all_agree` meets after each step.
std::string DeviceIpc::probe(double timeout) {
  struct Card {
    std::int32_t ok = 0;
    std::int32_t reserved = 0;
    IpcMemoryHandle handle{};
  };
  const auto size = peers_.size();
  const auto rank = static_cast<std::size_t>(group_.rank());
  std::vector<Card> cards(size);
  std::vector<char*> bases(size, nullptr);
  std::string reason;
  std::unique_ptr<Allocation> mine;
  std::unique_ptr<Allocation> scratch;
  Card card;
  const std::vector<std::int32_t> own = pattern(group_.rank(), group_.rank());

  const auto attempt = [&reason](const auto& step) {
    if (!reason.empty()) return;
    try {
      step();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCuda) throw;
      reason = error.what();
    }
  };

  attempt([&] {
    mine = std::make_unique<Allocation>(kAreaBytes * kAreas);
    scratch = std::make_unique<Allocation>(kAreaBytes);
    MPIDP_DEVICE_CHECK(
        runtime().fill(mine->get(), 0, static_cast<std::size_t>(kAreaBytes * kAreas), stream_));
    copy_plain(own.data(), mine->get(), stream_);
    finish_stream(timeout);
    MPIDP_DEVICE_CHECK(runtime().export_memory(&card.handle, mine->get()));
    card.ok = 1;
  });
  exchange_(&card, cards.data(), sizeof(card));
  attempt([&] {
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      if (cards[peer].ok == 0) {
        reason = "a peer cannot export memory";
        return;
      }
      void* base = nullptr;
      MPIDP_DEVICE_CHECK(runtime().open_memory(&base, &cards[peer].handle));
      bases[peer] = static_cast<char*>(base);
    }
  });
  bool usable = all_agree(reason.empty(), timeout);
  if (usable) {
    attempt([&] {
      if (!read_probes(bases, scratch->get(), timeout)) {
        reason = "a peer's memory holds other data than it wrote";
        return;
      }
      write_probes(bases, mine->get());
      record_done(0);
    });
    usable = all_agree(reason.empty(), timeout);
    if (usable) {
      attempt([&] {
        wait_done(0);
        if (!check_written(mine->get(), timeout)) reason = "a peer's writes did not arrive";
      });
    }
    all_agree(true, timeout);  // nobody looks at this rank's memory any more
  }
  for (char* base : bases) {
    if (base != nullptr) runtime().close_memory(base);
  }
  all_agree(true, timeout);  // nobody has it mapped any more
  return reason;
}

bool DeviceIpc::read_probes(const std::vector<char*>& bases, char* scratch, double timeout) {
  std::vector<std::int32_t> found(static_cast<std::size_t>(kWords));
  for (std::size_t peer = 0; peer < bases.size(); ++peer) {
    if (bases[peer] == nullptr) continue;
    const auto expected = pattern(static_cast<int>(peer), static_cast<int>(peer));
    for (const bool by_kernel : {true, false}) {
      MPIDP_DEVICE_CHECK(runtime().fill(scratch, 0, static_cast<std::size_t>(kAreaBytes), stream_));
      if (by_kernel) {
        copy_by_kernel(bases[peer], scratch, stream_);
      } else {
        copy_plain(bases[peer], scratch, stream_);
      }
      copy_plain(scratch, found.data(), stream_);
      finish_stream(timeout);
      if (found != expected) return false;
    }
  }
  return true;
}

// The values to write are this rank's own pattern, which the reader knows.
void DeviceIpc::write_probes(const std::vector<char*>& bases, const char* mine) {
  for (char* base : bases) {
    if (base == nullptr) continue;
    copy_by_kernel(mine, base + kAreaBytes * (1 + group_.rank()), stream_);
    copy_plain(mine, base + kAreaBytes * (1 + kMaxRanks + group_.rank()), stream_);
  }
}

bool DeviceIpc::check_written(const char* mine, double timeout) {
  std::vector<std::int32_t> found(static_cast<std::size_t>(kWords));
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    const auto expected = pattern(peer, peer);
    for (const int area : {1 + peer, 1 + kMaxRanks + peer}) {
      copy_plain(mine + kAreaBytes * area, found.data(), stream_);
      finish_stream(timeout);
      if (found != expected) return false;
    }
  }
  return true;
}

}  // namespace mpidp
