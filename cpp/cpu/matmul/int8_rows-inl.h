// Rows of x rounded to 8 bits, with a scale for every 32 elements, compiled once per instruction
// set (see cpu/kernels-inl.h).
//
// Requires from vec_*.h, in addition to kernels-inl.h and int8_row-inl.h: store_bytes.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul/int8_row-inl.h"

namespace h2o {
namespace {

// Rows are stored in tiles of kMost rows, in the order that the kernel reads them: for every kBytes
// elements, those of all rows of the tile. The last tile has the remaining rows.
template <int64_t kMost, int64_t kBytes>
struct RowTile {
  static constexpr int64_t kRows = kMost;
  static constexpr int64_t kRun = kBytes;

  int64_t begin;
  int64_t n;

  RowTile(int64_t row, int64_t n_rows) : begin(row / kRows * kRows) {
    n = n_rows - begin < kRows ? n_rows - begin : kRows;
  }
};

Vec magnitude(Vec x) { return max(x, sub(zero(), x)); }

// Rounds as encode_q8_0 does, but with the scale in float. A scale of NaN marks a row that is not
// finite. Computes the largest magnitudes of several blocks first, so that blocks do not wait for
// each other's divisions.
template <class Tile, int64_t kGroup>
void quantize_rows_in_groups(const Int8Rows& to, const float* x, int64_t begin, int64_t end) {
  constexpr int64_t kTogether = 16;
  const int64_t n_blocks = to.n_in / kActivations;
  for (int64_t r = begin; r < end; ++r) {
    const Tile tile(r, to.n_rows);
    int8_t* q_to = to.q + tile.begin * to.n_in + (r - tile.begin) * Tile::kRun;
    float* const scales = to.scales + tile.begin * n_blocks + (r - tile.begin);
    int32_t* sums = to.sums + tile.begin * to.n_in / kGroup + (r - tile.begin);
    const float* from = x + r * to.n_in;
    Vec nothing = zero();  // or NaN
    for (int64_t first = 0; first < n_blocks; first += kTogether) {
      const int64_t n = n_blocks - first < kTogether ? n_blocks - first : kTogether;
      float d[kTogether], inverse[kTogether];
      for (int64_t b = 0; b < n; ++b) {
        Vec largest = zero();
        for (int64_t i = b * kActivations; i < (b + 1) * kActivations; i += kWidth) {
          const Vec v = load(from + i);
          largest = max(largest, magnitude(v));
          nothing = fma(v, zero(), nothing);
        }
        d[b] = maximum(largest);
      }
      for (int64_t b = 0; b < n; ++b) {
        d[b] /= 127;
        // For denormal d, 1 / d may overflow: such values are rounded to zero.
        inverse[b] = d[b] >= 0x1p-126f ? 1 / d[b] : 0;
        scales[(first + b) * tile.n] = d[b];
      }
      for (int64_t b = 0; b < n; ++b, from += kActivations) {
        int8_t buffer[kActivations];
        int8_t* const q = Tile::kRun == kActivations ? q_to : buffer;
        for (int64_t g = 0; g < kActivations; g += kGroup, sums += tile.n) {
          Vec total = zero();  // of integers below 2^12, so exact
          for (int64_t i = g; i < g + kGroup; i += kWidth) {
            const Vec nearest = round(mul(load(from + i), broadcast(inverse[b])));
            const Vec value = min(max(nearest, broadcast(-127)), broadcast(127));  // NaN: -127
            store_bytes(q + i, value);
            total = add(total, value);
          }
          *sums = static_cast<int32_t>(sum(total));
        }
        for (int64_t i = 0; i < kActivations; i += Tile::kRun, q_to += Tile::kRun * tile.n) {
          if (q != q_to) __builtin_memcpy(q_to, q + i, Tile::kRun);
        }
      }
    }
    const float nan = sum(nothing);
    for (int64_t b = 0; nan != 0 && b < n_blocks; ++b) scales[b * tile.n] = nan;
  }
}

}  // namespace
}  // namespace h2o
