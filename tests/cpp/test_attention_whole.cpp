// Attention of encoders, compared with double.
#include <doctest/doctest.h>

#include "bounds.h"

namespace h2o {
namespace {

struct HeadSizes {
  int64_t n, n_kv, dim;
};

struct Case {
  HeadSizes heads;
  int32_t window;
  bool slopes;
};

// Lengths of texts around those that are computed at once.
constexpr int32_t kLengths[] = {1, 2, 23, 24, 25, 60, 257, 300};

std::vector<double> attended(const Case& c, const std::vector<float>& q,
                             const std::vector<float>& k, const std::vector<float>& v,
                             const std::vector<float>& slopes, const Segment& text, int64_t row,
                             int64_t head) {
  const auto [n, n_kv, dim] = c.heads;
  const int64_t kv_head = head / (n / n_kv);
  std::vector<double> out(dim);
  double total = 0;
  for (int64_t key = 0; key < text.n_rows; ++key) {
    const auto distance = static_cast<double>(std::abs(row - key));
    if (c.window > 0 && distance >= c.window) continue;
    double logit = 0;
    for (int64_t i = 0; i < dim; ++i) {
      logit += double{q[(text.row + row) * n * dim + head * dim + i]} *
               k[(text.row + key) * n_kv * dim + kv_head * dim + i];
    }
    logit = logit / std::sqrt(dim) - (c.slopes ? slopes[head] * distance : 0);
    const double weight = std::exp(logit);
    total += weight;
    for (int64_t i = 0; i < dim; ++i) {
      out[i] += weight * v[(text.row + key) * n_kv * dim + kv_head * dim + i];
    }
  }
  for (double& x : out) x /= total;
  return out;
}

void check(const Case& c) {
  const auto [n, n_kv, dim] = c.heads;
  Random random(1);
  Batch batch;
  int32_t sequence = 0;
  for (const int32_t length : kLengths) batch.add(sequence++, 0, std::vector<int32_t>(length));
  const int64_t rows = batch.n_rows();
  const std::vector<float> q = random.reals(rows * n * dim), k = random.reals(rows * n_kv * dim),
                           v = random.reals(rows * n_kv * dim), slopes = random.reals(n, 0, 1);
  std::vector<float> first;
  for (const int n_threads : {1, 3}) {
    const std::unique_ptr<Backend> backend = test_backend(n_threads);
    if (!backend->capabilities().whole_texts) return;
    Backend& b = *backend;
    const DeviceMatrix out(b, rows, n * dim), on_q(b, q, rows, n * dim),
        on_k(b, k, rows, n_kv * dim), on_v(b, v, rows, n_kv * dim), on_slopes(b, slopes, 1, n);
    const Attention attention{.out = out,
                              .q = on_q,
                              .k = on_k,
                              .v = on_v,
                              .rope = {},
                              .scale = 1 / std::sqrt(static_cast<float>(dim)),
                              .window = c.window,
                              .sinks = {},
                              .slopes = c.slopes ? Tensor(on_slopes) : Tensor()};
    b.run(batch, [&] { b.attend_whole(attention, c.heads.dim, batch); });
    const std::vector<float> found = out.read();
    if (first.empty()) first = found;
    CHECK(same_bits(found, first));
  }
  double worst = 0;
  for (const Segment& text : batch.segments) {
    for (int64_t row = 0; row < text.n_rows; row += 7) {
      for (int64_t head = 0; head < n; ++head) {
        const std::vector<double> expected = attended(c, q, k, v, slopes, text, row, head);
        // A logit has dim products of up to 4, and a distance whose factor is rounded twice; a sum
        // has a term for each key, and one for each part of the softmax.
        const double distances = c.slopes ? gamma(4) * text.n_rows : 0;
        const double logit = gamma(dim + 4) * 4 * std::sqrt(dim) + distances;
        const double bound = 2 * logit + power_error(8) + gamma(text.n_rows + 4);
        for (int64_t i = 0; i < dim; ++i) {
          const float y = first[(text.row + row) * n * dim + head * dim + i];
          worst = std::max(worst, in_bounds(y, expected[i], 2 * 2 * bound));
        }
      }
    }
  }
  CHECK(worst <= 1);
}

}  // namespace

TEST_CASE("attention to whole texts") {
  for (const HeadSizes heads : {HeadSizes{3, 3, 32}, {4, 2, 24}, {2, 1, 256}, {1, 1, 5}}) {
    CAPTURE(heads.dim);
    check({heads, 0, false});
    check({heads, 9, false});
    check({heads, 0, true});
  }
}

}  // namespace h2o
