// Backend::short_conv on the test device, compared with double, and its independence of how the
// rows are divided into steps.
#include <doctest/doctest.h>

#include "bounds.h"
#include "recurrent_rig.h"

namespace h2o {
namespace {

struct Sizes {
  int64_t width;
  int32_t n_taps;
};

constexpr Sizes kSizes[] = {{1, 2}, {16, 3}, {300, 4}, {131, 8}};

// A layer on the test device, with the states of two sequences.
class Rig : public RecurrentRig {
 public:
  Rig(const Sizes& sizes, Random& random, int n_threads = 1)
      : RecurrentRig((sizes.n_taps - 1) * sizes.width, n_threads),
        sizes_(sizes),
        conv(random.reals(sizes.n_taps * sizes.width, -1, 1)),
        conv_(backend(), conv, sizes.n_taps, sizes.width) {}

  // Rows of the given numbers of the sequences in turn; returns the outputs.
  std::vector<float> step(const std::vector<float>& rows, const std::vector<int32_t>& n_rows) {
    const Batch batch = next_batch(n_rows);
    const int64_t n = batch.n_rows();
    const DeviceMatrix out(backend(), n, sizes_.width);
    const DeviceMatrix bcx(backend(), rows, n, 3 * sizes_.width);
    run(batch, [&](const KvView& layer) { backend().short_conv({out, bcx, conv_}, layer, batch); });
    CHECK(same_bits(bcx.read(), rows));
    return out.read();
  }

 private:
  const Sizes sizes_;

 public:
  const std::vector<float> conv;

 private:
  DeviceMatrix conv_;
};

TEST_CASE("a layer of short convolutions is within the bounds of its roundings") {
  Random random(3);
  for (const Sizes& sizes : kSizes) {
    const int64_t width = sizes.width, n_taps = sizes.n_taps;
    CAPTURE(width);
    Rig rig(sizes, random);
    constexpr int32_t kRows = 13;
    const std::vector<float> rows = random.reals(kRows * 3 * width);
    const std::vector<float> out = rig.step(rows, {kRows});
    double worst = 0;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        const auto part = [&](int64_t at, int64_t which) {
          return double{rows[(at * 3 + which) * width + i]};
        };
        double sum = 0, size = 0;
        for (int64_t t = 0; t < n_taps; ++t) {
          const int64_t at = row - n_taps + 1 + t;
          const double term = at < 0 ? 0 : part(at, 0) * part(at, 2) * rig.conv[t * width + i];
          sum += term;
          size += std::abs(term);
        }
        // A product, then n_taps products and sums, then a product.
        const double bound = gamma(n_taps + 2) * size * std::abs(part(row, 1));
        worst = std::max(worst, in_bounds(out[row * width + i], sum * part(row, 1), bound));
      }
    }
    CHECK(worst <= 1);
  }
}

TEST_CASE("a layer of short convolutions does not depend on how rows are divided into steps") {
  Random random(4);
  for (const Sizes& sizes : kSizes) {
    const int64_t width = sizes.width;
    CAPTURE(width);
    Rig rig(sizes, random, 2);
    const std::vector<float> first = random.reals(36 * width), second = random.reals(36 * width);
    const std::vector<float> whole = rig.step(first, {12});
    rig.reset();
    std::vector<float> parts;
    int64_t at = 0;
    for (const int32_t n : {1, 2, 5, 1, 3}) {  // beside another sequence
      std::vector<float> both(first.begin() + at * 3 * width, first.begin() + (at + n) * 3 * width);
      both.insert(both.end(), second.begin() + at * 3 * width,
                  second.begin() + (at + n % 3) * 3 * width);
      const std::vector<float> out = rig.step(both, {n, n % 3});
      parts.insert(parts.end(), out.begin(), out.begin() + n * width);
      at += n;
    }
    CHECK(same_bits(parts, whole));
  }
}

}  // namespace
}  // namespace h2o
