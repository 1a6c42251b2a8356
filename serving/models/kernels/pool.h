// A pool of threads for loops of a few microseconds, on cores that others use too.
//
// The caller takes part, and waits only for blocks that a worker has begun: a worker that the kernel does not
// schedule in time costs nothing. (An OpenMP barrier waits for every thread; with one busy neighbour on two cores
// that made a decoding step six times slower.) Idle workers spin for some microseconds, then sleep.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = new Pool;  // never destroyed: workers may outlive main
    return *pool;
  }

  // Threads taking part in a loop, the caller included. Only ever grows.
  void reserve(int num_threads) {
    std::lock_guard<std::mutex> lock(owner_);
    while (int(workers_.size()) + 1 < num_threads) {
      workers_.emplace_back([this] { work(); });
      workers_.back().detach();
    }
    size_.store(int(workers_.size()) + 1, std::memory_order_relaxed);
  }

  // Threads that may take part, the caller included.
  int size() const { return size_.load(std::memory_order_relaxed); }

  // body(i) for every i in [0, count), in any order, by any of the threads.
  template <class Body>
  void run(int64_t count, const Body& body) {
    std::unique_lock<std::mutex> lock(owner_, std::try_to_lock);
    if (!lock || workers_.empty() || count < 2) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    // No block of any loop can be claimed while the loop's data change: a worker still awake from the last one that
    // sees one of the new values sees this ticket too, which is of another epoch and beyond every count.
    ticket_.store(uint64_t(epoch) << 32 | 0xFFFFFFFFu, std::memory_order_seq_cst);
    call_.store([](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, std::memory_order_release);
    body_.store(&body, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    ticket_.store(uint64_t(epoch) << 32, std::memory_order_release);
    epoch_.store(epoch, std::memory_order_release);
    epoch_.notify_all();
    take_blocks(epoch);
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
      if (spins > kSpins) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 4000;

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void work() {
    uint32_t seen = epoch_.load(std::memory_order_acquire);
    for (;;) {
      uint32_t now = seen;
      for (int spins = 0; spins < kSpins && now == seen; ++spins) {
        relax();
        now = epoch_.load(std::memory_order_acquire);
      }
      if (now == seen) {
        epoch_.wait(seen, std::memory_order_acquire);
        now = epoch_.load(std::memory_order_acquire);
      }
      seen = now;
      take_blocks(now);
    }
  }

  // A block is claimed by a compare-and-swap on (epoch, index), so a late worker cannot take one of a newer loop.
  void take_blocks(uint32_t epoch) {
    const auto call = call_.load(std::memory_order_acquire);
    const void* body = body_.load(std::memory_order_acquire);
    const int64_t count = count_.load(std::memory_order_acquire);
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (uint32_t(ticket >> 32) == epoch && int64_t(uint32_t(ticket)) < count) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      call(body, int64_t(uint32_t(ticket)));
      done_.fetch_add(1, std::memory_order_acq_rel);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  std::mutex owner_;
  std::vector<std::thread> workers_;
  std::atomic<void (*)(const void*, int64_t)> call_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<int64_t> count_{0}, done_{0};
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> size_{1};
};
