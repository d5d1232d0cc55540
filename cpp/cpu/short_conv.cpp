#include "cpu/short_conv.h"

#include <algorithm>

#include "cpu/convolution.h"

namespace h2o {

void short_conv(const CpuKernels& kernels, ThreadPool& pool, const ShortConv& layer,
                const KvView& cache, const Batch& batch) {
  const int64_t width = layer.out.cols;
  for_channels(pool, batch, width, [&](const Segment& segment, int64_t first, int64_t n) {
    float* const out = layer.out.floats() + segment.row * width + first;
    const float* const b = layer.bcx.floats() + segment.row * 3 * width + first;
    for (int64_t row = 0; row < segment.n_rows; ++row) {
      const float* const x = b + (row * 3 + 2) * width;
      std::copy_n(x, n, out + row * width);
      kernels.multiply(out + row * width, b + row * 3 * width, n);
    }
    kernels.convolve({
        .x = out,
        .before = cache.state(segment.sequence) + first,
        .weights = layer.conv.floats() + first,
        .n_rows = segment.n_rows,
        .n_taps = layer.conv.rows,
        .n = n,
        .stride = width,
        .silu = false,
    });
    for (int64_t row = 0; row < segment.n_rows; ++row) {
      kernels.multiply(out + row * width, b + (row * 3 + 1) * width, n);
    }
  });
}

}  // namespace h2o
