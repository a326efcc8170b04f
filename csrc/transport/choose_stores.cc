// Which stores reach another core fastest, found by trying them where they will be used.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>

#include "transport/node_group.h"

namespace mpidp {
namespace {

constexpr std::int64_t kQuickStagingBytes = std::int64_t{8} << 10;
constexpr int kPasses = 8;  // timed, for each kind; as many go before

// A process's ranks stay on one machine: later communicators take over what the first one found.
std::atomic<int> found{-1};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::int32_t NodeGroup::stores_found() { return found.load(std::memory_order_relaxed); }

void NodeGroup::take_over_stores(const std::vector<Card>& cards) {
  const bool asked = settings_.stores >= 0;
  const std::int32_t first = asked ? settings_.stores : cards.front().stores;
  stores_known_ =
      asked || (first >= 0 && std::all_of(cards.begin(), cards.end(), [first](const Card& card) {
                  return card.stores == first;
                }));
  if (stores_known_) stores_ = static_cast<Stores>(first);
}

std::int64_t NodeGroup::one_shot_bytes() const {
  // Staging takes a sync point more, which costs most where ranks share cores.
  const bool stage_early = stores_ != Stores::kStreaming && !oversubscribed();
  return stage_early ? std::min(settings_.inline_bytes, kQuickStagingBytes)
                     : settings_.inline_bytes;
}

void NodeGroup::choose_stores(double timeout) {
  if (size_ == 1 || stores_known_) return;
  if (!has_staging()) make_staging(timeout);
  // What counts is the second half of the passes, when the peer has read each slot before.
  const auto nbytes = static_cast<std::size_t>(slot_bytes_);
  const auto mine = std::make_unique<char[]>(nbytes);
  std::memset(mine.get(), 1, nbytes);
  const int next = (rank_ + 1) % size_;
  double best[kNumStores];
  for (int kind = 0; kind < kNumStores; ++kind) {
    const auto stores = static_cast<Stores>(kind);
    const int sets = stores == Stores::kStreaming ? 2 : sets_;
    best[kind] = timeout;
    for (int pass = 0; pass < 2 * kPasses; ++pass) {
      const auto start = std::chrono::steady_clock::now();
      copy_bytes_by(stores, slot(rank_, pass % sets, next), mine.get(), slot_bytes_);
      double seconds = seconds_since(start);
      sync(timeout);
      const auto read = std::chrono::steady_clock::now();
      copy_bytes(mine.get(), slot(next, pass % sets, (next + 1) % size_), slot_bytes_);
      seconds += seconds_since(read);
      sync(timeout);
      if (pass >= kPasses) best[kind] = std::min(best[kind], seconds);
    }
  }
  // All ranks decide alike: by the sum of what the ranks found.
  std::memcpy(slot(rank_, 0, 0), best, sizeof(best));
  sync(timeout);
  double total[kNumStores] = {};
  for (int peer = 0; peer < size_; ++peer) {
    double theirs[kNumStores];
    std::memcpy(theirs, slot(peer, 0, 0), sizeof(theirs));
    for (int kind = 0; kind < kNumStores; ++kind) total[kind] += theirs[kind];
  }
  sync(timeout);
  const auto* least = std::min_element(total, total + kNumStores);
  stores_ = static_cast<Stores>(least - total);
  found.store(static_cast<int>(stores_), std::memory_order_relaxed);
}

}  // namespace mpidp
