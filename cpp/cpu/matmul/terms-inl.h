// Sums over long rows are computed in parts, so that what several tiles read stays in the L1 cache.
// Each lane of a vector is a sum of its own; these are kept between parts, so the order of
// additions stays the same.
#pragma once

#include <cstdint>

namespace h2o {
namespace {

// Terms [begin, end) of the sums of a tile.
struct Terms {
  int64_t begin, end;
  Vec* kept;  // [R, O] the sums of the terms before begin; then of those before end
};

// Number of terms of each part: multiples of kUnit of about the same size, at most `most`.
constexpr int64_t kUnit = 256;
constexpr int64_t part_size(int64_t n, int64_t most) {
  const int64_t n_parts = (n + most - 1) / most;
  return ((n + n_parts - 1) / n_parts + kUnit - 1) / kUnit * kUnit;
}

// The sums of a tile of R rows and O columns.
template <int R, int O>
H2O_INLINE void begin_sums(Vec (&sums)[R][O], const Terms& terms) {
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) sums[i][j] = zero();
  }
  if (terms.begin == 0) return;
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) sums[i][j] = terms.kept[i * O + j];
  }
}

template <int R, int O>
H2O_INLINE void keep_sums(const Vec (&sums)[R][O], const Terms& terms) {
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) terms.kept[i * O + j] = sums[i][j];
  }
}

}  // namespace
}  // namespace h2o
