// Runs one block of a kernel at a time, with threads as fibers: each runs until it waits for
// others, at a barrier or in a warp operation.
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

// The kernel's built-in variables, for the current fiber.
struct Place {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern Place here;

// Runs `thread` for every thread of every block, block by block. H2O_EMULATION_ORDER determines the
// order of blocks and threads: "forward" (the default), "reverse" or "shuffled"; results must not
// depend on it. Shared memory is filled with NaN before each block.
// The first blocks of a kernel that overlaps run up to wait_for_previous() before the preceding
// kernels of the chain have ended: their writes are hidden.
// Throws std::logic_error if a thread has exited while its warp waits for it, or exits without
// waiting for the preceding kernels.
void run_blocks(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

// Validates a launch as the device would, and records it for take_launches().
cudaError_t launched(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, bool overlaps);

// Runs `kernel`, which calls run_blocks(), in stream order: now, or with each replay during
// capture. function: see Chain::begin_kernel(). overlaps: with the preceding kernel.
void submit(cudaStream_t stream, const void* function, bool overlaps, std::function<void()> kernel);

// The chain of the running kernel; nullptr if it does not overlap with others.
extern Chain* chain;

std::byte* shared_memory();

void wait_for_previous();

void wait_for_block();

// Asynchronous copies to shared memory, in committed groups. They are performed when they are
// waited for, or immediately in any order except "forward". Writes zeros unless `exists`.
void copy_later(uint32_t shared, const void* from, int bytes, bool exists);
void commit_copies();
void finish_copies(int n_pending);

// Every thread of the warp contributes 8 bytes, and receives those of lane `from`.
uint64_t exchange(uint64_t mine, int from);

// The contributions of all lanes.
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
