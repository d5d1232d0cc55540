// What kernels that may still run have written, hidden from those that do not wait for them.
//
// Every kernel lets the next one start at once, so all launches of a chain, up to a copy or to
// whoever waits for the stream, may be under way together: before it waits, a kernel may read
// nothing that those before it in the chain write.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace h2o::cuda::emulation {

using Memory = std::span<uint32_t>;

class Chain {
 public:
  // The chains that begin next are checked, as the first ones are.
  static void check_next();

  // All kernels so far have ended.
  void end() { begun_ = false; }

  // A kernel runs next. The first of a chain remembers the device's memory as it is.
  void begin_kernel(const std::vector<Memory>& device);

  // From here to show(), what the kernels of the chain have changed is all ones: NaNs, or -1.
  void hide();

  // Throws std::logic_error if that has been written meanwhile.
  void show();

 private:
  struct Copy {
    Memory memory;
    std::vector<uint32_t> content;
  };
  bool begun_ = false;
  std::vector<Copy> before_;   // all of the device's memory when the chain began, if it is checked
  std::vector<Copy> changed_;  // since then
};

}  // namespace h2o::cuda::emulation
