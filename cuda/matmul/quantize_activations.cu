#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 8;  // lanes of a group, which have four elements each

// The most significant of four bytes is the last.
__device__ uint32_t pack(int a, int b, int c, int d) {
  return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | static_cast<uint32_t>(d) << 24;
}

// As quantize_rows of cpu/int8_matmul-inl.h.
__global__ void __launch_bounds__(kThreads)
    round_kernel(QuantizedRows to, const float* x, int64_t n_in) {
  let_next_start();
  wait_for_previous();
  const int g = (blockIdx.x * kThreads + threadIdx.x) / kParts;
  const int part = threadIdx.x % kParts;
  const int row = blockIdx.y;

  float4 v{};
  if (g < n_in / 32) v = *reinterpret_cast<const float4*>(x + row * n_in + g * 32 + part * 4);
  const float nothing = v.x * 0 + v.y * 0 + v.z * 0 + v.w * 0;  // or NaN
  const float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  const float d = warp_max<kParts>(largest) / 127 + warp_sum<kParts>(nothing);
  // Below the smallest normal number 1 / d may overflow: that is rounded to zero.
  const float inverse = d >= 0x1p-126f ? 1 / d : 0;
  const auto rounded = [&](float value) {
    return static_cast<int>(fminf(fmaxf(rintf(value * inverse), -127.0f), 127.0f));
  };
  const int q[4] = {rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w)};

  int sum = q[0] + q[1] + q[2] + q[3];
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  const int second = __shfl_xor_sync(kAllLanes, sum, 4);

  const int chunk = g / QuantizedRows::kChunk;
  const int lane = g % QuantizedRows::kChunk;
  reinterpret_cast<uint32_t*>(to.half(row, chunk, lane, part / 4))[part % 4] =
      pack(q[0], q[1], q[2], q[3]);
  if (part == 0) {
    *to.group(row, chunk, lane) = {d, {static_cast<int16_t>(sum), static_cast<int16_t>(second)}};
  }
}

}  // namespace

void quantize_rows(const Stream& stream, const QuantizedRows& to, const Tensor& x) {
  static_assert(kThreads == QuantizedRows::kChunk * kParts);
  const dim3 grid(static_cast<unsigned>(to.n_chunks), static_cast<unsigned>(x.rows));
  launch(stream, round_kernel, grid, kThreads, 0, to, x.floats(), x.cols);
}

}  // namespace h2o::cuda
