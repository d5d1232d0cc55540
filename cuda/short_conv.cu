#include "cuda/convolution.cuh"
#include "cuda/operations.h"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// One block for some channels of a segment's rows.
__global__ void __launch_bounds__(kChannels)
    short_conv_kernel(float* out, const float* bcx, float* states, const float* conv,
                      int64_t state_floats, int width, int n_taps, const Segment* segments) {
  let_next_start();
  wait_for_previous();
  const int channel = blockIdx.y * kChannels + threadIdx.x;
  if (channel >= width) return;
  const Segment segment = segments[blockIdx.x];
  const float* const b = bcx + int64_t{segment.row} * 3 * width + channel;
  float* const y = out + int64_t{segment.row} * width + channel;
  convolve(
      states + segment.sequence * state_floats + channel, conv + channel, width, n_taps,
      segment.n_rows,
      [&](int i) {
        const float* const row = b + int64_t{i} * 3 * width;
        return float2{row[0] * row[2 * width], row[width]};
      },
      [&](int i, float c, float sum) { y[int64_t{i} * width] = c * sum; });
}

}  // namespace

void short_conv(const Stream& stream, const ShortConv& layer, const KvView& cache,
                const DeviceBatch& batch) {
  launch(stream, short_conv_kernel,
         dim3(static_cast<unsigned>(batch.n_segments), parts(layer.out.cols, kChannels)),
         dim3(kChannels), 0, layer.out.floats(), layer.bcx.floats(), cache.states,
         layer.conv.floats(), cache.state_floats, static_cast<int>(layer.out.cols),
         static_cast<int>(layer.conv.rows), batch.segments);
}

}  // namespace h2o::cuda
