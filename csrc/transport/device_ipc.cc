#include "transport/device_ipc.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "transport/device_plugin.h"

namespace mpidp {
namespace {

constexpr std::uint32_t kStatusDisagree = 4;

const DeviceRuntime& runtime() { return device_runtime(); }

}  // namespace

DeviceIpc::DeviceIpc(NodeGroup& group, DeviceStream stream, Exchange exchange)
    : group_(group),
      stream_(stream),
      exchange_(std::move(exchange)),
      peers_(static_cast<std::size_t>(group.size())) {}

DeviceIpc::~DeviceIpc() {
  // Not release(): a peer that did not leave in order may still use what this rank exported.
}

bool DeviceIpc::all_agree(bool mine, double timeout) {
  group_.arrive(mine ? 0 : kStatusDisagree);
  const std::uint32_t status = group_.wait_status(timeout);
  if ((status & ~kStatusDisagree) != 0) throw Error(ErrorKind::kMpidp, "a peer could not go on");
  return status == 0;
}

void DeviceIpc::finish_stream(double timeout) {
  MPIDP_DEVICE_CHECK(runtime().record_event(idle_, stream_));
  wait_for_event(idle_, timeout, "work that a communicator needs");
}

void DeviceIpc::export_events() {
  MPIDP_DEVICE_CHECK(runtime().create_event(&idle_, 0));
  for (int set = 0; set < kSets; ++set) {
    MPIDP_DEVICE_CHECK(runtime().create_event(&ready_[set], 1));
    MPIDP_DEVICE_CHECK(runtime().create_event(&done_[set], 1));
  }
}

std::string DeviceIpc::open_events() {
  struct Card {
    std::int32_t ok = 0;
    std::int32_t reserved = 0;
    IpcEventHandle ready[kSets];
    IpcEventHandle done[kSets];
  };
  const auto size = static_cast<std::size_t>(group_.size());
  std::vector<Card> cards(size);
  Card mine;
  std::string reason;
  try {
    export_events();
    for (int set = 0; set < kSets; ++set) {
      MPIDP_DEVICE_CHECK(runtime().export_event(&mine.ready[set], ready_[set]));
      MPIDP_DEVICE_CHECK(runtime().export_event(&mine.done[set], done_[set]));
    }
    mine.ok = 1;
  } catch (const Error& error) {
    reason = error.what();
  }
  exchange_(&mine, cards.data(), sizeof(mine));
  const bool all_exported =
      std::all_of(cards.begin(), cards.end(), [](const Card& card) { return card.ok != 0; });
  if (!all_exported) return reason.empty() ? "a peer cannot export events" : reason;
  try {
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (peer == static_cast<std::size_t>(group_.rank())) continue;
      for (int set = 0; set < kSets; ++set) {
        MPIDP_DEVICE_CHECK(runtime().open_event(&peers_[peer].ready[set], &cards[peer].ready[set]));
        MPIDP_DEVICE_CHECK(runtime().open_event(&peers_[peer].done[set], &cards[peer].done[set]));
      }
    }
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// The first reason that a rank has, so that all show the same.
std::string DeviceIpc::agree_on_reason(const std::string& mine) {
  constexpr std::size_t kBytes = 160;
  std::vector<char> all(kBytes * static_cast<std::size_t>(group_.size()), '\0');
  char text[kBytes] = {};
  std::snprintf(text, sizeof(text), "%s", mine.c_str());
  exchange_(text, all.data(), sizeof(text));
  for (int peer = 0; peer < group_.size(); ++peer) {
    const char* said = all.data() + kBytes * static_cast<std::size_t>(peer);
    if (*said != '\0') return "rank " + std::to_string(group_.global_rank(peer)) + ": " + said;
  }
  return "a rank cannot use it";
}

std::string DeviceIpc::connect(double timeout) {
  std::string reason = open_events();
  if (all_agree(reason.empty(), timeout)) {
    reason = probe(timeout);
    if (all_agree(reason.empty(), timeout)) return {};
  }
  return agree_on_reason(reason);
}

Location DeviceIpc::locate(const void* pointer, std::int64_t nbytes) {
  PointerInfo info{};
  if (runtime().classify(pointer, &info) != kDeviceOk || info.kind != MemoryKind::kDevice ||
      info.exportable == 0 || info.base == nullptr) {
    return Location{};
  }
  const auto offset = static_cast<std::uint64_t>(static_cast<const char*>(pointer) -
                                                 static_cast<const char*>(info.base));
  if (offset + static_cast<std::uint64_t>(nbytes) > info.size) return Location{};
  auto known = exports_.find(info.allocation_id);
  if (known == exports_.end()) {
    Offer offer;
    if (runtime().export_memory(&offer.handle, info.base) != kDeviceOk) return Location{};
    offer.number = next_number_++;
    pending_.push_back(offer);
    known = exports_.emplace(info.allocation_id, Export{offer.number, info.base, info.size}).first;
  }
  return Location{0, known->second.number, offset};
}

// What this rank has exported since the last exchange, and what of it is gone by now.
DeviceIpc::News DeviceIpc::collect_news() {
  News news;
  const auto offered = std::min<std::size_t>(pending_.size(), kOffers);
  for (std::size_t i = 0; i < offered; ++i) news.offers[i] = pending_[i];
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(offered));
  news.num_offers = static_cast<std::int32_t>(offered);
  news.more = pending_.empty() ? 0 : 1;
  for (auto entry = exports_.begin(); entry != exports_.end() && news.num_retired < kRetired;) {
    PointerInfo info{};
    const bool alive = runtime().classify(entry->second.base, &info) == kDeviceOk &&
                       info.kind == MemoryKind::kDevice && info.allocation_id == entry->first;
    if (alive) {
      ++entry;
      continue;
    }
    news.retired[news.num_retired++] = entry->second.number;
    entry = exports_.erase(entry);
  }
  return news;
}

void DeviceIpc::close_retired(const std::vector<News>& all, double timeout) {
  bool idle = false;
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    for (int i = 0; i < all[peer].num_retired; ++i) {
      const auto found = peers_[peer].mapped.find(all[peer].retired[i]);
      if (found == peers_[peer].mapped.end()) continue;
      if (!idle) finish_stream(timeout);
      idle = true;
      runtime().close_memory(found->second);
      peers_[peer].mapped.erase(found);
    }
  }
}

bool DeviceIpc::open_offers(const std::vector<News>& all) {
  bool opened = true;
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    for (int i = 0; i < all[peer].num_offers; ++i) {
      const Offer& offer = all[peer].offers[i];
      peers_[peer].highest = std::max(peers_[peer].highest, offer.number);
      if (peer == static_cast<std::size_t>(group_.rank())) continue;
      void* base = nullptr;
      if (runtime().open_memory(&base, &offer.handle) == kDeviceOk) {
        peers_[peer].mapped[offer.number] = static_cast<char*>(base);
      } else {
        opened = false;
      }
    }
  }
  return opened;
}

void DeviceIpc::exchange_news(double timeout) {
  std::vector<News> all(peers_.size());
  bool more = true;
  while (more) {
    const News mine = collect_news();
    exchange_(&mine, all.data(), sizeof(mine));
    close_retired(all, timeout);
    if (!all_agree(open_offers(all), timeout)) {
      // One rank's failure rules the memory out for all, so that they stay of one mind.
      for (std::size_t peer = 0; peer < all.size(); ++peer) {
        for (int i = 0; i < all[peer].num_offers; ++i) {
          peers_[peer].refused.insert(all[peer].offers[i].number);
        }
      }
    }
    more = std::any_of(all.begin(), all.end(), [](const News& news) { return news.more != 0; });
  }
}

bool DeviceIpc::reachable(int peer, const Location& location) const {
  return location.generation != 0 &&
         peers_[static_cast<std::size_t>(peer)].refused.count(location.generation) == 0;
}

char* DeviceIpc::resolve(int peer, const Location& location) {
  const auto& mapped = peers_[static_cast<std::size_t>(peer)].mapped;
  const auto found = mapped.find(location.generation);
  if (found == mapped.end()) {
    throw Error(
        ErrorKind::kMpidp,
        "GPU memory of rank " + std::to_string(group_.global_rank(peer)) + " is not mapped here");
  }
  return found->second + location.offset;
}

void DeviceIpc::record_ready(int set) {
  MPIDP_DEVICE_CHECK(runtime().record_event(ready_[set], stream_));
}

void DeviceIpc::wait_ready(int set) {
  for (const Peer& peer : peers_) {
    if (peer.ready[set] != nullptr) {
      MPIDP_DEVICE_CHECK(runtime().wait_event(stream_, peer.ready[set]));
    }
  }
}

void DeviceIpc::record_done(int set) {
  MPIDP_DEVICE_CHECK(runtime().record_event(done_[set], stream_));
}

void DeviceIpc::wait_done(int set) {
  for (const Peer& peer : peers_) {
    if (peer.done[set] != nullptr) {
      MPIDP_DEVICE_CHECK(runtime().wait_event(stream_, peer.done[set]));
    }
  }
}

void DeviceIpc::release() {
  // Codes are not looked at: at the process's end the driver may be gone before us.
  for (Peer& peer : peers_) {
    for (const auto& [number, base] : peer.mapped) runtime().close_memory(base);
    peer.mapped.clear();
    for (int set = 0; set < kSets; ++set) {
      if (peer.ready[set] != nullptr) runtime().destroy_event(peer.ready[set]);
      if (peer.done[set] != nullptr) runtime().destroy_event(peer.done[set]);
      peer.ready[set] = peer.done[set] = nullptr;
    }
  }
  for (int set = 0; set < kSets; ++set) {
    if (ready_[set] != nullptr) runtime().destroy_event(ready_[set]);
    if (done_[set] != nullptr) runtime().destroy_event(done_[set]);
    ready_[set] = done_[set] = nullptr;
  }
  if (idle_ != nullptr) runtime().destroy_event(idle_);
  idle_ = nullptr;
}

}  // namespace mpidp
