#include "cpu/recurrent.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "cpu/attention/drafts.h"

namespace h2o {
namespace {

// Columns of a part: few, so that many threads have some.
constexpr int64_t kBlocks = 4;  // of kDeltaColumns

// Cost of each number of a state, in multiply-adds.
constexpr int64_t kStateCost = 4;

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// The rows of consecutive segments.
struct Rows {
  explicit Rows(std::span<const Segment> all)
      : segments(all), begin(all[0].row), n(all.back().row + all.back().n_rows - begin) {}

  std::span<const Segment> segments;
  int64_t begin, n;
};

// Calls body(rows) for each turn of a batch. The states that drafts will overwrite are copied.
template <class Body>
void for_turns(ThreadPool& pool, const KvView& cache, const Batch& batch, const Body& body) {
  for (int32_t turn = 0; turn < batch.n_turns(); ++turn) {
    const std::span<const Segment> segments = batch.turn(turn);
    if (segments.empty()) continue;
    if (turn > 0) {
      const KvUndo undo = batch.journal->layer(cache.layer);
      pool.parallel_for(std::ssize(segments),
                        kStateCost * std::ssize(segments) * cache.state_floats,
                        [&](int, int64_t begin, int64_t end) {
                          for (int64_t i = begin; i < end; ++i)
                            record_state(cache, undo, segments[i]);
                        });
    }
    body(Rows(segments));
  }
}

// Calls body(segment, first, n) for all rows of each segment and some of its channels at a time:
// few, so that many threads have some.
template <class Body>
void for_channels(ThreadPool& pool, const Rows& rows, int64_t n_channels, const Body& body) {
  constexpr int64_t kChannels = 256;
  constexpr int64_t kCost = 64;  // of a channel of a row, in multiply-adds
  const int64_t n_parts = parts(n_channels, kChannels);
  pool.parallel_for(std::ssize(rows.segments) * n_parts, kCost * rows.n * n_channels,
                    [&](int, int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                        const int64_t first = i % n_parts * kChannels;
                        body(rows.segments[i / n_parts], first,
                             std::min(kChannels, n_channels - first));
                      }
                    });
}

// Some columns of a head's state, of one sequence.
struct Part {
  const Segment& segment;
  int32_t head;
  int64_t column;    // the first, among those of all heads
  int64_t n_blocks;  // of kDeltaColumns
};

// Calls body(part) for all columns of the states of all heads; n_floats: of a sequence's states.
template <class Body>
void for_blocks(ThreadPool& pool, const Rows& rows, int64_t n_heads, int64_t head_dim,
                int64_t n_floats, const Body& body) {
  const int64_t n_blocks = head_dim / kDeltaColumns;
  const int64_t per_head = parts(n_blocks, kBlocks);
  const int64_t per_segment = n_heads * per_head;
  pool.parallel_for(
      std::ssize(rows.segments) * per_segment, kStateCost * rows.n * n_floats,
      [&](int, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const auto head = static_cast<int32_t>(i % per_segment / per_head);
          const int64_t block = i % per_head * kBlocks;
          body(Part{rows.segments[i / per_segment], head, head * head_dim + block * kDeltaColumns,
                    std::min(kBlocks, n_blocks - block)});
        }
      });
}

void delta_net(const CpuKernels& kernels, ThreadPool& pool, const DeltaNet& layer,
               const KvView& cache, const Rows& rows) {
  const int64_t n_channels = layer.qkv.cols;
  const int64_t head_dim = layer.head_dim;
  const int64_t k_width = layer.n_k_heads * head_dim;
  const auto state = [&](const Segment& segment) { return cache.state(segment.sequence); };

  for_channels(pool, rows, n_channels, [&](const Segment& segment, int64_t first, int64_t n) {
    kernels.convolve({
        .x = layer.qkv.floats() + segment.row * n_channels + first,
        .before = state(segment) + layer.matrix_floats() + first,
        .weights = layer.conv.floats() + first,
        .bias = nullptr,
        .n_rows = segment.n_rows,
        .n_taps = layer.conv.rows,
        .n = n,
        .stride = n_channels,
        .silu = true,
    });
  });

  pool.parallel_for(rows.n, rows.n * n_channels, [&](int, int64_t begin, int64_t end) {
    const float q_length = 1 / std::sqrt(static_cast<float>(head_dim));
    for (int64_t row = rows.begin + begin; row < rows.begin + end; ++row) {
      float* const q = layer.qkv.floats() + row * n_channels;
      for (int64_t h = 0; h < 2 * layer.n_k_heads; ++h) {
        kernels.normalize(q + h * head_dim, head_dim, h < layer.n_k_heads ? q_length : 1);
      }
      for (int64_t h = 0; h < layer.n_v_heads; ++h) {
        float& alpha = layer.alpha.floats()[row * layer.n_v_heads + h];
        float& beta = layer.beta.floats()[row * layer.n_v_heads + h];
        alpha = std::exp(layer.a.floats()[h] * softplus(alpha + layer.dt_bias.floats()[h]));
        beta = 1 / (1 + std::exp(-beta));
      }
    }
  });

  for_blocks(pool, rows, layer.n_v_heads, head_dim, layer.matrix_floats(), [&](const Part& part) {
    const Segment& segment = part.segment;
    const float* const qkv = layer.qkv.floats() + segment.row * n_channels;
    const int64_t k_head = layer.k_head(part.head);
    const int64_t gate = segment.row * layer.n_v_heads + part.head;
    kernels.delta_rule({
        .state = state(segment) + head_dim * part.column,
        .q = qkv + k_head * head_dim,
        .k = qkv + k_width + k_head * head_dim,
        .v = qkv + 2 * k_width + part.column,
        .out = layer.out.floats() + segment.row * layer.out.cols + part.column,
        .decay = layer.alpha.floats() + gate,
        .beta = layer.beta.floats() + gate,
        .n_rows = segment.n_rows,
        .stride = n_channels,
        .out_stride = layer.out.cols,
        .n_v_heads = layer.n_v_heads,
        .head_dim = head_dim,
        .n_blocks = part.n_blocks,
    });
  });
}

void short_conv(const CpuKernels& kernels, ThreadPool& pool, const ShortConv& layer,
                const KvView& cache, const Rows& rows) {
  const int64_t width = layer.out.cols;
  for_channels(pool, rows, width, [&](const Segment& segment, int64_t first, int64_t n) {
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
        .bias = nullptr,
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

void state_space(const CpuKernels& kernels, ThreadPool& pool, const StateSpace& layer,
                 const KvView& cache, const Rows& rows) {
  const int64_t n_channels = layer.xbc.cols, width = layer.out.cols;
  const int64_t d_state = layer.d_state, n_heads = layer.n_heads;
  const auto state = [&](const Segment& segment) { return cache.state(segment.sequence); };

  for_channels(pool, rows, n_channels, [&](const Segment& segment, int64_t first, int64_t n) {
    kernels.convolve({
        .x = layer.xbc.floats() + segment.row * n_channels + first,
        .before = state(segment) + layer.matrix_floats() + first,
        .weights = layer.conv.floats() + first,
        .bias = layer.conv_bias ? layer.conv_bias.floats() + first : nullptr,
        .n_rows = segment.n_rows,
        .n_taps = layer.conv.rows,
        .n = n,
        .stride = n_channels,
        .silu = true,
    });
  });

  constexpr int64_t kCost = 64;  // of a head of a row, in multiply-adds
  pool.parallel_for(rows.n, kCost * rows.n * n_heads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = (rows.begin + begin) * n_heads; i < (rows.begin + end) * n_heads; ++i) {
      float& dt = layer.dt.floats()[i];
      dt = softplus(dt + layer.dt_bias.floats()[i % n_heads]);
      layer.decay.floats()[i] = std::exp(layer.a.floats()[i % n_heads] * dt);
    }
  });

  for_blocks(pool, rows, n_heads, layer.head_dim, layer.matrix_floats(), [&](const Part& part) {
    const Segment& segment = part.segment;
    const float* const x = layer.xbc.floats() + segment.row * n_channels;
    const int64_t group = part.head / (n_heads / layer.n_groups);
    const float* const b = x + width + group * d_state;
    const int64_t step = segment.row * n_heads + part.head;
    kernels.scan({
        .state = state(segment) + d_state * part.column,
        .x = x + part.column,
        .b = b,
        .c = b + layer.n_groups * d_state,
        .out = layer.out.floats() + segment.row * width + part.column,
        .decay = layer.decay.floats() + step,
        .dt = layer.dt.floats() + step,
        .d = layer.d.floats()[part.head],
        .n_rows = segment.n_rows,
        .stride = n_channels,
        .out_stride = width,
        .n_heads = n_heads,
        .d_state = d_state,
        .n_blocks = part.n_blocks,
    });
  });

  const int64_t n = width / layer.n_groups;
  const int64_t first_part = rows.begin * layer.n_groups;
  pool.parallel_for(rows.n * layer.n_groups, rows.n * width, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = first_part + begin; i < first_part + end; ++i) {
      float* const out = layer.out.floats() + i * n;
      kernels.swiglu(out, layer.gate.floats() + i * n, n);
      if (!layer.norm) continue;
      const float* const norm = layer.norm.floats() + i % layer.n_groups * n;
      kernels.rms_norm(out, out, norm, n, layer.norm_eps);
    }
  });
}

}  // namespace

void delta_net(const CpuKernels& kernels, ThreadPool& pool, const DeltaNet& layer,
               const KvView& cache, const Batch& batch) {
  for_turns(pool, cache, batch,
            [&](const Rows& rows) { delta_net(kernels, pool, layer, cache, rows); });
}

void short_conv(const CpuKernels& kernels, ThreadPool& pool, const ShortConv& layer,
                const KvView& cache, const Batch& batch) {
  for_turns(pool, cache, batch,
            [&](const Rows& rows) { short_conv(kernels, pool, layer, cache, rows); });
}

void state_space(const CpuKernels& kernels, ThreadPool& pool, const StateSpace& layer,
                 const KvView& cache, const Batch& batch) {
  for_turns(pool, cache, batch,
            [&](const Rows& rows) { state_space(kernels, pool, layer, cache, rows); });
}

}  // namespace h2o
