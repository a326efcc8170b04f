// How a process waits for another: spin, yield, then sleep, always with a
// deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace mpidp {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// A point in time that a wait may not pass. Made where the waiting turns slow,
// so that the fast path reads no clock.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(double seconds)
      : at_(Clock::now() +
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  bool passed() const { return Clock::now() >= at_; }

 private:
  Clock::time_point at_;
};

struct WaitPolicy {
  // Pauses before the first yield; 0 when the waited-for process may need this
  // core.
  std::uint32_t spins = 300;
  // Microseconds of yielding before the futex.
  std::uint32_t yield_us = 500;
  // The same before naps, where the wait is for MPI and no futex can end it.
  std::uint32_t poll_us = 5000;

  // `runnable` threads compete for `cores` cores. A negative spin_us means the
  // built-in choice.
  static WaitPolicy for_load(int runnable, int cores, int spin_us);
};

// Sleeps while *word == expected, at most `milliseconds`. Works across
// processes.
void futex_sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected, int milliseconds);
// Wakes every sleeper on the word.
void futex_wake(const std::atomic<std::uint32_t>& word);

// Asked now and then by long waits; true makes them give up. The binding
// installs one that lets Python's signal handlers run.
using InterruptHook = bool (*)();
void set_interrupt_hook(InterruptHook hook);
bool interrupted();

void yield_core();
void sleep_us(int microseconds);
std::int64_t now_us();

// Cores that the given affinity masks and the control group leave to this
// node's processes.
int usable_cores(const std::uint64_t* masks, int words);
// Equal for all processes of one running kernel, in containers too; 0 where the kernel does not
// say.
std::uint64_t machine_id();
// This process's affinity as a bit mask of `words` 64-bit words.
void affinity_mask(std::uint64_t* mask, int words);

}  // namespace mpidp
