#include "block.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace h2o::cuda::emulation {

Place here;
Chain* chain = nullptr;

namespace {

constexpr int kWarp = 32;
// Not a multiple of 4 KiB: the tops of the stacks would share the same few sets of the cache.
constexpr size_t kStackBytes = (64 << 10) + 448;
constexpr size_t kMaxShared = 256 << 10;
constexpr int kEarlyBlocks = 8;  // per kernel, which start before the preceding kernels have ended

#ifndef __x86_64__
#error "the emulation switches stacks with x86-64 instructions"
#endif

// Suspends the running code, and resumes what is suspended at `to`. Inlined, without call and ret:
// a processor predicts that ret returns to the last call, which another fiber has made.
[[gnu::always_inline]] inline void switch_stack(void** from, void* to) {
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"  // the red zone
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%[from])\n\t"
      "movq %[to], %%rsp\n\t"
      "popq %%rax\n\t"
      "jmp *%%rax\n"
      "1:\n\t"
      "popq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp"
      : [from] "+D"(from), [to] "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
}

enum class State : char { ready, at_barrier, in_warp, at_previous, done };

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
  bool exists;
};

struct Fiber {
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
  uint3 thread{};
  void* at = nullptr;       // stack pointer while suspended
  bool has_waited = false;  // for the preceding kernels
  int n_exchanges = 0;
  std::vector<Copy> copies;              // of the uncommitted group
  std::deque<std::vector<Copy>> groups;  // committed and pending
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack = nullptr;
#endif
};

// Data exchanged by a warp; double-buffered, because a lane may be at the next exchange before all
// have read this one.
using Lanes = std::array<uint64_t, kWarp>;
struct Warp {
  std::array<Lanes, 2> given;
};

std::string_view wanted_order() {
  static const std::string_view order = [] {
    const char* name = std::getenv("H2O_EMULATION_ORDER");
    return name != nullptr ? name : "forward";
  }();
  return order;
}

class Block {
 public:
  // early: only up to wait_for_previous(), before the preceding kernels have ended.
  void run(dim3 size, bool early, const std::function<void()>& thread) {
    const int n = static_cast<int>(size.x * size.y * size.z);
    if (n % kWarp != 0) throw std::logic_error("the block size is not a multiple of the warp size");
    thread_ = &thread;
    size_ = size;
    while (std::ssize(fibers_) < n) fibers_.push_back(std::make_unique<Fiber>());
    warps_.assign(n / kWarp, {});
    warp_order_.resize(n / kWarp);
    states_.assign(n, State::ready);
    for (int i = 0; i < n; ++i) prepare(i);
    error_ = nullptr;
    n_ = n;
    early_ = early && chain != nullptr;
    if (early_) chain->hide();
    while (step()) {
    }
    end_previous();
    if (error_) std::rethrow_exception(error_);
  }

  void wait(State state) {
    states_[current_] = state;
    leave(*fibers_[current_], state);
  }

  void wait_for_previous() {
    current().has_waited = true;
    if (early_) wait(State::at_previous);
  }

  const Lanes& gather(uint64_t mine) {
    Fiber& fiber = *fibers_[current_];
    const int turn = fiber.n_exchanges++ % 2;
    Lanes& lanes = warps_[current_ / kWarp].given[turn];
    lanes[current_ % kWarp] = mine;
    wait(State::in_warp);
    return lanes;
  }

  Fiber& current() { return *fibers_[current_]; }

  void shuffle(std::vector<int>& order) {
    if (wanted_order() == "reverse") std::reverse(order.begin(), order.end());
    if (wanted_order() == "shuffled") std::shuffle(order.begin(), order.end(), random_);
  }

 private:
  // Runs every runnable fiber up to a barrier, one warp after the other: the stacks of one fit into
  // the cache. Returns false when all are done.
  bool step() {
    std::iota(warp_order_.begin(), warp_order_.end(), 0);
    shuffle(warp_order_);
    for (const int warp : warp_order_) run_warp(warp * kWarp);
    if (error_) return false;
    if (count(0, n_, State::at_previous) > 0) {
      end_previous();
      release(0, n_, State::at_previous);
      return true;
    }
    const bool waits = count(0, n_, State::at_barrier) > 0;
    release(0, n_, State::at_barrier);  // threads that have exited do not participate
    return waits;
  }

  void run_warp(int first) {
    while (!error_) {
      std::iota(lane_order_.begin(), lane_order_.end(), first);
      shuffle(lane_order_);
      for (const int i : lane_order_) {
        if (states_[i] == State::ready) enter(i);
      }
      if (error_ || count(first, kWarp, State::in_warp) == 0) return;
      if (count(first, kWarp, State::done) + count(first, kWarp, State::at_barrier) > 0) {
        throw std::logic_error("lanes of a warp wait for others that have exited");
      }
      release(first, kWarp, State::in_warp);
    }
  }

  int64_t count(int first, int n, State state) const {
    const auto begin = states_.begin() + first;
    return std::count(begin, begin + n, state);
  }
  void release(int first, int n, State state) {
    const auto begin = states_.begin() + first;
    std::replace(begin, begin + n, state, State::ready);
  }

  // The preceding kernels have ended.
  void end_previous() {
    if (std::exchange(early_, false)) chain->show();
  }

  void prepare(int i) {
    Fiber& fiber = *fibers_[i];
    const auto number = static_cast<unsigned>(i);
    fiber.thread = {number % size_.x, number / size_.x % size_.y, number / (size_.x * size_.y)};
    auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) / 16 * 16;
    auto* stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // begin() has no caller
    *--stack = reinterpret_cast<void*>(&begin);
    fiber.at = stack;
    fiber.has_waited = false;
    fiber.n_exchanges = 0;
    fiber.copies.clear();
    fiber.groups.clear();
  }

  void enter(int i) {
    current_ = i;
    Fiber& fiber = *fibers_[i];
    here.thread = fiber.thread;
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), kStackBytes);
    switch_stack(&scheduler_, fiber.at);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    switch_stack(&scheduler_, fiber.at);
#endif
  }

  void leave(Fiber& fiber, [[maybe_unused]] State state) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(state == State::done ? nullptr : &fiber.fake_stack,
                                   scheduler_stack_, scheduler_stack_bytes_);
    switch_stack(&fiber.at, scheduler_);
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#else
    switch_stack(&fiber.at, scheduler_);
#endif
  }

  static void begin();

  const std::function<void()>* thread_ = nullptr;
  dim3 size_;
  int n_ = 0;
  bool early_ = false;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<State> states_;  // of the fibers
  std::vector<Warp> warps_;
  std::vector<int> warp_order_;
  std::vector<int> lane_order_ = std::vector<int>(kWarp);
  std::exception_ptr error_;
  int current_ = 0;
  void* scheduler_ = nullptr;  // stack pointer while a fiber runs
#ifdef __SANITIZE_ADDRESS__
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
#endif
  std::mt19937 random_{1};
};

Block the_block;
alignas(16) std::byte the_shared[kMaxShared];

void Block::begin() {
  Block& block = the_block;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_stack_bytes_);
#endif
  try {
    (*block.thread_)();
    if (!block.current().has_waited) {
      throw std::logic_error("a thread exits without waiting for the preceding kernels");
    }
  } catch (...) {
    block.error_ = std::current_exception();
  }
  block.wait(State::done);
}

}  // namespace

void run_blocks(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  if (shared_bytes > kMaxShared)
    throw std::logic_error("more shared memory than the device has per block");
  std::vector<int> order(size_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  the_block.shuffle(order);
  here.grid_dim = grid;
  here.block_dim = block;
  int n_begun = 0;
  for (const int i : order) {
    here.block = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
    std::memset(the_shared, 0xff, shared_bytes);
    the_block.run(block, n_begun++ < kEarlyBlocks, thread);
  }
}

std::byte* shared_memory() { return the_shared; }

void wait_for_previous() { the_block.wait_for_previous(); }

void wait_for_block() { the_block.wait(State::at_barrier); }

namespace {

void make(const Copy& copy) {
  if (copy.exists) {
    std::memcpy(the_shared + copy.to, copy.from, copy.bytes);
  } else {
    std::memset(the_shared + copy.to, 0, copy.bytes);
  }
}

}  // namespace

void copy_later(uint32_t shared, const void* from, int bytes, bool exists) {
  const auto misaligned = [bytes](uintptr_t address) { return address % bytes != 0; };
  if (misaligned(shared) || misaligned(reinterpret_cast<uintptr_t>(from))) {
    throw std::logic_error("a copy is not aligned");
  }
  const Copy copy{shared, from, bytes, exists};
  wanted_order() == "forward" ? the_block.current().copies.push_back(copy) : make(copy);
}

void commit_copies() {
  Fiber& fiber = the_block.current();
  fiber.groups.push_back(std::exchange(fiber.copies, {}));
}

void finish_copies(int n_pending) {
  auto& groups = the_block.current().groups;
  for (; std::ssize(groups) > n_pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) make(copy);
  }
}

uint64_t exchange(uint64_t mine, int from) { return the_block.gather(mine)[from]; }

const uint64_t* gather(uint64_t mine) { return the_block.gather(mine).data(); }

}  // namespace h2o::cuda::emulation
