#include <algorithm>

#include "cuda/attention/rope.cuh"
#include "cuda/gates.cuh"
#include "cuda/matmul/operands.cuh"
#include "cuda/matmul/round_group.cuh"
#include "cuda/operations.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;  // of blocks over elements
constexpr int kRotateThreads = 64;
constexpr int kNormThreads = 512;  // of a block for one row
constexpr int kHeld = 4;           // times four elements per thread in registers: rows up to 8192

// A row in registers, four elements at a time: thread t has those from 4 t, 4 (t + kNormThreads),
// ... on; zeros past the end. Elements that do not fit are read again.
class Row {
 public:
  __device__ Row(const float* x, int n) : x_(x), n_(n) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) held_[j] = four(first(j));
  }

  // Calls body(element) for the elements of this thread.
  template <class Body>
  __device__ void each(const Body& body) const {
    const auto each_of = [&](int i, const float4& v) {
      if (i < n_) body(v.x);
      if (i + 1 < n_) body(v.y);
      if (i + 2 < n_) body(v.z);
      if (i + 3 < n_) body(v.w);
    };
#pragma unroll
    for (int j = 0; j < kHeld; ++j) each_of(first(j), held_[j]);
    for (int i = first(kHeld); i < n_; i += kAtOnce) each_of(i, four(i));
  }

  // to[i] = f(element i, element i of each of `others`). The result is also written to the row of
  // this block in `operands` while it is in a register.
  template <class F, class... Rows>
  __device__ void write(float* to, const Operands& operands, const F& f,
                        const Rows&... others) const {
    const QuantizedRows& rounded = operands.rounded;
    static_assert(QuantizedRows::kChunk * QuantizedRows::kGroup % (4 * kWarp) == 0);
    const int end = rounded ? rounded.n_chunks * QuantizedRows::kChunk * QuantizedRows::kGroup : 0;
    const auto write_four = [&](int i, const auto& x, const auto&... o) {
      if (i >= max(n_, end)) return;
      const float4 y = i < n_
                           ? float4{f(x.x, o.x...), f(x.y, o.y...), f(x.z, o.z...), f(x.w, o.w...)}
                           : float4{};
      put(to, i, y);
      if (i < n_) write_halves(operands, int64_t{blockIdx.x} * n_ + i, y);
      if (i < end) round_fours(rounded, blockIdx.x, i / 4, y);
    };
#pragma unroll
    for (int j = 0; j < kHeld; ++j) write_four(first(j), held_[j], others.held_[j]...);
    for (int i = first(kHeld); i < max(n_, end); i += kAtOnce) {
      write_four(i, four(i), others.four(i)...);
    }
  }

 private:
  static constexpr int kAtOnce = 4 * kNormThreads;

  static __device__ int first(int j) { return 4 * threadIdx.x + j * kAtOnce; }

  // Tensors are 16-byte aligned, and so are rows whose length is a multiple of four.
  __device__ float4 four(int i) const {
    if (i >= n_) return {};
    if (n_ % 4 == 0) return *reinterpret_cast<const float4*>(x_ + i);
    const auto at = [&](int j) { return j < n_ ? x_[j] : 0; };
    return {at(i), at(i + 1), at(i + 2), at(i + 3)};
  }
  __device__ void put(float* to, int i, const float4& y) const {
    if (i >= n_) return;
    if (n_ % 4 == 0) {
      *reinterpret_cast<float4*>(to + i) = y;
      return;
    }
    to[i] = y.x;
    if (i + 1 < n_) to[i + 1] = y.y;
    if (i + 2 < n_) to[i + 2] = y.z;
    if (i + 3 < n_) to[i + 3] = y.w;
  }

  const float* x_;
  int n_;
  float4 held_[kHeld];
};

// One block per row. y may alias x: a thread only writes what it alone has read. Weights are not
// written by kernels, so they are loaded before wait_for_previous(), and before stores that would
// force reloading them.
__global__ void __launch_bounds__(kNormThreads, 1)
    layer_norm_kernel(float* y, const float* x, const float* weight, const float* bias, int n,
                      float eps, Operands operands) {
  __shared__ float scratch[kNormThreads / kWarp];
  let_next_start();
  const Row weights(weight, n), biases(bias, n);
  wait_for_previous();
  const Row row(x + int64_t{blockIdx.x} * n, n);
  float sum = 0;
  row.each([&](float v) { sum += v; });
  const float mean = block_sum(sum, scratch) / static_cast<float>(n);
  float squares = 0;
  row.each([&](float v) { squares = fmaf(v - mean, v - mean, squares); });
  const float scale = 1 / sqrtf(block_sum(squares, scratch) / static_cast<float>(n) + eps);
  row.write(
      y + int64_t{blockIdx.x} * n, operands,
      [&](float v, float w, float b) { return fmaf((v - mean) * scale, w, b); }, weights, biases);
}

__global__ void __launch_bounds__(kNormThreads)
    rms_norm_kernel(float* y, const float* x, const float* weight, int n, float eps,
                    Operands operands) {
  __shared__ float scratch[kNormThreads / kWarp];
  let_next_start();
  const Row weights(weight, n);
  wait_for_previous();
  const Row row(x + int64_t{blockIdx.x} * n, n);
  float squares = 0;
  row.each([&](float v) { squares = fmaf(v, v, squares); });
  const float scale = 1 / sqrtf(block_sum(squares, scratch) / static_cast<float>(n) + eps);
  row.write(
      y + int64_t{blockIdx.x} * n, operands, [&](float v, float w) { return v * scale * w; },
      weights);
}

// to[i, j] (+)= from[rows[i], j]; one block per row i.
template <bool kAdd>
__global__ void rows_kernel(float* to, const float* from, const int32_t* rows, int n) {
  let_next_start();
  wait_for_previous();
  float* t = to + int64_t{blockIdx.x} * n;
  const float* f = from + int64_t{rows[blockIdx.x]} * n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) t[i] = kAdd ? t[i] + f[i] : f[i];
}

// One block per row and head.
__global__ void copy_heads_kernel(Heads to, Heads from, int width) {
  let_next_start();
  wait_for_previous();
  const auto at = [](const Heads& heads) {
    return heads.first + blockIdx.x * heads.row_step + blockIdx.y * heads.head_step;
  };
  for (int i = threadIdx.x; i < width; i += blockDim.x) at(to)[i] = at(from)[i];
}

// x[i, j] *= 1 + scale * ln(1 + floor((positions[i] + offset) / length)); one block per row i.
__global__ void scale_rows_kernel(float* x, const int32_t* positions, int n, float scale,
                                  int32_t length, int32_t offset) {
  let_next_start();
  wait_for_previous();
  const int32_t lengths = (positions[blockIdx.x] + offset) / length;
  if (lengths == 0) return;
  const float factor = 1 + scale * logf(1 + static_cast<float>(lengths));
  float* row = x + int64_t{blockIdx.x} * n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] *= factor;
}

// One block per row: its heads of q and k.
__global__ void rotate_kernel(float* q, float* k, int n_q, int n_k, int head_dim,
                              const int32_t* positions, Rotation rotation) {
  let_next_start();
  wait_for_previous();
  for (int i = threadIdx.x; i < rotation.half; i += blockDim.x) {
    const float2 angle = rotation.angle(positions[blockIdx.x], i);
    for (int at = 0; at < n_q; at += head_dim) {
      rotation.apply(q + int64_t{blockIdx.x} * n_q + at, i, angle);
    }
    for (int at = 0; at < n_k; at += head_dim) {
      rotation.apply(k + int64_t{blockIdx.x} * n_k + at, i, angle);
    }
  }
}

// A logit and its token; NaN sorts lowest.
struct Best {
  float logit;
  int token;
  __device__ void consider(float other_logit, int other_token) {
    if (other_logit > logit || (other_logit == logit && other_token < token)) {
      *this = {other_logit, other_token};
    }
  }
};

// One block per row.
__global__ void __launch_bounds__(kNormThreads)
    argmax_kernel(int32_t* tokens, const float* x, int n) {
  __shared__ Best scratch[kNormThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const float* row = x + int64_t{blockIdx.x} * n;
  Best best{-INFINITY, n};
  for (int i = threadIdx.x; i < n; i += kNormThreads) best.consider(row[i], i);
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    best.consider(__shfl_xor_sync(kAllLanes, best.logit, apart),
                  __shfl_xor_sync(kAllLanes, best.token, apart));
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const Best& other : scratch) best.consider(other.logit, other.token);
  tokens[blockIdx.x] = best.token < n ? best.token : 0;  // all are NaN
}

struct Relu {
  __device__ float operator()(float x) const { return x > 0 ? x : 0; }
};

struct ReluSquared {
  __device__ float operator()(float x) const { return x > 0 ? x * x : 0; }
};

struct GeluErf {
  __device__ float operator()(float x) const { return x * 0.5f * (1 + erff(x * 0.70710678f)); }
};

struct Scale {
  float factor;
  __device__ float operator()(float x) const { return x * factor; }
};

struct Softcap {
  float cap;
  __device__ float operator()(float x) const { return cap * tanhf(x / cap); }
};

struct Clamp {
  float limit;
  __device__ float operator()(float x) const { return fminf(fmaxf(x, -limit), limit); }
};

struct XieluOf {
  Xielu f;
  __device__ float operator()(float x) const {
    const float bent = x > 0 ? f.alpha_p * x * x : f.alpha_n * (expm1f(fminf(x, f.eps)) - x);
    return fmaf(f.beta, x, bent);
  }
};

struct Add {
  __device__ float operator()(float y, float x) const { return y + x; }
};

template <class F, class... Values>
__device__ float apply(F f, float x, Values... gate) {
  return f(x, gate...);
}
template <class F, class... Values>
__device__ float4 apply(F f, float4 x, Values... gate) {
  return {f(x.x, gate.x...), f(x.y, gate.y...), f(x.z, gate.z...), f(x.w, gate.w...)};
}

// x = f(x), or f(x, gate); T is float or float4. Not __restrict__: the compiler would read `gate`,
// which the preceding kernel may still be writing, through the cache for constants.
template <class F, class T, class... Gate>
__global__ void map_kernel(F f, int64_t n, Operands operands, T* x, Gate... gate) {
  let_next_start();
  wait_for_previous();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const T y = apply(f, x[i], gate[i]...);
    x[i] = y;
    write_halves(operands, i * static_cast<int64_t>(sizeof(T) / sizeof(float)), y);
  }
}

// x = f(x), or f(x, gate), row by row, and rounded; blocks as in rounding_grid().
template <class F, class... Gate>
__global__ void __launch_bounds__(kThreads)
    rounded_kernel(QuantizedRows rounded, int n, F f, float* x, Gate... gate) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int row = blockIdx.y;
  const int64_t at = int64_t{row} * n + i;
  float y = 0;
  if (i < n) x[at] = y = f(x[at], gate[at]...);
  round_group(rounded, row, i / QuantizedRows::kGroup, y);
}

// Enough blocks for n elements, at most a few per multiprocessor.
dim3 blocks(const Stream& stream, int64_t n) {
  const int64_t most = int64_t{8} * stream.n_multiprocessors();
  return dim3(static_cast<unsigned>(std::clamp<int64_t>((n + kThreads - 1) / kThreads, 1, most)));
}

template <class T>
T* as(const Tensor& x) {
  return reinterpret_cast<T*>(x.data);
}

// x = f(x), or f(x, gate), and halves
template <class F, class... Gate>
void map(const Stream& stream, const Operands& operands, F f, const Tensor& x,
         const Gate&... gate) {
  const auto launch_by = [&]<class T>() {
    const int64_t n = x.rows * x.cols * static_cast<int64_t>(sizeof(float)) / sizeof(T);
    launch(stream, map_kernel<F, T, decltype(as<T>(gate))...>, blocks(stream, n), dim3(kThreads), 0,
           f, n, operands, as<T>(x), as<T>(gate)...);
  };
  const auto whole = [](const auto& data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  if (x.rows * x.cols % 4 == 0 && (whole(x.data) && ... && whole(gate.data))) {
    launch_by.template operator()<float4>();
  } else {
    launch_by.template operator()<float>();
  }
}

// The same, with all operands.
template <class F, class... Gate>
void activate(const Stream& stream, const Operands& operands, F f, const Tensor& x,
              const Gate&... gate) {
  if (const QuantizedRows& rounded = operands.rounded) {
    const dim3 grid = rounding_grid(rounded, x.rows, kThreads);
    launch(stream, rounded_kernel<F, decltype(gate.floats())...>, grid, dim3(kThreads), 0, rounded,
           static_cast<int>(x.cols), f, x.floats(), gate.floats()...);
  } else {
    map(stream, operands, f, x, gate...);
  }
}

dim3 rows_of(const Tensor& x) { return dim3(static_cast<unsigned>(x.rows)); }

}  // namespace

void add_positions(const Stream& stream, Tensor x, const Tensor& table, const int32_t* positions) {
  launch(stream, rows_kernel<true>, rows_of(x), dim3(kThreads), 0, x.floats(), table.floats(),
         positions, static_cast<int>(x.cols));
}

void scale_by_position(const Stream& stream, Tensor x, float scale, int32_t length, int32_t offset,
                       const int32_t* positions) {
  launch(stream, scale_rows_kernel, rows_of(x), dim3(kThreads), 0, x.floats(), positions,
         static_cast<int>(x.cols), scale, length, offset);
}

void rotate(const Stream& stream, const Tensor& q, const Tensor& k, int64_t head_dim,
            const Rope& rope, const int32_t* positions) {
  launch(stream, rotate_kernel, rows_of(q), dim3(kRotateThreads), 0, q.floats(), k.floats(),
         static_cast<int>(q.cols), static_cast<int>(k.cols), static_cast<int>(head_dim), positions,
         Rotation(rope));
}

void layer_norm(const Stream& stream, Tensor y, const Tensor& x, const Affine& norm, float eps,
                const Operands& operands) {
  launch(stream, layer_norm_kernel, rows_of(x), dim3(kNormThreads), 0, y.floats(), x.floats(),
         norm.weight.floats(), norm.bias.floats(), static_cast<int>(x.cols), eps, operands);
}

void rms_norm(const Stream& stream, Tensor y, const Tensor& x, const Tensor& weight, float eps,
              const Operands& operands) {
  launch(stream, rms_norm_kernel, rows_of(x), dim3(kNormThreads), 0, y.floats(), x.floats(),
         weight.floats(), static_cast<int>(x.cols), eps, operands);
}

void relu(const Stream& stream, Tensor x, const Operands& operands) {
  activate(stream, operands, Relu{}, x);
}
void relu_squared(const Stream& stream, Tensor x, const Operands& operands) {
  activate(stream, operands, ReluSquared{}, x);
}
void gelu_tanh(const Stream& stream, Tensor x, const Operands& operands) {
  activate(stream, operands, GeluTanh{}, x);
}
void gelu_erf(const Stream& stream, Tensor x, const Operands& operands) {
  activate(stream, operands, GeluErf{}, x);
}

void xielu(const Stream& stream, Tensor x, const Xielu& f, const Operands& operands) {
  activate(stream, operands, XieluOf{f}, x);
}

void clamp(const Stream& stream, Tensor x, float limit) { map(stream, {}, Clamp{limit}, x); }
void scale(const Stream& stream, Tensor x, float factor) { map(stream, {}, Scale{factor}, x); }
void softcap(const Stream& stream, Tensor x, float cap) { map(stream, {}, Softcap{cap}, x); }
void apply_gate(const Stream& stream, Gate kind, Tensor up, const Tensor& gate,
                const Operands& operands) {
  switch (kind) {
    case Gate::swiglu:
      return activate(stream, operands, Swiglu{}, up, gate);
    case Gate::swiglu_clamped:
      return activate(stream, operands, SwigluClamped{}, up, gate);
    case Gate::geglu:
      return activate(stream, operands, Geglu{}, up, gate);
    case Gate::sigmoid:
      return activate(stream, operands, SigmoidGate{}, up, gate);
  }
}
void add(const Stream& stream, Tensor y, const Tensor& x) { map(stream, {}, Add{}, y, x); }

void copy_heads(const Stream& stream, const Heads& to, const Heads& from, int64_t n_rows,
                int64_t n_heads, int64_t width) {
  const dim3 grid(static_cast<unsigned>(n_rows), static_cast<unsigned>(n_heads));
  launch(stream, copy_heads_kernel, grid, dim3(kThreads), 0, to, from, static_cast<int>(width));
}

void argmax(const Stream& stream, int32_t* tokens, const Tensor& x) {
  launch(stream, argmax_kernel, rows_of(x), dim3(kNormThreads), 0, tokens, x.floats(),
         static_cast<int>(x.cols));
}

void gather(const Stream& stream, Tensor y, const Tensor& x, const int32_t* rows) {
  launch(stream, rows_kernel<false>, rows_of(y), dim3(kThreads), 0, y.floats(), x.floats(), rows,
         static_cast<int>(x.cols));
}

}  // namespace h2o::cuda
