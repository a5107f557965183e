// Fork-join over a few threads whose wake-up costs less than the 20 us kernels it serves.
//
// Workers spin briefly after each job, then sleep. Chunks are claimed from one atomic ticket, so the caller never waits
// for a worker that is asleep (or absent, as after fork): it runs those chunks itself.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pallas_kernels {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  static Pool& Get() {
    static Pool* pool = new Pool;  // never destroyed: workers may outlive static destructors
    return *pool;
  }

  // Threads a job may use, the caller included. Takes effect when the first job runs.
  void SetThreads(int threads) { threads_ = std::max(1, threads); }
  int threads() const { return threads_; }

  // Runs body(i) for i in [0, count), count < 2^20, on the caller and the idle workers; returns when all are done.
  template <typename Body>
  void For(int count, const Body& body) {
    std::unique_lock<std::mutex> owner(owner_, std::defer_lock);
    if (count <= 1 || threads_ == 1 || !owner.try_lock()) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    Start();
    call_ = [](const void* b, int i) { (*static_cast<const Body*>(b))(i); };
    body_ = &body;
    done_.store(0, std::memory_order_relaxed);
    tag_ = (tag_ + 1) & 0xffffff;
    ticket_.store(tag_ << 40 | static_cast<uint64_t>(count) << 20);
    Wake();
    RunChunks();
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
      if (spins < 4096) Pause(); else sched_yield();
    }
  }

  // Gets sleeping workers out of bed early, while the caller still prepares a job.
  void Wake() {
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    ++alarm_;
    bell_.notify_all();
  }

 private:
  static constexpr std::chrono::microseconds kSpin{60};
  static constexpr uint64_t kLow = (1 << 20) - 1;

  static bool Open(uint64_t ticket) { return (ticket & kLow) < (ticket >> 20 & kLow); }

  // A claimed ticket below the count keeps its job alive, so call_ and body_ are the ones stored before it.
  void RunChunks() {
    while (Open(ticket_.load(std::memory_order_acquire))) {
      uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      if (!Open(ticket)) return;
      call_(body_, static_cast<int>(ticket & kLow));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void Work() {
    while (true) {
      RunChunks();
      auto end = std::chrono::steady_clock::now() + kSpin;
      for (int spins = 1; !Open(ticket_.load(std::memory_order_relaxed)); ++spins) {
        Pause();
        if (spins % 64 || std::chrono::steady_clock::now() < end) continue;
        Sleep();
        end = std::chrono::steady_clock::now() + kSpin;
      }
    }
  }

  void Sleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    uint64_t heard = alarm_;
    if (!Open(ticket_.load())) bell_.wait(lock, [&] { return alarm_ != heard; });
    sleepers_.fetch_sub(1);
  }

  void Start() {
    if (started_) return;
    started_ = true;
    for (int i = 1; i < threads_; ++i) std::thread([this] { Work(); }).detach();
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};  // tag : 24, count : 20, next : 20
  alignas(64) std::atomic<int> done_{0};
  alignas(64) void (*call_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
  uint64_t tag_ = 0;
  bool started_ = false;
  int threads_ = 1;
  std::mutex owner_;
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable bell_;
  uint64_t alarm_ = 0;
};

}  // namespace pallas_kernels
