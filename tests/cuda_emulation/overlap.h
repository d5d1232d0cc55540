// Hides the writes of kernels that may still be running from kernels that do not wait for them.
//
// Every kernel lets the next one start immediately, so all launches of a chain, up to a copy or a
// synchronization, may run concurrently: before wait_for_previous(), a kernel must not read
// anything that earlier kernels of the chain write, and must not write anything, which they may
// read.
#pragma once

#include <cstdint>
#include <vector>

#include "watch.h"

namespace h2o::cuda::emulation {

class Chain {
 public:
  // Checks the next chains, as it does the first ones.
  static void check_next();

  // All kernels so far have ended.
  void end() { begun_ = false; }

  // Called before a kernel runs. The first one of a chain saves the device's memory. function: its
  // address; nullptr is always a new one.
  void begin_kernel(const void* function, const std::vector<Memory>& device);

  // Until show(), memory that kernels of the chain have changed is all ones: NaN, or -1.
  void hide();

  // Throws std::logic_error if that memory has been written in the meantime; for the first blocks
  // of a function, if any of the device's memory has been.
  void show();

 private:
  struct Copy {
    Memory memory;
    std::vector<uint32_t> content;
  };
  bool begun_ = false;
  std::vector<Copy> before_;        // device memory at the start of the chain, if it is checked
  std::vector<Copy> changed_;       // changes since then
  const void* function_ = nullptr;  // of the running kernel
  std::vector<Memory> device_;
  bool watches_ = false;  // from hide() to show(), for any write
};

}  // namespace h2o::cuda::emulation
