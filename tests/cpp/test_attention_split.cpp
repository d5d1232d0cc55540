// Split products of attention, on the instruction sets that have them: the accuracy of floats, and
// bits that depend neither on other rows and keys nor on how sums are divided.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "attention_check.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"

namespace h2o {
namespace {

constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::q8_0, DType::q5_0, DType::q4_0};

// Cached rows and what they decode to.
struct CachedRows {
  std::vector<std::byte> bytes;
  std::vector<const std::byte*> rows;
  std::vector<float> values;  // [n_rows, n]

  CachedRows(Random& random, DType dtype, int64_t n_rows, int64_t n) : bytes(n_rows * n * 4) {
    const TypeKernels& type = choose_kernels("scalar").of(dtype);
    for (int64_t i = 0; i < n_rows; ++i) {
      const std::vector<float> x = random.reals(n);
      std::byte* const row = bytes.data() + i * n * 4;
      type.encode(row, x.data(), n);
      std::vector<float> back(n);
      type.decode(back.data(), row, n);
      rows.push_back(row);
      values.insert(values.end(), back.begin(), back.end());
    }
  }
};

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
    double sum = 0, magnitude = 0;
    for (int64_t i = 0; i < n_terms; ++i) {
      sum += term(i);
      magnitude += std::abs(term(i));
    }
    worst = std::max(worst, in_bounds(y, sum, bound_of(n_terms, magnitude)));
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
    const CachedRows keys(random, trial.dtype, n_keys, n);
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
    CachedRows values(random, trial.dtype, n_values, n);
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

// Of a group that is large enough.
KvShape split_shape(DType dtype, bool may_roll = false) {
  return {.n_layers = 1,
          .n_sequences = 2,
          .n_heads = 16,
          .n_kv_heads = 2,
          .head_dim = 64,
          .max_tokens = 1300,
          .max_rows = 700,
          .k_dtype = dtype,
          .v_dtype = dtype,
          .rope = may_roll ? rope_of(64) : Rope{}};
}

TEST_CASE("attention of large groups is that of floats" * doctest::skip(on_cuda())) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::q8_0}) {
    Random random(3);
    Totals totals;
    for (const KvPolicy& policy : {KvPolicy{}, KvPolicy{.sinks = 1, .heavy = 30, .recent = 20}}) {
      KvShape shape = split_shape(dtype);
      shape.max_tokens = 100;
      const auto pieces = [](Random& next, const KvCache& cache) {
        std::vector<Piece> some;
        for (int32_t s = 0; s < 2; ++s) {
          const int32_t n = std::min(next.flip() ? 1 : next.integer(1, 40), cache.room(s));
          if (n > 0) some.push_back({s, n});
        }
        return some;
      };
      check_against_reference(random, policy, shape, 8, pieces, totals);
    }
  }
}

TEST_CASE("long chunks of large groups are equivalent to their tokens one by one, for any threads" *
          doctest::skip(on_cuda())) {
  for (const DType dtype : {DType::f16, DType::q8_0}) {
    for (const bool may_roll : {false, true}) {
      if (brief() && may_roll == (dtype == DType::f16)) continue;
      const KvShape shape = split_shape(dtype, may_roll);
      const KvPolicy policy{.sinks = 0, .heavy = 600, .recent = 490};
      Rig chunks(policy, shape, 1), threads(policy, shape, 3), steps(policy, shape, 1);
      Random random(11);
      for (const int32_t n : {490, 37, 540}) {
        const Qkv in = random_qkv(random, shape, n);
        const std::vector<float> expected = steps.attend_singly(0, n, in);
        CHECK(same_bits(chunks.attend({{0, n}}, in), expected));
        CHECK(same_bits(threads.attend({{0, n}}, in), expected));
        CHECK(same_entries(chunks, 0, steps, 0, shape.n_kv_heads));
        CHECK(same_entries(threads, 0, steps, 0, shape.n_kv_heads));
      }
    }
  }
}

// A value that overflows f16 is infinite; it times 0 would be NaN.
TEST_CASE("a row does not see later values that are not finite" * doctest::skip(on_cuda())) {
  const KvShape shape = split_shape(DType::f16);
  const KvPolicy full{};
  Rig finite(full, shape), infinite(full, shape);
  Random random(12);
  Qkv in = random_qkv(random, shape, 60);
  const std::vector<float> expected = finite.attend({{0, 60}}, in);
  in.v[40 * 2 * 64 + 5] = 1e6f;  // row 40, the first kv_head
  const std::vector<float> out = infinite.attend({{0, 60}}, in);
  const int64_t width = shape.n_heads * shape.head_dim;
  CHECK(same_bits(std::span(out).first(40 * width), std::span(expected).first(40 * width)));
  CHECK_FALSE(std::isfinite(out[40 * width + 5]));
}

}  // namespace
}  // namespace h2o
