// Pointers to columns of weights that cpu/simd/vec_*.h reads in parallel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o {
namespace {

struct Columns {
  const std::byte* first;
  int64_t stride;

  [[gnu::always_inline]] const std::byte* operator[](int64_t i) const { return first + i * stride; }
};

}  // namespace
}  // namespace h2o
