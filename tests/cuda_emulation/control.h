// What tests ask of the emulated device, and of what it has been asked.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace h2o::cuda::emulation {

struct Launch {
  std::array<uint64_t, 3> grid;
  uint64_t threads;  // of a block
  size_t shared_bytes;
};

// Those since the last call, in order, recorded ones when they were recorded. Each is one that a
// device of compute capability 9.0 takes: others are refused as it refuses them.
std::vector<Launch> take_launches();

// Bytes that were copied to the host since the last call.
uint64_t take_bytes_read();

// From now on kernels are launched but do nothing.
void skip_kernels(bool skip);

// What the next call of a kind says, once.
enum class Call { end_capture, instantiate, replay };
void fail_next(Call call);

// Runs kernels of one warp, one after the other; each calls wait_for_previous().
void run_chain(const std::vector<std::function<void()>>& kernels);
void wait_for_previous();

}  // namespace h2o::cuda::emulation
