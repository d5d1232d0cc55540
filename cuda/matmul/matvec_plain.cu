#include <cuda_fp16.h>

#include "cuda/matmul/formats.cuh"
#include "cuda/matmul/matvec.cuh"

namespace h2o::cuda {
namespace {

// The rows [n_rows, stride] of x; n_rows is at most the kernel's n.
struct FloatRows {
  const float* x;
  int64_t stride;
  int n_rows;

  // Offset of row r < 8: 32 bits are enough, and take fewer registers.
  __device__ int offset(int r) const {
    return r == 0 ? 0 : min(r, n_rows - 1) * static_cast<int>(stride);
  }
  __device__ FloatRows from(int64_t first) const { return {x + first * stride, stride, n_rows}; }
};

// Two elements of 16 bits.
__device__ void unpack_two(float* to, uint32_t pair, F16) {
  to[0] = low_half(pair);
  to[1] = high_half(pair);
}
__device__ void unpack_two(float* to, uint32_t pair, BF16) {
  to[0] = __uint_as_float(pair << 16);
  to[1] = __uint_as_float(pair & 0xffff0000);
}

__device__ float as_float(float x) { return x; }
__device__ float as_float(F16 x) { return to_float(x); }
__device__ float as_float(BF16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

template <class T>
struct Plain {
  using Raw = uint4;
  using X = FloatRows;
  static constexpr int kUnit = 16 / sizeof(T);
  static constexpr int kBytesOf8 = 8 * 16;
  static constexpr int operations(int n) { return (sizeof(T) < 4 ? kUnit : 0) + n * kUnit; }
  struct Unpacked {
    float w[kUnit];
  };

  template <int n>
  static constexpr int kWide = std::min(n, 4);
  template <int n>
  static constexpr int kAhead = 8 / kWide<n>;
  static constexpr int blocks(int n) {
    return n == 1 ? 8 : n == 2 ? 4 : n == 8 && sizeof(T) == 4 ? 2 : 3;
  }
  static constexpr int kExpertBlocks = 4;

  // With 8 rows, reading x from L1 takes longer than reading the weights from memory, unless the
  // lanes of a warp read contiguous elements. A unit of 16-bit weights is then two runs of four:
  // one in the first half of its chunk, one in the second.
  template <int n>
  static constexpr bool kRuns = n == 8 && kUnit == 8;
  template <int n>
  __device__ static int2 runs(int n_units, int i) {  // the first elements of each
    if constexpr (!kRuns<n>) return {i * kUnit, i * kUnit + 4};
    const int before = i / kWarp * kWarp;
    const int first = 4 * (before + i);
    return {first, first + 4 * min(kWarp, n_units - before)};
  }

  template <int n>
  __device__ static Raw load(const std::byte* row, int n_units, int i) {
    Raw raw;
    if constexpr (kRuns<n>) {
      const int2 at = runs<n>(n_units, i);
      uint2 first, second;
      load_once(row + int64_t{at.x} * 2, &first);
      load_once(row + int64_t{at.y} * 2, &second);
      raw = {first.x, first.y, second.x, second.y};
    } else {
      load_once(row + int64_t{i} * 16, &raw);
    }
    return raw;
  }
  __device__ static Unpacked unpack(const Raw& raw, int, bool valid) {
    Unpacked u;
    const uint32_t words[4] = {valid ? raw.x : 0, valid ? raw.y : 0, valid ? raw.z : 0,
                               valid ? raw.w : 0};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (sizeof(T) == 4) {
        u.w[k] = __uint_as_float(words[k]);
      } else {
        unpack_two(u.w + 2 * k, words[k], T{});
      }
    }
    return u;
  }
  template <int n, int wide>
  __device__ static void multiply(float* sums, const Unpacked* w, const FloatRows& x, int n_units,
                                  int chunk, int lane) {
    const int2 at = runs<n>(n_units, min(chunk * kWarp + lane, n_units - 1));
#pragma unroll
    for (int r = 0; r < n; ++r) {
      const int row = x.offset(r);
#pragma unroll
      for (int k = 0; k < kUnit; k += 4) {
        const auto v = *reinterpret_cast<const float4*>(x.x + (row + (k == 0 ? at.x : at.y)));
#pragma unroll
        for (int j = 0; j < wide; ++j) {
          float& total = sums[j * n + r];
          total += w[j].w[k] * v.x;
          total += w[j].w[k + 1] * v.y;
          total += w[j].w[k + 2] * v.z;
          total += w[j].w[k + 3] * v.w;
        }
      }
    }
  }
};

// The same one element at a time, for rows that are not 16-byte aligned.
template <class T>
struct Unaligned {
  using Raw = T;
  using X = FloatRows;
  static constexpr int kUnit = 1;
  using Unpacked = float;

  template <int>
  static constexpr int kWide = 1;
  template <int>
  static constexpr int kAhead = 8;
  static constexpr int blocks(int) { return 3; }
  static constexpr int kExpertBlocks = 4;

  template <int>
  __device__ static Raw load(const std::byte* row, int, int i) {
    return reinterpret_cast<const T*>(row)[i];
  }
  __device__ static float unpack(T raw, int, bool valid) { return valid ? as_float(raw) : 0; }
  template <int n, int wide>
  __device__ static void multiply(float* sums, const float* w, const FloatRows& x, int n_units,
                                  int chunk, int lane) {
    const int i = min(chunk * kWarp + lane, n_units - 1);
#pragma unroll
    for (int r = 0; r < n; ++r) {
      const float v = x.x[x.offset(r) + i];
#pragma unroll
      for (int j = 0; j < wide; ++j) sums[j * n + r] += w[j] * v;
    }
  }
};

template <class Type>
void matvec_by(const Stream& stream, std::span<const DeviceProduct> products,
               const MatvecRows& rows, const FloatRows& x) {
  if (rows.experts) {
    launch_experts<Type>(stream, products, rows, x);
  } else if (rows.gate) {
    launch_matvec<Type, true>(stream, products, rows, x);
  } else {
    launch_matvec<Type>(stream, products, rows, x);
  }
}

template <class T>
void matvec_of(const Stream& stream, std::span<const DeviceProduct> products,
               const MatvecRows& rows, const FloatRows& x) {
  const auto aligned = [](const void* p, int64_t row_bytes) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && row_bytes % 16 == 0;
  };
  const bool all = std::ranges::all_of(
      products, [&](const DeviceProduct& m) { return aligned(m.w.data, m.w.row_bytes); });
  if (all && aligned(x.x, x.stride * 4)) {
    matvec_by<Plain<T>>(stream, products, rows, x);
  } else {
    matvec_by<Unaligned<T>>(stream, products, rows, x);
  }
}

}  // namespace

void matvec(const Stream& stream, std::span<const DeviceProduct> products, const MatvecRows& rows,
            const float* x) {
  const Weights& first = products.front().w;
  const FloatRows from{x, first.cols, static_cast<int>(rows.n)};
  switch (first.dtype) {
    case DType::f16:
      return matvec_of<F16>(stream, products, rows, from);
    case DType::bf16:
      return matvec_of<BF16>(stream, products, rows, from);
    default:
      return matvec_of<float>(stream, products, rows, from);
  }
}

}  // namespace h2o::cuda
