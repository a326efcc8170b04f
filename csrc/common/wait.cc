#include "common/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

namespace mpidp {
namespace {

// One pause is 10 to 45 ns by processor; a microsecond of spinning is about
// this many.
constexpr int kPausesPerMicrosecond = 40;
// Short, because even with a core for each rank the scheduler may let two ranks share one for a
// while: then each meeting costs a whole spin. A yield with nobody else to run takes well below a
// microsecond, so little is lost by going over to yields early.
constexpr std::uint32_t kDefaultSpins = 300;
constexpr std::uint32_t kDefaultYieldUs = 500;
constexpr std::uint32_t kOversubscribedYieldUs = 300;
constexpr std::uint32_t kDefaultPollUs = 5000;
constexpr std::uint32_t kOversubscribedPollUs = 200;

// Cores by the control group's CPU quota (cgroup v2), or 0 for no limit.
int cgroup_cores() {
  std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re");
  if (file == nullptr) return 0;
  long long quota = 0;
  long long period = 0;
  const int fields = std::fscanf(file, "%lld %lld", &quota, &period);
  std::fclose(file);
  if (fields != 2 || quota <= 0 || period <= 0) return 0;
  return static_cast<int>(std::max<long long>(1, quota / period));
}

}  // namespace

WaitPolicy WaitPolicy::for_load(int runnable, int cores, int spin_us) {
  WaitPolicy policy;
  const bool oversubscribed = runnable > cores;
  policy.spins = oversubscribed ? 0 : kDefaultSpins;
  policy.yield_us = oversubscribed ? kOversubscribedYieldUs : kDefaultYieldUs;
  policy.poll_us = oversubscribed ? kOversubscribedPollUs : kDefaultPollUs;
  if (spin_us >= 0) policy.spins = static_cast<std::uint32_t>(spin_us * kPausesPerMicrosecond);
  return policy;
}

// The kernel's futex works on the plain 32-bit word inside the atomic, which is
// lock-free and of the same layout on every platform that has futexes.
// FUTEX_PRIVATE_FLAG must not be given: the word is shared between processes.
static_assert(sizeof(std::atomic<std::uint32_t>) == 4 &&
              std::atomic<std::uint32_t>::is_always_lock_free);

void futex_sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected, int milliseconds) {
  timespec timeout{};
  timeout.tv_sec = milliseconds / 1000;
  timeout.tv_nsec = (milliseconds % 1000) * 1000000L;
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

namespace {
std::atomic<InterruptHook> interrupt_hook{nullptr};
}  // namespace

void set_interrupt_hook(InterruptHook hook) { interrupt_hook.store(hook); }

bool interrupted() {
  const InterruptHook hook = interrupt_hook.load(std::memory_order_relaxed);
  return hook != nullptr && hook();
}

void yield_core() { sched_yield(); }

void sleep_us(int microseconds) {
  timespec duration{microseconds / 1000000, (microseconds % 1000000) * 1000L};
  nanosleep(&duration, nullptr);
}

std::int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int usable_cores(const std::uint64_t* masks, int words) {
  int cores = 0;
  for (int i = 0; i < words; ++i) cores += __builtin_popcountll(masks[i]);
  if (cores == 0) cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const int quota = cgroup_cores();
  return quota > 0 ? std::min(cores, quota) : cores;
}

std::uint64_t machine_id() {
  std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file == nullptr) return 0;
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
    hash = (hash ^ static_cast<std::uint64_t>(c)) * 0x100000001b3ULL;
  }
  std::fclose(file);
  return hash;
}

void affinity_mask(std::uint64_t* mask, int words) {
  std::fill(mask, mask + words, 0);
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return;
  for (int cpu = 0; cpu < words * 64 && cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) mask[cpu / 64] |= std::uint64_t{1} << (cpu % 64);
  }
}

}  // namespace mpidp
