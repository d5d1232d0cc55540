#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/matmul/dequantize.h"
#include "cuda/matmul/half_values.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;

// Number of blocks for n elements.
unsigned blocks_of(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

// Rows along x, since there may be more than 65,535 of them, and their elements along y.
dim3 row_blocks(int64_t n_rows, int64_t n) { return {static_cast<unsigned>(n_rows), blocks_of(n)}; }

__device__ int64_t thread_index() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ int64_t index_in_row() { return int64_t{blockIdx.y} * kThreads + threadIdx.x; }

// One group per thread. Groups pass through shared memory, so that a warp writes adjacent bytes.
template <class Format>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(__half* to, Weights w, int64_t begin, int64_t n) {
  constexpr int kPieces = kGroup * 2 / 16;            // of 16 bytes
  __shared__ uint4 pieces[kThreads * (kPieces + 1)];  // a stride without bank conflicts
  let_next_start();
  const int n_groups = static_cast<int>(w.cols / kGroup);
  const int64_t index = thread_index();
  const int64_t row = index / n_groups;
  const int g = static_cast<int>(index % n_groups);
  typename Format::Raw raw;
  if (row < n) raw = Format::load_raw(w.row(begin + row), n_groups, g);
  wait_for_previous();
  if (row < n) {
    const auto group = Format::unpack(raw, g);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      pieces[threadIdx.x * (kPieces + 1) + j] = half_values<Format>(group, j);
    }
  }
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * kThreads * kPieces;
  const int64_t end = n * n_groups * kPieces;
  auto* const out = reinterpret_cast<uint4*>(to);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int i = j * kThreads + threadIdx.x;
    if (first + i < end) out[first + i] = pieces[i / kPieces * (kPieces + 1) + i % kPieces];
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(float* x, Weights table, const int32_t* tokens) {
  let_next_start();
  wait_for_previous();
  const int n_groups = static_cast<int>(table.cols / kGroup);
  const int64_t g = index_in_row();
  if (g >= n_groups) return;
  const auto raw = Format::load_raw(table.row(tokens[blockIdx.x]), n_groups, static_cast<int>(g));
  const auto group = Format::unpack(raw, static_cast<int>(g));
  auto* out = reinterpret_cast<float4*>(x + int64_t{blockIdx.x} * table.cols + g * kGroup);
#pragma unroll
  for (int j = 0; j < 8; ++j) out[j] = values<Format>(group, j);
}

__device__ float as_float(float x) { return x; }
__device__ float as_float(F16 x) { return to_float(x); }
__device__ float as_float(BF16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

template <class T>
__global__ void __launch_bounds__(kThreads)
    embed_plain_kernel(float* x, Weights table, const int32_t* tokens) {
  let_next_start();
  wait_for_previous();
  const int64_t i = index_in_row();
  if (i >= table.cols) return;
  const auto* row = reinterpret_cast<const T*>(table.row(tokens[blockIdx.x]));
  x[int64_t{blockIdx.x} * table.cols + i] = as_float(row[i]);
}

__device__ void store_as(__half* to, float x) { *to = saturated(x); }
__device__ void store_as(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// kEach elements per thread, 1 or 4: with one, a multiprocessor would have 8 KB in flight.
template <class T, int kEach>
__global__ void __launch_bounds__(kThreads) convert_kernel(T* to, const float* x, int64_t n) {
  let_next_start();
  wait_for_previous();
  const int64_t i = thread_index() * kEach;
  if (i >= n) return;
  if constexpr (kEach == 1) {
    store_as(to + i, x[i]);
  } else {
    const auto from = *reinterpret_cast<const float4*>(x + i);
    alignas(8) T four[4];
    store_as(four, from.x);
    store_as(four + 1, from.y);
    store_as(four + 2, from.z);
    store_as(four + 3, from.w);
    *reinterpret_cast<uint2*>(to + i) = *reinterpret_cast<const uint2*>(four);
  }
}

__global__ void __launch_bounds__(kThreads)
    bias_kernel(float* y, int64_t y_stride, const float* bias, int64_t n, bool add) {
  let_next_start();
  const int64_t i = index_in_row();
  const float value = i < n ? bias[i] : 0;
  wait_for_previous();
  if (i >= n) return;
  float* to = y + int64_t{blockIdx.x} * y_stride + i;
  *to = add ? *to + value : value;
}

}  // namespace

void dequantize(const Stream& stream, void* to, const Weights& w, int64_t begin, int64_t n) {
  with_format(w.dtype, [&]<class Format>() {
    launch(stream, dequantize_kernel<Format>, blocks_of(n * w.cols / kGroup), kThreads, 0,
           static_cast<__half*>(to), w, begin, n);
  });
}

void embed(const Stream& stream, const Tensor& x, const Weights& table, const int32_t* tokens) {
  const auto plain = [&](auto kernel) {
    launch(stream, kernel, row_blocks(x.rows, table.cols), kThreads, 0, x.floats(), table, tokens);
  };
  switch (table.dtype) {
    case DType::f32:
      return plain(embed_plain_kernel<float>);
    case DType::f16:
      return plain(embed_plain_kernel<F16>);
    case DType::bf16:
      return plain(embed_plain_kernel<BF16>);
    default:
      with_format(table.dtype, [&]<class Format>() {
        launch(stream, embed_kernel<Format>, row_blocks(x.rows, table.cols / kGroup), kThreads, 0,
               x.floats(), table, tokens);
      });
  }
}

void convert(const Stream& stream, void* to, DType dtype, const Tensor& x) {
  const int64_t n = x.rows * x.cols;
  const auto convert_to = [&]<class T>(T* halves) {
    if (n % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0) {
      launch(stream, convert_kernel<T, 4>, blocks_of(n / 4), kThreads, 0, halves, x.floats(), n);
    } else {
      launch(stream, convert_kernel<T, 1>, blocks_of(n), kThreads, 0, halves, x.floats(), n);
    }
  };
  if (dtype == DType::bf16) {
    convert_to(static_cast<__nv_bfloat16*>(to));
  } else {
    convert_to(static_cast<__half*>(to));
  }
}

void start_with_bias(const Stream& stream, float* y, int64_t stride, int64_t n_rows,
                     const float* bias, int64_t n, bool add) {
  launch(stream, bias_kernel, row_blocks(n_rows, n), kThreads, 0, y, stride, bias, n, add);
}

}  // namespace h2o::cuda
