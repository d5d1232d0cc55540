// Replaces cuda/runtime/launch.cuh: kernels run on the host when launched.
#pragma once

#include <tuple>

#include "cuda/runtime/device.h"

namespace h2o::cuda {

inline void wait_for_previous() { emulation::wait_for_previous(); }
inline void let_next_start() {}

template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(emulation::shared_memory());
}

template <class... Parameters, class... Arguments>
void launch(const Stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t shared_bytes, Arguments&&... arguments) {
  const auto* const function = reinterpret_cast<const void*>(kernel);
  const bool overlaps = stream.can_overlap();
  check(emulation::launched(function, grid, block, shared_bytes, overlaps), "launch");
  std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  emulation::submit(stream.get(), function, overlaps, [=] {
    emulation::run_blocks(grid, block, shared_bytes, [&] { std::apply(kernel, values); });
  });
}

}  // namespace h2o::cuda
