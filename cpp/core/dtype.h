// Element types. The numbers are GGUF's type ids, except those of types that no file has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace h2o {

enum class DType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
  q1_0 = 41,
  q2_0 = 42,
  q2 = 0x100,  // of an archive only: values
  q3 = 0x101,  // keys; see KeyGrid
};

// Memory layout of a GGUF tensor type: `block_size` elements in `block_bytes` bytes.
struct DTypeInfo {
  std::string_view name;  // as in GGUF: "F32", "Q8_0"
  int64_t block_size = 0;
  int64_t block_bytes = 0;
};

// The layout of GGUF type `id`, or nullptr if the id is unknown. Includes types that h2o cannot
// compute on, so that files containing them can be described.
const DTypeInfo* find_dtype(uint32_t id);

// The layout of a type that h2o computes on.
const DTypeInfo& info(DType dtype);

// Blocks of elements that share a scale, not floats.
inline bool is_quantized(DType dtype) { return info(dtype).block_size > 1; }

// Bytes per block of an interleaved tensor: those of the file format, except for types that are
// expanded because unpacking them is slower than reading more bytes.
int64_t interleaved_block_bytes(DType dtype);

// The types that kernels support, and whether GGUF type `id` is one of them.
std::span<const DType> computable_dtypes();
bool is_computable(uint32_t id);
std::string dtype_names(std::span<const DType> dtypes);  // "F32, F16, ..."

// The one of `dtypes` with this name, as in GGUF.
std::optional<DType> find_dtype(std::string_view name, std::span<const DType> dtypes);

// Bytes of `n` consecutive elements; n must be a multiple of the block size.
inline int64_t byte_size(DType dtype, int64_t n) {
  const DTypeInfo& layout = info(dtype);
  return n / layout.block_size * layout.block_bytes;
}

}  // namespace h2o
