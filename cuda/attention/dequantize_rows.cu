#include "cuda/attention/prefill.h"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/attention/stored_row.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"

namespace h2o::cuda {
namespace {

constexpr int kWarps = 8;  // per block; one key each

// Clamped to f16's range: probabilities must be finite.
__device__ void store_pair(uint16_t* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = pack_halves(within_half(low), within_half(high));
}

__global__ void __launch_bounds__(kWarps* kWarp) dequantize_rows_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const auto i = static_cast<int32_t>(block.tile * kWarps + threadIdx.x / kWarp);
  if (i >= keys.kept + step.segment.n_rows) return;
  const StoredRow row(step, keys, i);
  const int64_t to = step.first_unpacked(kv_head) + int64_t{i} * step.tile_dim;
  for (int c = threadIdx.x % kWarp * 2; c < step.tile_dim; c += 2 * kWarp) {
    const bool inside = c < step.cache.head_dim;
    store_pair(step.k_halves + to + c, inside ? row.key(c) : 0, inside ? row.key(c + 1) : 0);
    store_pair(step.v_halves + to + c, inside ? row.value(c) : 0, inside ? row.value(c + 1) : 0);
  }
}

}  // namespace

void dequantize_rows(const Stream& stream, const PrefillStep& step) {
  launch(stream, dequantize_rows_kernel, Tiles::grid(step.cache, step.max_keys(), kWarps),
         dim3(kWarps * kWarp), 0, step);
}

}  // namespace h2o::cuda
