#include "cpu/matmul/interleave.h"

#include <algorithm>
#include <cstring>

#include "core/blocks.h"

namespace h2o {
namespace {

constexpr int64_t kQuad = 4;

// Where the parts of a block are.
struct BlockParts {
  int64_t bytes;
  int64_t half;   // the f16 that comes first, if size_of_half is not 0
  int64_t quads;  // the rest
  int64_t n_quads;
  int64_t size_of_half;

  explicit BlockParts(DType dtype) : bytes(info(dtype).block_bytes) {
    size_of_half = bytes % kQuad;
    n_quads = bytes / kQuad;
    const bool is_last = dtype == DType::q3_k || dtype == DType::q6_k;
    half = is_last ? bytes - size_of_half : 0;
    quads = is_last ? 0 : size_of_half;
  }
};

int64_t strip_bytes(const Tensor& tensor) { return kInterleaved * tensor.row_bytes(); }

}  // namespace

int64_t interleaved_bytes(const Tensor& rows) {
  return (rows.rows + kInterleaved - 1) / kInterleaved * strip_bytes(rows);
}

void interleave(std::byte* to, const Tensor& from, int64_t strip) {
  const BlockParts parts(from.dtype);
  const int64_t first = strip * kInterleaved;
  const int64_t n_rows = std::min(kInterleaved, from.rows - first);
  const int64_t n_blocks = from.row_bytes() / parts.bytes;
  if (n_rows < kInterleaved) std::memset(to, 0, strip_bytes(from));
  for (int64_t b = 0; b < n_blocks; ++b) {
    for (int64_t r = 0; r < n_rows; ++r) {
      const std::byte* block = from.row(first + r) + b * parts.bytes;
      std::memcpy(to + r * parts.size_of_half, block + parts.half, parts.size_of_half);
      std::byte* quads = to + kInterleaved * parts.size_of_half + r * kQuad;
      for (int64_t q = 0; q < parts.n_quads; ++q) {
        std::memcpy(quads + q * kInterleaved * kQuad, block + parts.quads + q * kQuad, kQuad);
      }
    }
    to += kInterleaved * parts.bytes;
  }
}

void read_interleaved_row(std::byte* to, const Tensor& from, int64_t i) {
  const BlockParts parts(from.dtype);
  const int64_t r = i % kInterleaved;
  const std::byte* strip = from.data + i / kInterleaved * strip_bytes(from);
  const int64_t n_blocks = from.row_bytes() / parts.bytes;
  for (int64_t b = 0; b < n_blocks; ++b) {
    std::memcpy(to + parts.half, strip + r * parts.size_of_half, parts.size_of_half);
    const std::byte* quads = strip + kInterleaved * parts.size_of_half + r * kQuad;
    for (int64_t q = 0; q < parts.n_quads; ++q) {
      std::memcpy(to + parts.quads + q * kQuad, quads + q * kInterleaved * kQuad, kQuad);
    }
    strip += kInterleaved * parts.bytes;
    to += parts.bytes;
  }
}

}  // namespace h2o
