#include "cuda/convolution.cuh"
#include "cuda/gates.cuh"
#include "cuda/operations.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kGroups = 16;                        // of rows of a state, in a block
constexpr int kThreads = kGroups * kDeltaColumns;  // of that block
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxRows = kMaxDeltaHead / kGroups;  // of a group
constexpr int kCopyThreads = 256;

// Parts of a DeltaNet and its states that the kernels need.
struct Layer {
  float *out, *qkv, *alpha, *beta, *states;
  const float *conv, *a, *dt_bias;
  int64_t state_floats, matrix_floats;
  int n_channels, n_taps, n_k_heads, n_v_heads, head_dim;
  bool adjacent;
  const Segment* segments;
  int first_row;  // of the turn

  __device__ float* state(const Segment& segment) const {
    return states + segment.sequence * state_floats;
  }
  __device__ float* row(int64_t i) const { return qkv + i * n_channels; }
  __device__ int k_head(int v_head) const {  // as DeltaNet::k_head()
    return adjacent ? v_head / (n_v_heads / n_k_heads) : v_head % n_k_heads;
  }
};

// One block for some channels of a segment's rows, in place.
__global__ void __launch_bounds__(kChannels) convolve_kernel(Layer layer) {
  let_next_start();
  wait_for_previous();
  const int channel = blockIdx.y * kChannels + threadIdx.x;
  if (channel >= layer.n_channels) return;
  const Segment segment = layer.segments[blockIdx.x];
  const auto x = [&](int i) -> float& { return layer.row(segment.row + i)[channel]; };
  convolve(
      layer.state(segment) + layer.matrix_floats + channel, layer.conv + channel, layer.n_channels,
      layer.n_taps, segment.n_rows, [&](int i) { return float2{x(i), 0}; },
      [&](int i, float, float sum) { x(i) = sum * sigmoid(sum); });
}

// One block of a warp for each q and k of a row, and one for the row's gates.
__global__ void __launch_bounds__(kWarp) normalize_kernel(Layer layer) {
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.y;
  const int64_t row = layer.first_row + static_cast<int64_t>(blockIdx.x);
  if (head == 2 * layer.n_k_heads) {
    for (int h = threadIdx.x; h < layer.n_v_heads; h += kWarp) {
      const int64_t i = row * layer.n_v_heads + h;
      const float x = layer.alpha[i] + layer.dt_bias[h];
      layer.alpha[i] = expf(layer.a[h] * (x > 20 ? x : log1pf(expf(x))));
      layer.beta[i] = sigmoid(layer.beta[i]);
    }
    return;
  }
  float* const x = layer.row(row) + head * layer.head_dim;
  float sum = 0;
  for (int i = threadIdx.x; i < layer.head_dim; i += kWarp) sum = fmaf(x[i], x[i], sum);
  const float length = head < layer.n_k_heads ? 1 / sqrtf(static_cast<float>(layer.head_dim)) : 1;
  const float factor = length / sqrtf(warp_sum(sum) + 1e-6f);
  for (int i = threadIdx.x; i < layer.head_dim; i += kWarp) x[i] *= factor;
}

// Sums over the groups of a column, in every thread of the column; reads `shared` after a barrier.
__device__ float column_sum(float x, float (*shared)[kDeltaColumns]) {
  x += __shfl_xor_sync(kAllLanes, x, kDeltaColumns);
  const int column = threadIdx.x % kDeltaColumns;
  if (threadIdx.x % kWarp < kDeltaColumns) shared[threadIdx.x / kWarp][column] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp][column];
  return sum;
}

// One block for kDeltaColumns columns of a value head's state, which stay in registers: a thread
// has every kGroups-th row of a column.
__global__ void __launch_bounds__(kThreads) delta_rule_kernel(Layer layer) {
  static_assert(2 * kDeltaColumns == kWarp);
  __shared__ float q[kMaxDeltaHead], k[kMaxDeltaHead];
  __shared__ float read[kWarps][kDeltaColumns], sums[kWarps][kDeltaColumns];
  let_next_start();
  wait_for_previous();
  const Segment segment = layer.segments[blockIdx.x];
  const int head = blockIdx.y, head_dim = layer.head_dim;
  const int column = threadIdx.x % kDeltaColumns, group = threadIdx.x / kDeltaColumns;
  const int first = head * head_dim + blockIdx.z * kDeltaColumns;  // column of all heads'
  const int n = head_dim / kGroups;
  float* const state = layer.state(segment) + int64_t{first} * head_dim + threadIdx.x;
  float s[kMaxRows];
#pragma unroll
  for (int j = 0; j < kMaxRows; ++j) s[j] = j < n ? state[j * kThreads] : 0;

  // Each row is loaded during the previous one.
  struct Row {
    float q, k, v, decay, beta;
  } next{};
  const int k_width = layer.n_k_heads * head_dim;
  const bool has_element = static_cast<int>(threadIdx.x) < head_dim;
  const auto load = [&](int64_t row) {
    const float* const x = layer.row(row);
    const float* const from = x + layer.k_head(head) * head_dim + threadIdx.x;
    if (has_element) {
      next.q = from[0];
      next.k = from[k_width];
    }
    next.v = x[2 * k_width + first + column];
    next.decay = layer.alpha[row * layer.n_v_heads + head];
    next.beta = layer.beta[row * layer.n_v_heads + head];
  };
  load(segment.row);
  for (int i = 0; i < segment.n_rows; ++i) {
    const int64_t row = segment.row + i;
    if (has_element) {
      q[threadIdx.x] = next.q;
      k[threadIdx.x] = next.k;
    }
    const float v = next.v, decay = next.decay, beta = next.beta;
    __syncthreads();
    if (i + 1 < segment.n_rows) load(row + 1);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kMaxRows; ++j) {
      if (j < n) sum = fmaf(s[j], k[j * kGroups + group], sum);
    }
    const float delta = beta * (v - decay * column_sum(sum, read));
    sum = 0;
#pragma unroll
    for (int j = 0; j < kMaxRows; ++j) {
      if (j >= n) continue;
      s[j] = fmaf(delta, k[j * kGroups + group], decay * s[j]);
      sum = fmaf(s[j], q[j * kGroups + group], sum);
    }
    sum = column_sum(sum, sums);
    if (group == 0) layer.out[row * layer.n_v_heads * head_dim + first + column] = sum;
  }
#pragma unroll
  for (int j = 0; j < kMaxRows; ++j) {
    if (j < n) state[j * kThreads] = s[j];
  }
}

// Rows along x, since there may be more than 65,535 of them, and their columns along y.
__global__ void __launch_bounds__(kCopyThreads)
    split_blocks_kernel(float* a, float* b, const float* x, int width, int n) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.y * kCopyThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t at = int64_t{blockIdx.x} * n + i;
  const float* const from = x + int64_t{blockIdx.x} * 2 * n + i / width * 2 * width + i % width;
  a[at] = from[0];
  b[at] = from[width];
}

}  // namespace

void delta_net(const Stream& stream, const DeltaNet& layer, const KvView& cache,
               const DeviceBatch& batch) {
  const Layer all{.out = layer.out.floats(),
                  .qkv = layer.qkv.floats(),
                  .alpha = layer.alpha.floats(),
                  .beta = layer.beta.floats(),
                  .states = cache.states,
                  .conv = layer.conv.floats(),
                  .a = layer.a.floats(),
                  .dt_bias = layer.dt_bias.floats(),
                  .state_floats = cache.state_floats,
                  .matrix_floats = layer.matrix_floats(),
                  .n_channels = static_cast<int>(layer.qkv.cols),
                  .n_taps = static_cast<int>(layer.conv.rows),
                  .n_k_heads = layer.n_k_heads,
                  .n_v_heads = layer.n_v_heads,
                  .head_dim = layer.head_dim,
                  .adjacent = layer.adjacent,
                  .segments = batch.segments,
                  .first_row = batch.first_row};
  const auto n = static_cast<unsigned>(batch.n_segments);
  launch(stream, convolve_kernel, dim3(n, parts(layer.qkv.cols, kChannels)), dim3(kChannels), 0,
         all);
  launch(stream, normalize_kernel, dim3(parts(batch.n_rows, 1), 2 * layer.n_k_heads + 1),
         dim3(kWarp), 0, all);
  launch(stream, delta_rule_kernel, dim3(n, layer.n_v_heads, layer.head_dim / kDeltaColumns),
         dim3(kThreads), 0, all);
}

void split_blocks(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& x,
                  int64_t width) {
  launch(stream, split_blocks_kernel, dim3(parts(x.rows, 1), parts(a.cols, kCopyThreads)),
         dim3(kCopyThreads), 0, a.floats(), b.floats(), x.floats(), static_cast<int>(width),
         static_cast<int>(a.cols));
}

}  // namespace h2o::cuda
