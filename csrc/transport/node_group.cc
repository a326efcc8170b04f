#include "transport/node_group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "common/check.h"

namespace mpidp {
namespace {

constexpr std::uint32_t kStatusOutOfMemory = 1;
constexpr std::uint32_t kStatusGaveUp = 8;
// How long a sleeper stays in the kernel before it looks at the clock and at
// its peers.
constexpr int kSliceMs = 20;
constexpr std::int64_t kLivenessIntervalUs = 100'000;
constexpr std::int64_t kMinSlotBytes = 4096;
constexpr std::int64_t kSetBudget = std::int64_t{1} << 20;      // of one set, over all slots
constexpr std::int64_t kStagingBudget = std::int64_t{2} << 20;  // of all sets
constexpr int kMostSets = 8;

// All groups of this process share one mapping of each peer.
std::shared_ptr<PeerMemory> peer_memory(const ProcessId& id) {
  static std::mutex mutex;
  static auto* known = new std::map<std::uint64_t, std::weak_ptr<PeerMemory>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<PeerMemory>& entry = (*known)[id.magic];
  std::shared_ptr<PeerMemory> memory = entry.lock();
  if (!memory) {
    memory = std::make_shared<PeerMemory>(id);
    entry = memory;
  }
  return memory;
}

// A zombie is dead: its launcher has not reaped it yet.
bool process_alive(std::int64_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return false;
  char buffer[512];
  const std::size_t got = std::fread(buffer, 1, sizeof(buffer) - 1, file);
  std::fclose(file);
  buffer[got] = '\0';
  const char* after_name = std::strrchr(buffer, ')');
  if (after_name == nullptr || after_name[1] == '\0') return false;
  return after_name[2] != 'Z' && after_name[2] != 'X';
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < 16; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > 16) text += ", and " + std::to_string(ranks.size() - 16) + " more";
  return text;
}

std::uint64_t mix(std::uint64_t value) {  // the finaliser of SplitMix64
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

std::uint64_t probe_word(int rank, int index) {
  return mix(static_cast<std::uint64_t>(rank) * 1024 + static_cast<std::uint64_t>(index));
}

}  // namespace

std::uint64_t Fingerprint::hash() const {
  const std::uint64_t small =
      (static_cast<std::uint64_t>(static_cast<std::uint32_t>(root)) << 32) |
      (static_cast<std::uint64_t>(collective) << 28) | (static_cast<std::uint64_t>(op) << 24) |
      (static_cast<std::uint64_t>(dtype) << 16) | (static_cast<std::uint64_t>(device) << 12) |
      (static_cast<std::uint64_t>(algorithm) << 4) | deterministic;
  return mix(mix(static_cast<std::uint64_t>(count)) ^ small);
}

NodeGroup::NodeGroup(const NodeGroupSettings& settings) : settings_(settings) {
  const auto nbytes = sizeof(ControlBlock) + 2 * static_cast<std::size_t>(settings_.inline_bytes);
  mine_ = new (MemoryRegistry::instance().allocate(nbytes)) ControlBlock{};
}

NodeGroup::~NodeGroup() {
  // Only release() may hand the memory back: until all peers have left, one may still look at it.
}

void NodeGroup::release() {
  MemoryRegistry& registry = MemoryRegistry::instance();
  if (mine_ != nullptr) registry.release(mine_);
  if (my_staging_ != nullptr) registry.release(my_staging_);
  mine_ = nullptr;
  my_staging_ = nullptr;
}

NodeGroup::Card NodeGroup::card(int global_rank) {
  Card card;
  MemoryRegistry& registry = MemoryRegistry::instance();
  card.process = registry.process_id();
  card.control = registry.locate(mine_, sizeof(ControlBlock));
  card.global_rank = global_rank;
  card.stores = stores_found();
  affinity_mask(card.cores, 16);
  return card;
}

void NodeGroup::connect(const std::vector<Card>& cards, int my_index) {
  std::uint64_t cores[16] = {};
  std::vector<int> global_ranks;
  std::vector<std::int64_t> pids;
  std::vector<std::shared_ptr<PeerMemory>> peers(cards.size());
  std::vector<ControlBlock*> blocks(cards.size());
  for (std::size_t i = 0; i < cards.size(); ++i) {
    for (int word = 0; word < 16; ++word) cores[word] |= cards[i].cores[word];
    global_ranks.push_back(cards[i].global_rank);
    pids.push_back(cards[i].process.pid);
    if (static_cast<int>(i) == my_index) {
      blocks[i] = mine_;
      continue;
    }
    peers[i] = peer_memory(cards[i].process);
    blocks[i] = reinterpret_cast<ControlBlock*>(peers[i]->resolve(cards[i].control));
  }
  size_ = static_cast<int>(cards.size());
  rank_ = my_index;
  global_ranks_ = std::move(global_ranks);
  pids_ = std::move(pids);
  peers_ = std::move(peers);
  blocks_ = std::move(blocks);
  staging_.assign(cards.size(), nullptr);
  cores_ = usable_cores(cores, 16);
  policy_ = policy_for(1);
  take_over_stores(cards);
}

void NodeGroup::connect_alone(int global_rank) {
  size_ = 1;
  rank_ = 0;
  cores_ = usable_cores(nullptr, 0);
  policy_ = policy_for(1);
  peers_.assign(1, nullptr);
  blocks_.assign(1, mine_);
  staging_.assign(1, nullptr);
  global_ranks_.assign(1, global_rank);
  pids_.assign(1, 0);
}

WaitPolicy NodeGroup::policy_for(int threads_per_rank) const {
  const int ranks = std::max(size_, settings_.machine_ranks);
  return WaitPolicy::for_load(ranks * threads_per_rank, cores_, settings_.spin_us);
}

void NodeGroup::write_probe() {
  auto* words = reinterpret_cast<std::uint64_t*>(mine_ + 1);
  const int count = static_cast<int>(settings_.inline_bytes / 8);
  for (int i = 0; i < count; ++i) words[i] = probe_word(global_ranks_[0], i) + 1;
  // Every rank of the group knows the same first global rank; mix in the own
  // one.
  for (int i = 0; i < count; ++i) words[i] += static_cast<std::uint64_t>(rank_);
}

bool NodeGroup::check_probe() const {
  const int count = static_cast<int>(settings_.inline_bytes / 8);
  for (int peer = 0; peer < size_; ++peer) {
    const auto* words =
        reinterpret_cast<const std::uint64_t*>(blocks_[static_cast<std::size_t>(peer)] + 1);
    for (int i = 0; i < count; ++i) {
      if (words[i] != probe_word(global_ranks_[0], i) + 1 + static_cast<std::uint64_t>(peer)) {
        return false;
      }
    }
  }
  return true;
}

void NodeGroup::publish(std::uint32_t step) {
  SyncLine& own = mine_->lines[step & 1];
  // Sequentially consistent: the store must be visible before the look at
  // `sleepers`, or a rank that goes to sleep between the two would never be
  // woken.
  own.step.exchange(step, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(own.step);
}

void NodeGroup::arrive(std::uint32_t status) {
  ++step_;
  mine_->lines[step_ & 1].status.store(status, std::memory_order_relaxed);
  publish(step_);
}

void NodeGroup::arrive_at_entry(const EntryMessage& message, const Fingerprint& detail) {
  ++step_;
  entry_step_ = step_;
  ++entries_;
  SyncLine& own = mine_->lines[step_ & 1];
  own.fingerprint = message.fingerprint;
  own.scale = message.scale;
  if (next_has_payload_) {
    std::memcpy(own.payload, payload_, sizeof(payload_));
  } else {
    const Location arrays[] = {message.input, message.output};
    std::memcpy(own.payload, arrays, sizeof(arrays));
  }
  entry_has_payload_ = next_has_payload_;
  next_has_payload_ = false;
  own.status.store(0, std::memory_order_relaxed);
  mine_->details[step_ & 1] = detail;
  publish(step_);
}

std::uint32_t NodeGroup::wait_status(double timeout) {
  std::uint32_t status = mine_->lines[step_ & 1].status.load(std::memory_order_relaxed);
  for (int i = 1; i < size_; ++i) {
    const int peer = rank_ + i < size_ ? rank_ + i : rank_ + i - size_;
    wait_for(peer, step_, timeout);
    const std::uint32_t said = line(peer, step_).status.load(std::memory_order_acquire);
    if ((said & kStatusGaveUp) != 0) throw_gave_up(peer);
    status |= said;
  }
  return status;
}

void NodeGroup::wait(double timeout) {
  const std::uint32_t status = wait_status(timeout);
  if (status == 0) return;
  if ((status & kStatusOutOfMemory) != 0) throw std::bad_alloc();
  throw Error(ErrorKind::kMpidp, "a peer could not go on");
}

void NodeGroup::wait_for(int peer, std::uint32_t step, double timeout) {
  const std::atomic<std::uint32_t>& word = line(peer, step).step;
  // Acquire: what the peer wrote before it arrived is visible here.
  if (word.load(std::memory_order_acquire) == step) return;
  for (std::uint32_t i = 0; i < policy_.spins; ++i) {
    cpu_relax();
    if (word.load(std::memory_order_acquire) == step) return;
  }
  wait_slowly(peer, step, timeout);
}

void NodeGroup::wait_slowly(int peer, std::uint32_t step, double timeout) {
  SyncLine& awaited = line(peer, step);
  const Deadline deadline(timeout);
  const std::int64_t start = now_us();
  while (now_us() - start < static_cast<std::int64_t>(policy_.yield_us)) {
    yield_core();
    if (awaited.step.load(std::memory_order_acquire) == step) return;
  }
  std::int64_t next_look = now_us() + kLivenessIntervalUs;
  for (;;) {
    awaited.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = awaited.step.load(std::memory_order_seq_cst);
    if (seen != step) futex_sleep(awaited.step, seen, kSliceMs);
    awaited.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (awaited.step.load(std::memory_order_acquire) == step) return;
    if (interrupted()) throw Error(ErrorKind::kInterrupted, "interrupted");
    // The peer will not come: it gave up at an earlier meeting.
    if ((line(peer, step - 1).status.load(std::memory_order_acquire) & kStatusGaveUp) != 0) {
      give_up();
      throw_gave_up(peer);
    }
    if (deadline.passed()) {
      give_up();
      throw_timeout(step, timeout);
    }
    if (now_us() >= next_look) {
      check_alive(step);
      next_look = now_us() + kLivenessIntervalUs;
    }
  }
}

std::vector<int> NodeGroup::missing(std::uint32_t step) const {
  std::vector<int> peers;
  for (int peer = 0; peer < size_; ++peer) {
    if (line(peer, step).step.load(std::memory_order_acquire) != step) peers.push_back(peer);
  }
  return peers;
}

void NodeGroup::give_up() {
  mine_->lines[step_ & 1].status.store(kStatusGaveUp, std::memory_order_release);
}

void NodeGroup::throw_gave_up(int peer) const {
  throw Error(
      ErrorKind::kTimeout,
      "rank " + std::to_string(global_rank(peer)) + " gave up waiting before this rank came",
      {global_rank(peer)});
}

void NodeGroup::throw_timeout(std::uint32_t step, double timeout) const {
  std::vector<int> ranks;
  for (const int peer : missing(step)) ranks.push_back(global_rank(peer));
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout);
  throw Error(ErrorKind::kTimeout,
              "rank(s) " + list_of(ranks) + " did not arrive within " + seconds + " s", ranks);
}

void NodeGroup::check_alive(std::uint32_t step) const {
  std::vector<int> dead;
  for (const int peer : missing(step)) {
    if (!process_alive(pids_[static_cast<std::size_t>(peer)])) dead.push_back(global_rank(peer));
  }
  if (!dead.empty()) {
    mine_->lines[step & 1].status.store(kStatusGaveUp, std::memory_order_release);
    throw Error(ErrorKind::kRankFailed, "the process of rank(s) " + list_of(dead) + " has died",
                dead);
  }
}

bool NodeGroup::entries_agree() const {
  const std::uint64_t own = mine_->lines[entry_step_ & 1].fingerprint;
  for (int peer = 0; peer < size_; ++peer) {
    if (line(peer, entry_step_).fingerprint != own) return false;
  }
  return true;
}

Fingerprint NodeGroup::detail(int peer) const {
  return blocks_[static_cast<std::size_t>(peer)]->details[entry_step_ & 1];
}

double NodeGroup::scale(int peer) const { return line(peer, entry_step_).scale; }

bool NodeGroup::has_scales() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (scale(peer) != 1.0) return true;
  }
  return false;
}

void NodeGroup::recover(double timeout) {
  // Ranks that disagreed may have staged a first block or not.
  sync(timeout);
  block_ = 0;
}

bool NodeGroup::all_inputs_registered() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (!input_registered(peer)) return false;
  }
  return true;
}

bool NodeGroup::all_outputs_registered() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (!output_registered(peer)) return false;
  }
  return true;
}

char* NodeGroup::input(int peer) {
  if (!input_registered(peer)) return nullptr;
  return peers_[static_cast<std::size_t>(peer)]->resolve(location(peer, 0));
}

char* NodeGroup::output(int peer) {
  if (!output_registered(peer)) return nullptr;
  return peers_[static_cast<std::size_t>(peer)]->resolve(location(peer, 1));
}

char* NodeGroup::my_mailbox() {
  // arrive_at_entry() counts the collective, so before it the number is one
  // less.
  return reinterpret_cast<char*>(mine_ + 1) +
         static_cast<std::int64_t>((entries_ + 1) & 1) * settings_.inline_bytes;
}

char* NodeGroup::my_mailbox_after_entry() {
  return reinterpret_cast<char*>(mine_ + 1) +
         static_cast<std::int64_t>(entries_ & 1) * settings_.inline_bytes;
}

void NodeGroup::send_with_entry(const void* input, std::int64_t nbytes) {
  if (nbytes > 0) std::memcpy(payload_, input, static_cast<std::size_t>(nbytes));
  next_has_payload_ = true;
}

const char* NodeGroup::mailbox(int peer) const {
  if (entry_has_payload_) return line(peer, entry_step_).payload;
  return reinterpret_cast<const char*>(blocks_[static_cast<std::size_t>(peer)] + 1) +
         static_cast<std::int64_t>(entries_ & 1) * settings_.inline_bytes;
}

void NodeGroup::make_staging(double timeout) {
  const std::int64_t share = kSetBudget / (size_ + 1) / kMinSlotBytes * kMinSlotBytes;
  const std::int64_t slot = std::max(kMinSlotBytes, std::min(settings_.slot_bytes, share));
  MemoryRegistry& registry = MemoryRegistry::instance();
  const std::int64_t set = (size_ + 1) * slot;
  sets_ =
      static_cast<int>(std::clamp(kStagingBudget / set, std::int64_t{2}, std::int64_t{kMostSets}));
  const auto nbytes = static_cast<std::size_t>(sets_ * set);
  std::uint32_t status = 0;
  if (my_staging_ == nullptr) {
    try {
      my_staging_ = static_cast<char*>(registry.allocate(nbytes));
    } catch (const std::bad_alloc&) {
      status = kStatusOutOfMemory;
    }
  }
  if (my_staging_ != nullptr) mine_->staging = registry.locate(my_staging_, nbytes);
  arrive(status);
  wait(timeout);
  for (int peer = 0; peer < size_; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    staging_[index] = peer == rank_ ? my_staging_ : peers_[index]->resolve(blocks_[index]->staging);
  }
  slot_bytes_ = slot;
}

}  // namespace mpidp
