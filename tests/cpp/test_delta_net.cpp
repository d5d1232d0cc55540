// Backend::delta_net on the test device, compared with double, and its independence of how the
// rows are divided into steps.
#include <doctest/doctest.h>

#include "recurrent_checks.h"

namespace h2o {
namespace {

struct Sizes {
  int32_t n_k_heads, n_v_heads, head_dim, n_taps;
  bool adjacent = false;

  int64_t k_width() const { return int64_t{n_k_heads} * head_dim; }
  int64_t v_width() const { return int64_t{n_v_heads} * head_dim; }
  int64_t n_channels() const { return 2 * k_width() + v_width(); }
  int64_t state_floats() const { return v_width() * head_dim + (n_taps - 1) * n_channels(); }
};

constexpr Sizes kSizes[] = {
    {1, 1, 16, 2}, {2, 2, 32, 4}, {2, 6, 48, 3}, {2, 6, 16, 4, true}, {1, 2, 128, 4}};

// The inputs of n rows.
struct Rows {
  std::vector<float> qkv, alpha, beta;

  Rows part(const Sizes& sizes, int64_t begin, int64_t n) const {
    const auto cut = [&](const std::vector<float>& all, int64_t width) {
      return std::vector(all.begin() + begin * width, all.begin() + (begin + n) * width);
    };
    return {cut(qkv, sizes.n_channels()), cut(alpha, sizes.n_v_heads), cut(beta, sizes.n_v_heads)};
  }
  void append(const Rows& other) {
    qkv.insert(qkv.end(), other.qkv.begin(), other.qkv.end());
    alpha.insert(alpha.end(), other.alpha.begin(), other.alpha.end());
    beta.insert(beta.end(), other.beta.begin(), other.beta.end());
  }
};

Rows random_rows(Random& random, const Sizes& sizes, int64_t n) {
  return {random.reals(n * sizes.n_channels()), random.reals(n * sizes.n_v_heads, -4, 25),
          random.reals(n * sizes.n_v_heads)};
}

// A layer on the test device, with the states of two sequences.
class Rig : public RecurrentRig {
 public:
  Rig(const Sizes& sizes, Random& random, int n_threads = 1)
      : RecurrentRig(sizes.state_floats(), n_threads),
        sizes_(sizes),
        conv(random.reals(sizes.n_taps * sizes.n_channels(), -1, 1)),
        a(random.reals(sizes.n_v_heads, -1, -0.01f)),
        dt_bias(random.reals(sizes.n_v_heads)),
        conv_(backend(), conv, sizes.n_taps, sizes.n_channels()),
        a_(backend(), a, 1, sizes.n_v_heads),
        dt_bias_(backend(), dt_bias, 1, sizes.n_v_heads) {}

  // Rows of the given numbers of the sequences in turn; returns the outputs.
  std::vector<float> step(const Rows& rows, const std::vector<int32_t>& n_rows) {
    const Batch batch = next_batch(n_rows);
    const int64_t n = batch.n_rows();
    const DeviceMatrix out(backend(), n, sizes_.v_width());
    const DeviceMatrix qkv(backend(), rows.qkv, n, sizes_.n_channels());
    const DeviceMatrix alpha(backend(), rows.alpha, n, sizes_.n_v_heads);
    const DeviceMatrix beta(backend(), rows.beta, n, sizes_.n_v_heads);
    run(batch, [&](const KvView& layer) {
      backend().delta_net({.out = out,
                           .qkv = qkv,
                           .alpha = alpha,
                           .beta = beta,
                           .conv = conv_,
                           .a = a_,
                           .dt_bias = dt_bias_,
                           .n_k_heads = sizes_.n_k_heads,
                           .n_v_heads = sizes_.n_v_heads,
                           .head_dim = sizes_.head_dim,
                           .adjacent = sizes_.adjacent},
                          layer, batch);
    });
    qkv.read();  // checks that guards are unchanged
    return out.read();
  }

 private:
  const Sizes sizes_;

 public:
  const std::vector<float> conv, a, dt_bias;

 private:
  DeviceMatrix conv_, a_, dt_bias_;
};

// Row by row, as DeltaNet defines it.
class Reference {
 public:
  Reference(const Sizes& sizes, const Rig& rig)
      : sizes_(sizes), rig_(rig), states_(sizes.v_width() * sizes.head_dim) {}

  std::vector<Approximate> row(const Rows& rows) {
    const int64_t d = sizes_.head_dim;
    inputs_.push_back(rows.qkv);
    std::vector<Approximate> qkv = convolved(inputs_, rig_.conv, sizes_.n_taps);
    for (int64_t h = 0; h < 2 * sizes_.n_k_heads; ++h) {
      normalize(&qkv[h * d], h < sizes_.n_k_heads ? 1 / std::sqrt(double{1} * d) : 1);
    }
    std::vector<Approximate> out(sizes_.v_width());
    for (int64_t h = 0; h < sizes_.n_v_heads; ++h) {
      const Approximate t = softplus(double{rows.alpha[h]} + rig_.dt_bias[h]);
      const Approximate decay = power(Approximate{rig_.a[h], 0} * t);
      const int64_t k_head =
          sizes_.adjacent ? h * sizes_.n_k_heads / sizes_.n_v_heads : h % sizes_.n_k_heads;
      const Approximate* const q = &qkv[k_head * d];
      attend(h, q, q + sizes_.k_width(), &qkv[2 * sizes_.k_width() + h * d], decay,
             sigmoid({rows.beta[h], 0}), &out[h * d]);
    }
    return out;
  }

 private:
  void normalize(Approximate* x, double length) const {
    Sum squares;
    for (int64_t i = 0; i < sizes_.head_dim; ++i) squares.add(x[i] * x[i]);
    const double total = squares.result().value + 1e-6;
    // the square root halves the relative error; then a division and a rounded length
    const double relative = squares.result().error / total / 2 + 4 * kUnit;
    const double factor = length / std::sqrt(total);
    for (int64_t i = 0; i < sizes_.head_dim; ++i)
      x[i] = x[i] * Approximate{factor, factor * relative};
  }

  void attend(int64_t head, const Approximate* q, const Approximate* k, const Approximate* v,
              const Approximate& decay, const Approximate& beta, Approximate* out) {
    const int64_t d = sizes_.head_dim;
    for (int64_t j = 0; j < d; ++j) {
      Approximate* const s = &states_[(head * d + j) * d];
      Sum read;
      for (int64_t i = 0; i < d; ++i) read.add(s[i] * k[i]);
      const Approximate expected = decay * read.result();
      Sum difference;
      difference.add(v[j]);
      difference.add({-expected.value, expected.error});
      const Approximate delta = beta * difference.result();
      Sum sum;
      for (int64_t i = 0; i < d; ++i) {
        Sum next;
        next.add(decay * s[i]);
        next.add(delta * k[i]);
        s[i] = next.result();
        sum.add(s[i] * q[i]);
      }
      out[j] = sum.result();
    }
  }

  const Sizes sizes_;
  const Rig& rig_;
  std::vector<std::vector<float>> inputs_;
  std::vector<Approximate> states_;  // [n_v_heads, column, row]
};

TEST_CASE("a layer of Gated DeltaNet is within the bounds of its roundings") {
  Random random(3);
  for (const Sizes& sizes : kSizes) {
    CAPTURE(sizes.head_dim);
    check_bounds<Rig, Reference>(sizes, sizes.v_width(), random, random_rows);
  }
}

TEST_CASE("a layer of Gated DeltaNet does not depend on how rows are divided into steps") {
  Random random(4);
  for (const Sizes& sizes : kSizes) {
    CAPTURE(sizes.head_dim);
    check_steps<Rig>(sizes, sizes.v_width(), random, random_rows);
  }
}

TEST_CASE("blocks of columns are split") {
  const auto backend = test_backend(2);
  Random random(5);
  for (const auto& [rows, width, n] : {std::array{1, 1, 1}, {3, 5, 2}, {7, 64, 3}, {2, 256, 8}}) {
    const std::vector<float> x = random.reals(2 * rows * width * n);
    const DeviceMatrix both(*backend, x, rows, 2 * width * n);
    const DeviceMatrix a(*backend, rows, width * n), b(*backend, rows, width * n);
    run_rows(*backend, rows,
             [&, width = width](const Batch&) { backend->split_blocks(a, b, both, width); });
    std::vector<float> even, odd;
    for (int64_t i = 0; i < std::ssize(x); ++i) (i / width % 2 == 0 ? even : odd).push_back(x[i]);
    CHECK(a.read() == even);
    CHECK(b.read() == odd);
  }
}

}  // namespace
}  // namespace h2o
