// One block of a kernel at a time, its threads as fibers: each runs until it waits for others, at a
// barrier or in an operation of its warp.
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "overlap.h"

namespace h2o::cuda::emulation {

// What the kernel's built-in variables say; of the fiber that runs.
struct Place {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern Place here;

// Runs `thread` for every thread of every block, block by block. The order of the blocks and of the
// threads is that of H2O_EMULATION_ORDER: "forward" (the default), "reverse" or "shuffled"; results
// must not depend on it. Shared memory is filled with NaNs before each block.
// The first blocks of a kernel run up to their wait_for_previous() while the kernels ahead in the
// chain have not ended: what those write is hidden from them.
// Throws std::logic_error where a thread has left and its warp waits for it, and where one leaves
// that has not waited for the kernels ahead.
void run_blocks(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

// What the device says of a launch, which is remembered for take_launches().
cudaError_t launched(dim3 grid, dim3 block, size_t shared_bytes);

// Runs `kernel`, which is run_blocks(), when the stream gets to it: at once, or with each replay of
// what it records.
void submit(cudaStream_t stream, std::function<void()> kernel);

// What the kernel that runs follows.
extern Chain* chain;

std::byte* shared_memory();

void wait_for_previous();

void wait_for_block();

// Copies to shared memory that go on while the thread does, in groups that it commits. They are
// made when it waits for them; in any order but "forward" at once. What is not there is zeros.
void copy_later(uint32_t shared, const void* from, int bytes, bool exists);
void commit_copies();
void finish_copies(int n_pending);

// Every thread of the warp gives 8 bytes, and gets what lane `from` gave.
uint64_t exchange(uint64_t mine, int from);

// What every lane gave, in the order of lanes.
const uint64_t* gather(uint64_t mine);

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace h2o::cuda::emulation
