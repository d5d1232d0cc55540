// Hides the writes of kernels that may still be running from kernels that do not wait for them.
//
// Every kernel lets the next one start immediately, so all launches of a chain, up to a copy or a
// synchronization, may run concurrently: before wait_for_previous(), a kernel must not read
// anything that earlier kernels of the chain write.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace h2o::cuda::emulation {

using Memory = std::span<uint32_t>;

class Chain {
 public:
  // Checks the next chains, as it does the first ones.
  static void check_next();

  // All kernels so far have ended.
  void end() { begun_ = false; }

  // Called before a kernel runs. The first one of a chain saves the device's memory.
  void begin_kernel(const std::vector<Memory>& device);

  // Until show(), memory that kernels of the chain have changed is all ones: NaN, or -1.
  void hide();

  // Throws std::logic_error if that memory has been written in the meantime.
  void show();

 private:
  struct Copy {
    Memory memory;
    std::vector<uint32_t> content;
  };
  bool begun_ = false;
  std::vector<Copy> before_;   // device memory at the start of the chain, if it is checked
  std::vector<Copy> changed_;  // changes since then
};

}  // namespace h2o::cuda::emulation
