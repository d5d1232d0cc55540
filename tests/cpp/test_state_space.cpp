// Backend::state_space on the test device, compared with double, and its independence of how the
// rows are divided into steps.
#include <doctest/doctest.h>

#include "recurrent_checks.h"

namespace h2o {
namespace {

struct Sizes {
  int32_t n_heads, head_dim, n_groups, d_state, n_taps;
  bool conv_bias = true, norm = true;

  int64_t width() const { return int64_t{n_heads} * head_dim; }
  int64_t n_channels() const { return width() + int64_t{2} * n_groups * d_state; }
  int64_t state_floats() const { return width() * d_state + (n_taps - 1) * n_channels(); }
};

constexpr Sizes kSizes[] = {{1, 16, 1, 1, 2},
                            {4, 32, 2, 24, 4},
                            {3, 48, 1, 7, 3, false},
                            {2, 80, 2, 16, 4, true, false},
                            {1, 64, 1, 128, 4}};
constexpr float kEps = 1e-5f;

// The inputs of n rows.
struct Rows {
  std::vector<float> gate, xbc, dt;

  Rows part(const Sizes& sizes, int64_t begin, int64_t n) const {
    const auto cut = [&](const std::vector<float>& all, int64_t width) {
      return std::vector(all.begin() + begin * width, all.begin() + (begin + n) * width);
    };
    return {cut(gate, sizes.width()), cut(xbc, sizes.n_channels()), cut(dt, sizes.n_heads)};
  }
  void append(const Rows& other) {
    gate.insert(gate.end(), other.gate.begin(), other.gate.end());
    xbc.insert(xbc.end(), other.xbc.begin(), other.xbc.end());
    dt.insert(dt.end(), other.dt.begin(), other.dt.end());
  }
};

Rows random_rows(Random& random, const Sizes& sizes, int64_t n) {
  return {random.reals(n * sizes.width()), random.reals(n * sizes.n_channels()),
          random.reals(n * sizes.n_heads, -4, 4)};
}

// A layer on the test device, with the states of two sequences.
class Rig : public RecurrentRig {
 public:
  Rig(const Sizes& sizes, Random& random, int n_threads = 1)
      : RecurrentRig(sizes.state_floats(), n_threads),
        sizes_(sizes),
        conv(random.reals(sizes.n_taps * sizes.n_channels(), -1, 1)),
        conv_bias(random.reals(sizes.n_channels(), -1, 1)),
        a(random.reals(sizes.n_heads, -1, -0.01f)),
        d(random.reals(sizes.n_heads)),
        dt_bias(random.reals(sizes.n_heads)),
        norm(random.reals(sizes.width(), 0.5f, 1.5f)),
        conv_(backend(), conv, sizes.n_taps, sizes.n_channels()),
        conv_bias_(backend(), conv_bias, 1, sizes.n_channels()),
        a_(backend(), a, sizes.n_heads, 1),
        d_(backend(), d, sizes.n_heads, 1),
        dt_bias_(backend(), dt_bias, 1, sizes.n_heads),
        norm_(backend(), norm, sizes.n_groups, sizes.width() / sizes.n_groups) {}

  // Rows of the given numbers of the sequences in turn; returns the outputs.
  std::vector<float> step(const Rows& rows, const std::vector<int32_t>& n_rows) {
    const Batch batch = next_batch(n_rows);
    const int64_t n = batch.n_rows();
    const DeviceMatrix out(backend(), n, sizes_.width());
    const DeviceMatrix gate(backend(), rows.gate, n, sizes_.width());
    const DeviceMatrix xbc(backend(), rows.xbc, n, sizes_.n_channels());
    const DeviceMatrix dt(backend(), rows.dt, n, sizes_.n_heads);
    const DeviceMatrix decay(backend(), n, sizes_.n_heads);
    run(batch, [&](const KvView& layer) {
      backend().state_space({.out = out,
                             .gate = gate,
                             .xbc = xbc,
                             .dt = dt,
                             .decay = decay,
                             .conv = conv_,
                             .conv_bias = sizes_.conv_bias ? conv_bias_ : Tensor{},
                             .a = a_,
                             .d = d_,
                             .dt_bias = dt_bias_,
                             .norm = sizes_.norm ? norm_ : Tensor{},
                             .norm_eps = kEps,
                             .n_heads = sizes_.n_heads,
                             .head_dim = sizes_.head_dim,
                             .n_groups = sizes_.n_groups,
                             .d_state = sizes_.d_state},
                            layer, batch);
    });
    for (const DeviceMatrix* used : {&xbc, &dt, &decay}) used->read();  // guards are unchanged
    CHECK(same_bits(gate.read(), rows.gate));
    return out.read();
  }

 private:
  const Sizes sizes_;

 public:
  const std::vector<float> conv, conv_bias, a, d, dt_bias, norm;

 private:
  DeviceMatrix conv_, conv_bias_, a_, d_, dt_bias_, norm_;
};

// Row by row, as StateSpace defines it.
class Reference {
 public:
  Reference(const Sizes& sizes, const Rig& rig)
      : sizes_(sizes), rig_(rig), states_(sizes.width() * sizes.d_state) {}

  std::vector<Approximate> row(const Rows& rows) {
    inputs_.push_back(rows.xbc);
    std::vector<Approximate> xbc =
        convolved(inputs_, rig_.conv, sizes_.n_taps,
                  sizes_.conv_bias ? rig_.conv_bias : std::vector<float>());
    std::vector<Approximate> out(sizes_.width());
    const Approximate* const b = &xbc[sizes_.width()];
    for (int64_t h = 0; h < sizes_.n_heads; ++h) {
      const Approximate t = softplus(double{rows.dt[h]} + rig_.dt_bias[h]);
      const Approximate decay = power(Approximate{rig_.a[h], 0} * t);
      const int64_t group = h * sizes_.n_groups / sizes_.n_heads * sizes_.d_state;
      scan(h, &xbc[h * sizes_.head_dim], b + group,
           b + group + int64_t{sizes_.n_groups} * sizes_.d_state, t, decay,
           &out[h * sizes_.head_dim]);
    }
    for (int64_t i = 0; i < sizes_.width(); ++i) {
      const Approximate gate = {rows.gate[i], 0};
      out[i] = out[i] * (gate * sigmoid(gate));
    }
    const int64_t size = sizes_.width() / sizes_.n_groups;
    for (int64_t g = 0; sizes_.norm && g < sizes_.n_groups; ++g) {
      normalize(&out[g * size], &rig_.norm[g * size], size);
    }
    return out;
  }

 private:
  void scan(int64_t head, const Approximate* x, const Approximate* b, const Approximate* c,
            const Approximate& t, const Approximate& decay, Approximate* out) {
    for (int64_t j = 0; j < sizes_.head_dim; ++j) {
      Approximate* const s = &states_[(head * sizes_.head_dim + j) * sizes_.d_state];
      Sum sum;
      sum.add(x[j] * Approximate{rig_.d[head], 0});
      for (int64_t i = 0; i < sizes_.d_state; ++i) {
        Sum next;
        next.add(decay * s[i]);
        next.add(t * x[j] * b[i]);
        s[i] = next.result();
        sum.add(s[i] * c[i]);
      }
      out[j] = sum.result();
    }
  }

  void normalize(Approximate* x, const float* weight, int64_t n) const {
    Sum squares;
    for (int64_t i = 0; i < n; ++i) squares.add(x[i] * x[i]);
    const auto count = static_cast<double>(n);
    const double mean = squares.result().value / count + kEps;
    // the square root halves the relative error; then two divisions and a sum
    const double relative = squares.result().error / count / mean / 2 + 4 * kUnit;
    const double factor = 1 / std::sqrt(mean);
    for (int64_t i = 0; i < n; ++i) {
      x[i] = x[i] * Approximate{factor, factor * relative} * Approximate{weight[i], 0};
    }
  }

  const Sizes sizes_;
  const Rig& rig_;
  std::vector<std::vector<float>> inputs_;
  std::vector<Approximate> states_;  // [n_heads, column, row]
};

TEST_CASE("a layer of a state-space model is within the bounds of its roundings") {
  Random random(3);
  for (const Sizes& sizes : kSizes) {
    CAPTURE(sizes.head_dim);
    check_bounds<Rig, Reference>(sizes, sizes.width(), random, random_rows);
  }
}

TEST_CASE("a layer of a state-space model does not depend on how rows are divided into steps") {
  Random random(4);
  for (const Sizes& sizes : kSizes) {
    CAPTURE(sizes.head_dim);
    check_steps<Rig>(sizes, sizes.width(), random, random_rows);
  }
}

}  // namespace
}  // namespace h2o
