// Split products of attention, on the instruction sets that have them: the accuracy of floats, and
// bits that depend neither on other rows and keys nor on how sums are divided.
#include <doctest/doctest.h>

#include "attention_products.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"

namespace h2o {
namespace {

constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::q8_0, DType::q5_0, DType::q4_0};

struct Workspace {
  Buffer buffer = make_cpu_backend(1, "scalar")->allocate(1 << 20);
  std::byte* staged() const { return buffer.data(); }
  std::byte* scratch() const { return buffer.data() + (1 << 19); }
};

std::vector<const CpuKernels*> tables() {
  std::vector<const CpuKernels*> found;
  for (const CpuKernels* table : supported_kernels()) {
    CHECK((table->multiply_split != nullptr) == (table->f16.split != nullptr));
    if (table->multiply_split == nullptr) continue;
    found.push_back(table);
    CHECK((choose_kernels(table->isa, true).multiply_split == nullptr));
    CHECK((table->f32.split == nullptr));
  }
  return found;
}

// Each factor is off by at most 2^-16 of it, and the product of the two rests that is left out is
// at most 2^-16 of the whole; 3 roundings for each of n products.
double bound_of(int64_t n, double magnitude) {
  return (3.01 * 0x1p-16 + gamma(3 * n + 8)) * magnitude + 1e-30;
}

struct Trial {
  const CpuKernels& table;
  const SplitKernels& split;
  DType dtype;
  int64_t n;         // elements of a row
  int64_t n_cached;  // rows
  int64_t n_rows;    // of x
  double worst = 0;  // error, in bounds

  // y is a sum of n terms, term(0) and so on.
  template <class Term>
  void check_sum(float y, int64_t n_terms, const Term& term) {
    const auto bound = [&](double magnitude) { return bound_of(n_terms, magnitude); };
    worst = std::max(worst, sum_error(y, n_terms, term, bound));
  }
};

// Calls body(random, trial) for sizes of every type, with up to `most` cached rows.
template <class Body>
void for_each_trial(uint32_t seed, int32_t most, const Body& body) {
  for (const CpuKernels* table : tables()) {
    for (const DType dtype : kTypes) {
      CAPTURE(info(dtype).name);
      Random random(seed);
      double worst = 0;
      for (int i = 0; i < 40; ++i) {
        const int64_t block = info(dtype).block_size;
        const int64_t n = block * random.integer(1, static_cast<int32_t>(200 / block));
        const int64_t n_cached = random.integer(1, most);
        const int64_t n_rows = random.integer(1, kSplitRows);
        CAPTURE(n);
        CAPTURE(n_cached);
        CAPTURE(n_rows);
        Trial trial{*table, *table->of(dtype).split, dtype, n, n_cached, n_rows};
        body(random, trial);
        worst = std::max(worst, trial.worst);
      }
      CHECK(worst <= 1);
      CHECK(worst > 0.001);
    }
  }
}

TEST_CASE("split products are those of floats, in bits that do not depend on other rows") {
  const Workspace space;
  for_each_trial(1, 100, [&](Random& random, Trial& trial) {
    const CpuKernels& table = trial.table;
    const int64_t n = trial.n, n_keys = trial.n_cached, n_rows = trial.n_rows;
    const CachedRows keys(trial.dtype, random.reals(n_keys * n), n);
    const std::vector<float> x = random.reals(n_rows * n);
    constexpr int64_t kStride = 128;
    std::vector<float> y(kSplitRows * kStride);
    const auto product = [&](std::vector<float>& to, int64_t first, int64_t rows) {
      return SplitProduct{.y = to.data() + first * kStride,
                          .x = x.data() + first * n,
                          .staged = space.staged(),
                          .n_rows = rows,
                          .n_in = n,
                          .n_out = n_keys,
                          .n_columns = n_keys,
                          .x_stride = n,
                          .y_stride = kStride,
                          .add = false,
                          .workspace = space.scratch()};
    };
    trial.split.stage_keys(space.staged(), keys.rows.data(), n_keys, n);
    table.multiply_split(product(y, 0, n_rows));
    std::vector<float> single(y.size()), few(y.size());
    for (int64_t r = 0; r < n_rows; ++r) table.multiply_split(product(single, r, 1));
    trial.split.multiply_keys(product(few, 0, n_rows), keys.rows.data());
    int n_different = 0;
    for (int64_t r = 0; r < n_rows; ++r) {
      for (int64_t j = 0; j < n_keys; ++j) {
        const int64_t at = r * kStride + j;
        trial.check_sum(y[at], n,
                        [&](int64_t i) { return double{x[r * n + i]} * keys.values[j * n + i]; });
        n_different += !same_bits(y[at], single[at]) || !same_bits(y[at], few[at]);
      }
    }
    CHECK(n_different == 0);
  });
}

TEST_CASE("split sums over values do not depend on how they are divided") {
  const Workspace space;
  for_each_trial(2, 200, [&](Random& random, Trial& trial) {
    const CpuKernels& table = trial.table;
    const int64_t n = trial.n, n_values = trial.n_cached, n_rows = trial.n_rows;
    CachedRows values(trial.dtype, random.reals(n_values * n), n);
    const int64_t missing = random.integer(0, static_cast<int32_t>(n_values) - 1);
    values.rows[missing] = nullptr;
    const std::vector<float> x = random.reals(n_rows * n_values);
    // The last row is guarded.
    std::vector<float> y((n_rows + 1) * n, 7.0f), parts = y;
    const auto add = [&](std::vector<float>& to, int64_t first, int64_t count) {
      CHECK(trial.split.stage_values(space.staged(), values.rows.data() + first, count, n));
      table.multiply_split({.y = to.data(),
                            .x = x.data() + first,
                            .staged = space.staged(),
                            .n_rows = n_rows,
                            .n_in = count,
                            .n_out = n,
                            .n_columns = n,
                            .x_stride = n_values,
                            .y_stride = n,
                            .add = first > 0,
                            .workspace = space.scratch()});
    };
    add(y, 0, n_values);
    for (int64_t i = 0; i < n_values; i += 64) add(parts, i, std::min<int64_t>(64, n_values - i));
    CHECK(same_bits(y, parts));
    for (int64_t r = 0; r < n_rows; ++r) {
      for (int64_t c = 0; c < n; ++c) {
        trial.check_sum(y[r * n + c], n_values, [&](int64_t i) {
          return i == missing ? 0 : double{x[r * n_values + i]} * values.values[i * n + c];
        });
      }
    }
    for (int64_t c = 0; c < n; ++c) CHECK(y[n_rows * n + c] == 7.0f);
  });
  for (const CpuKernels* table : tables()) {
    const std::vector<F16> infinite(64, F16{0x7c00}), nan(64, F16{0x7e00}), large(64, F16{0x7bff});
    for (const auto* row : {&infinite, &nan, &large}) {
      const auto* at = reinterpret_cast<const std::byte*>(row->data());
      CHECK(table->f16.split->stage_values(space.staged(), &at, 1, 64) == (row == &large));
    }
  }
}

// The group is large enough.
KvShape split_shape(DType dtype, bool may_roll = false) {
  return two_heads(8, 64, dtype, dtype, may_roll);
}

TEST_CASE("attention of large groups is that of floats" * doctest::skip(on_gpu())) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::q8_0}) {
    Random random(3);
    Totals totals;
    check_short_sequences(random, split_shape(dtype), {}, totals);
    CHECK(totals.n_evictions > 0);
  }
}

TEST_CASE("long chunks of large groups are equivalent to their tokens one by one, for any threads" *
          doctest::skip(on_gpu())) {
  for (const DType dtype : {DType::f16, DType::q8_0}) {
    for (const bool may_roll : {false, true}) {
      if (brief() && may_roll == (dtype == DType::f16)) continue;
      check_long_chunks(split_shape(dtype, may_roll), {});
    }
  }
}

TEST_CASE("a row does not see later values that are not finite" * doctest::skip(on_gpu())) {
  check_later_values(split_shape(DType::f16), {});
}

}  // namespace
}  // namespace h2o
