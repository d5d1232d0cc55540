// Test interface of the emulated device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace h2o::cuda::emulation {

struct Launch {
  const void* kernel;
  std::array<uint64_t, 3> grid;
  uint64_t threads;  // per block
  size_t shared_bytes;
  bool overlaps;  // with the preceding kernel
};

// The launches since the last call, in order; captured ones are listed when captured. Launches that
// a device of compute capability 9.0 would reject are rejected.
std::vector<Launch> take_launches();

// Bytes copied to the host since the last call.
uint64_t take_bytes_read();

// Kernels are launched but do nothing from now on.
void skip_kernels(bool skip);

// For which compute capability, times 10, kernels seem to have been compiled from now on.
void set_ptx_version(int version);

// Graphs instantiated and not yet destroyed.
int n_graphs();

// Makes the next call of a kind return an error, once.
enum class Call { end_capture, instantiate, replay, memory_info };
void fail_next(Call call);

// At most how many bytes of the device seem to be free from now on.
void set_free_memory(size_t bytes);

// Runs kernels of one warp in sequence; each calls wait_for_previous().
void run_chain(const std::vector<std::function<void()>>& kernels);
void wait_for_previous();

}  // namespace h2o::cuda::emulation
