#include "cpu/matmul/interleave.h"

#include <algorithm>
#include <cstring>

#include "core/blocks.h"

namespace h2o {
namespace {

constexpr int64_t kQuad = 4;

// Offsets of the parts of a block.
struct BlockParts {
  int64_t bytes;
  int64_t scale;  // stored first, unless size_of_scale is 0
  int64_t quads;  // the rest
  int64_t n_quads;
  int64_t size_of_scale;

  explicit BlockParts(DType dtype) : bytes(interleaved_block_bytes(dtype)) {
    size_of_scale = bytes % kQuad;
    n_quads = bytes / kQuad;
    const bool is_first = info(dtype).block_size < 256;
    scale = is_first ? 0 : bytes - size_of_scale;
    quads = is_first ? size_of_scale : 0;
  }
};

int64_t strip_bytes(const Tensor& tensor) { return kInterleaved * tensor.row_bytes(); }

}  // namespace

int64_t interleaved_bytes(const Tensor& rows) {
  Tensor to = rows;
  to.interleaved = true;
  return (rows.rows + kInterleaved - 1) / kInterleaved * strip_bytes(to);
}

void interleave(const Tensor& to, const Tensor& from, int64_t strip,
                decltype(TypeKernels::unpack) unpack) {
  const BlockParts parts(from.dtype);
  const int64_t first = strip * kInterleaved;
  const int64_t n_rows = std::min(kInterleaved, from.rows - first);
  const int64_t from_bytes = info(from.dtype).block_bytes;
  const int64_t n_blocks = from.row_bytes() / from_bytes;
  std::byte* at = to.data + strip * strip_bytes(to);
  if (n_rows < kInterleaved) std::memset(at, 0, strip_bytes(to));
  for (int64_t b = 0; b < n_blocks; ++b) {
    for (int64_t r = 0; r < n_rows; ++r) {
      const std::byte* block = from.row(first + r) + b * from_bytes;
      alignas(4) std::byte unpacked[sizeof(BlockNibbles<16>)];
      if (unpack != nullptr) {
        unpack(unpacked, block);
        block = unpacked;
      }
      std::memcpy(at + r * parts.size_of_scale, block + parts.scale, parts.size_of_scale);
      std::byte* quads = at + kInterleaved * parts.size_of_scale + r * kQuad;
      for (int64_t q = 0; q < parts.n_quads; ++q) {
        std::memcpy(quads + q * kInterleaved * kQuad, block + parts.quads + q * kQuad, kQuad);
      }
    }
    at += kInterleaved * parts.bytes;
  }
}

void read_interleaved_row(std::byte* to, const Tensor& from, int64_t i) {
  const BlockParts parts(from.dtype);
  const int64_t r = i % kInterleaved;
  const std::byte* strip = from.data + i / kInterleaved * strip_bytes(from);
  const int64_t n_blocks = from.row_bytes() / parts.bytes;
  for (int64_t b = 0; b < n_blocks; ++b) {
    std::memcpy(to + parts.scale, strip + r * parts.size_of_scale, parts.size_of_scale);
    const std::byte* quads = strip + kInterleaved * parts.size_of_scale + r * kQuad;
    for (int64_t q = 0; q < parts.n_quads; ++q) {
      std::memcpy(to + parts.quads + q * kQuad, quads + q * kInterleaved * kQuad, kQuad);
    }
    strip += kInterleaved * parts.bytes;
    to += parts.bytes;
  }
}

}  // namespace h2o
