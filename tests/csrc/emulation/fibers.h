// The threads of a CTA as fibers, under a C++ compiler: one runs until a barrier. Include it before a kernel's headers.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

namespace emulation {

constexpr std::size_t kStackBytes = 256 * 1024;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool is_done = false;
};

struct Cta {
  std::vector<Thread> threads;
  ucontext_t scheduler;
  std::function<void()> body;
  int current = 0, arrived = 0, generation = 0;
};

inline Cta* cta = nullptr;

inline Thread& here() { return cta->threads[cta->current]; }

}  // namespace emulation

struct ThreadIndex {
  unsigned x, y;
};
inline ThreadIndex threadIdx, blockIdx, gridDim;

namespace emulation {

inline void yield() {
  const int self = cta->current;
  swapcontext(&here().context, &cta->scheduler);
  threadIdx.x = self;
}

// Until `count` threads are here; the last one does `act`.
template <class Act>
void meet(int& arrived, int& generation, int count, Act act) {
  const int of_this = generation;
  if (++arrived == count) {
    arrived = 0;
    act();
    ++generation;
  }
  while (generation == of_this) yield();
}

inline void start_thread() {
  cta->body();
  here().is_done = true;
  swapcontext(&here().context, &cta->scheduler);
}

// One CTA of a grid, from its first to its last instruction. `first`: the thread that runs first, for another order.
inline void run_fibers(int threads, ThreadIndex place, int first, std::function<void()> body) {
  Cta made;
  made.threads = std::vector<Thread>(threads);
  made.body = std::move(body);
  cta = &made;
  blockIdx = place;
  for (Thread& thread : made.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &made.scheduler;
    makecontext(&thread.context, &start_thread, 0);
  }
  for (bool is_any = true; is_any;) {
    is_any = false;
    for (int i = 0; i < threads; ++i) {
      made.current = (first + i) % threads;
      if (here().is_done) continue;
      is_any = true;
      threadIdx.x = made.current;
      swapcontext(&made.scheduler, &here().context);
    }
  }
}

}  // namespace emulation

inline void __syncthreads() {
  emulation::meet(emulation::cta->arrived, emulation::cta->generation, static_cast<int>(emulation::cta->threads.size()),
                  [] {});
}

#ifndef __forceinline__
#define __forceinline__ inline
#endif
