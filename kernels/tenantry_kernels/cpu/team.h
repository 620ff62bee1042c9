// A team of threads that share out small jobs, made for machines whose cores are busy with other work too.
//
// OpenMP's barrier waits for every thread of its team: one that the kernel has not scheduled costs milliseconds, some
// hundred times per step. Here the caller takes items like everyone else, so a helper that does not come costs nothing;
// only items already taken are waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#include "spin.h"

namespace tenantry {

class Team {
 public:
  static Team& get() {
    static Team* team = new Team;  // never destroyed: helpers sleep until the process ends
    return *team;
  }

  // Calls f(i) for all i in [0, items), on at most `threads` threads; returns when all are done. f must not throw. The
  // last is taken first: f may wait for those above its own, which have all been begun.
  template <typename F>
  void run(int64_t items, int64_t threads, const F& f) {
    std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
    if (items < 2 || threads < 2 || items > INT32_MAX || !mine.try_lock()) {  // another caller has the helpers
      for (int64_t i = items; i-- > 0;) f(i);
      return;
    }
    while (helpers_ < threads - 1 && helpers_ < kMostHelpers) std::thread(&Team::help, this, helpers_++).detach();
    limit_.store(threads - 1, std::memory_order_relaxed);
    call_.store([](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, std::memory_order_relaxed);
    context_.store(&f, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    state_.store((++generation_ << 32) | static_cast<uint64_t>(items));
    if (sleepers_.load() > 0) {
      wake_.fetch_add(1);
      wake_.notify_all();
    }
    while (take()) {
    }
    spin_until([&] { return done_.load(std::memory_order_acquire) >= items; });
  }

 private:
  static constexpr int64_t kMostHelpers = 255;
  static constexpr int kSpins = 20000;  // some 300 microseconds: longer than any pause between two operators of a step

  // Takes one item and runs it. The state holds the job's number and its items left: while items are left the job is
  // not over, so what was read of it before the exchange belongs to it.
  bool take() {
    uint64_t state = state_.load();
    while (const uint64_t left = state & UINT32_MAX) {
      const auto call = call_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      if (!state_.compare_exchange_weak(state, state - 1)) continue;
      call(context, static_cast<int64_t>(left) - 1);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  void help(int64_t id) {
    for (;;) {
      for (int spins = 0; spins < kSpins; ++spins) {
        if (id < limit_.load(std::memory_order_relaxed) && take()) spins = 0;
        else pause();
      }
      sleepers_.fetch_add(1);
      const uint32_t seen = wake_.load();
      if ((state_.load() & UINT32_MAX) == 0 || id >= limit_.load(std::memory_order_relaxed)) wake_.wait(seen);
      sleepers_.fetch_sub(1);
    }
  }

  std::mutex busy_;
  int64_t helpers_ = 0;
  uint64_t generation_ = 0;
  std::atomic<int64_t> limit_{0};
  std::atomic<void (*)(const void*, int64_t)> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> sleepers_{0};
  std::atomic<uint32_t> wake_{0};
};

}  // namespace tenantry
