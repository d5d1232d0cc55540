// Activations as operands of products: rounded to 8 bits for quantized weights, or in 16 bits.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "cuda/runtime/device.h"
#include "kv/policy.h"  // H2O_HD

namespace h2o::cuda {

// x[i] ~ d * q[i] for 32 elements, as on the CPU; d is NaN if any element is not finite.
struct RoundedGroup {
  float d;
  int16_t sums[2];  // of the first and of the second 16 q
};

// A chunk is 32 groups: first the lower 16 q of all groups, then the upper 16, so that lanes, one
// group each, load adjacent bytes. A row is padded with zeros, including one additional chunk.
struct QuantizedRows {
  static constexpr int kGroup = 32;  // elements
  static constexpr int kChunk = 32;  // groups

  int8_t* q = nullptr;             // [n_rows, n_chunks, 2, 32, 16]
  RoundedGroup* groups = nullptr;  // [n_rows, n_chunks, 32]
  int n_chunks = 0;

  QuantizedRows() = default;  // empty: nothing is rounded
  H2O_HD explicit operator bool() const { return q != nullptr; }

  // Including the padding chunk.
  static int64_t chunks(int64_t n_in) { return (n_in / 32 + kChunk - 1) / kChunk + 1; }

  // Size of an array of n_rows rows.
  static int64_t bytes(int64_t n_rows, int64_t n_in) {
    return n_rows * chunks(n_in) * kChunk * int64_t{32 + sizeof(RoundedGroup)};
  }

  // Rows in `array`, of size bytes().
  QuantizedRows(std::byte* array, int64_t n_rows, int64_t n_in)
      : q(reinterpret_cast<int8_t*>(array)),
        groups(reinterpret_cast<RoundedGroup*>(array + n_rows * chunks(n_in) * kChunk * 32)),
        n_chunks(static_cast<int>(chunks(n_in))) {}

  // The rows from `first` on.
  H2O_HD QuantizedRows from(int64_t first) const {
    QuantizedRows rows = *this;
    rows.q += first * n_chunks * kChunk * 32;
    rows.groups += first * n_chunks * kChunk;
    return rows;
  }

  // The first or second half of group `lane` of a chunk.
  H2O_HD int8_t* half(int row, int chunk, int lane, int which) const {
    return q + (int64_t{row * n_chunks + chunk} * 2 + which) * (kChunk * 16) + lane * 16;
  }
  H2O_HD RoundedGroup* group(int row, int chunk, int lane) const {
    return groups + int64_t{row * n_chunks + chunk} * kChunk + lane;
  }
};

// Where an operation also writes its result, as operands of the products that follow: in 8 bits, as
// f16 or bf16, or nowhere.
struct Operands {
  QuantizedRows rounded;
  uint16_t* halves = nullptr;  // [n_rows, cols], cols a multiple of 4
  bool bf16 = false;
};

// Grid for blocks of `threads` threads, a power of two up to 1024, with one element per thread,
// including the padding: elements along x, rows along y.
dim3 rounding_grid(const QuantizedRows& to, int64_t n_rows, int threads);

void quantize_rows(const Stream& stream, const QuantizedRows& to, const Tensor& x);

}  // namespace h2o::cuda
