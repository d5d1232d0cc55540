// Attention with factors rounded to bf16, on the instruction sets that have it: error bounds, and
// bits that depend neither on other rows and keys nor on how sums are divided.
#include <doctest/doctest.h>

#include "attention_products.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa/detect.h"

namespace h2o {
namespace {

constexpr DType kTypes[] = {DType::f16, DType::bf16};

std::vector<const CpuKernels*> tables() {
  CHECK((choose_kernels("", true).f16.bf16_attention == nullptr));
  std::vector<const CpuKernels*> found;
  for (const CpuKernels* table : supported_kernels()) {
    CHECK((table->f16.bf16_attention != nullptr) == (table->bf16.bf16_attention != nullptr));
    CHECK((table->f32.bf16_attention == nullptr));
    if (table->f16.bf16_attention != nullptr) found.push_back(table);
  }
  return found;
}

// Numbers that bf16 represents, so that products are exact.
std::vector<float> bf16_reals(Random& random, int64_t n) {
  std::vector<float> x = random.reals(n);
  std::vector<BF16> rounded(n);
  const TypeKernels& type = choose_kernels("scalar").bf16;
  type.encode(reinterpret_cast<std::byte*>(rounded.data()), x.data(), n);
  type.decode(x.data(), reinterpret_cast<const std::byte*>(rounded.data()), n);
  return x;
}

// Each term is rounded when it is added.
template <class Term>
double in_sum_bounds(float y, int64_t n, const Term& term) {
  return sum_error(y, n, term, [&](double magnitude) { return gamma(n + 8) * magnitude + 1e-37; });
}

// Calls body(random, kernels, type of the cache, head_dim, number of cached rows, number of rows);
// it returns the largest error, in bounds.
template <class Body>
void for_each_trial(uint32_t seed, const Body& body) {
  for (const CpuKernels* table : tables()) {
    for (const DType dtype : kTypes) {
      CAPTURE(info(dtype).name);
      Random random(seed);
      double worst = 0;
      for (int i = 0; i < 60; ++i) {
        const int64_t n = 32 * random.integer(1, 8);
        const int64_t n_cached = random.integer(1, 150);
        const int64_t n_rows = random.integer(1, random.flip() ? 110 : 10);
        CAPTURE(n);
        CAPTURE(n_cached);
        CAPTURE(n_rows);
        worst = std::max(worst, body(random, *table, dtype, n, n_cached, n_rows));
      }
      CHECK(worst <= 1);
      CHECK(worst > 0.001);
    }
  }
}

TEST_CASE("products with keys are those of bf16, in bits that do not depend on other rows") {
  for_each_trial(1, [](Random& random, const CpuKernels& table, DType dtype, int64_t n,
                       int64_t n_keys, int64_t n_rows) {
    const CachedRows keys(dtype, bf16_reals(random, n_keys * n), n);
    const std::vector<float> x = bf16_reals(random, n_rows * n);
    std::vector<BF16> rounded(n_rows * n);
    table.round_rows({rounded.data(), n_rows, n}, x.data(), 0, n_rows);
    const int64_t stride = n_keys + 3;
    const auto multiply = [&](std::vector<float>& y, int64_t row, int64_t count, int64_t key,
                              int64_t n_some) {
      table.of(dtype).bf16_attention->multiply_keys({.y = y.data() + row * stride + key,
                                                     .x = nullptr,
                                                     .w = keys.rows[key],
                                                     .bias = nullptr,
                                                     .n_rows = count,
                                                     .n_in = n,
                                                     .w_row_bytes = n * 2,
                                                     .y_stride = stride,
                                                     .add = false},
                                                    {rounded.data() + row * n, count, n}, n_some);
    };
    std::vector<float> y(n_rows * stride, 7.0f), single = y, parts = y;
    multiply(y, 0, n_rows, 0, n_keys);
    for (int64_t r = 0; r < n_rows; ++r) multiply(single, r, 1, 0, n_keys);
    const int64_t middle = random.integer(0, static_cast<int32_t>(n_keys));
    if (middle > 0) multiply(parts, 0, n_rows, 0, middle);
    if (middle < n_keys) multiply(parts, 0, n_rows, middle, n_keys - middle);
    CHECK(same_bits(y, single));
    CHECK(same_bits(y, parts));
    double worst = 0;
    for (int64_t r = 0; r < n_rows; ++r) {
      for (int64_t j = 0; j < n_keys; ++j) {
        const double error = in_sum_bounds(y[r * stride + j], n, [&](int64_t i) {
          return double{x[r * n + i]} * keys.values[j * n + i];
        });
        worst = std::max(worst, error);
      }
      for (int64_t j = n_keys; j < stride; ++j) CHECK(y[r * stride + j] == 7.0f);
    }
    return worst;
  });
}

TEST_CASE(
    "sums over values are those of bf16, in bits that do not depend on how they are divided") {
  for_each_trial(2, [](Random& random, const CpuKernels& table, DType dtype, int64_t n,
                       int64_t n_values, int64_t n_rows) {
    const CachedRows values(dtype, bf16_reals(random, n_values * n), n);
    const std::vector<float> p = bf16_reals(random, n_rows * n_values);
    const auto add = [&](std::vector<float>& y, int64_t row, int64_t count, int64_t first,
                         int64_t n_some) {
      table.of(dtype).bf16_attention->add_values({.y = y.data() + row * n,
                                                  .p = p.data() + row * n_values + first,
                                                  .rows = values.rows.data() + first,
                                                  .n_out = count,
                                                  .n_rows = n_some,
                                                  .n = n,
                                                  .p_stride = n_values});
    };
    std::vector<float> y((n_rows + 1) * n), single = y, parts = y;  // the last row is guarded
    add(y, 0, n_rows, 0, n_values);
    for (int64_t r = 0; r < n_rows; ++r) add(single, r, 1, 0, n_values);
    const int64_t middle = random.integer(0, static_cast<int32_t>(n_values)) / 2 * 2;
    add(parts, 0, n_rows, 0, middle);
    add(parts, 0, n_rows, middle, n_values - middle);
    CHECK(same_bits(y, single));
    CHECK(same_bits(y, parts));
    double worst = 0;
    for (int64_t r = 0; r < n_rows; ++r) {
      for (int64_t c = 0; c < n; ++c) {
        const double error = in_sum_bounds(y[r * n + c], n_values, [&](int64_t i) {
          return double{p[r * n_values + i]} * values.values[i * n + c];
        });
        worst = std::max(worst, error);
      }
    }
    for (int64_t c = 0; c < n; ++c) CHECK(y[n_rows * n + c] == 0);
    return worst;
  });
}

TEST_CASE("attention that may round is that of the reference" * doctest::skip(on_gpu())) {
  Totals totals;
  bool plain = false;
  for (const auto& [group, head_dim, k, v] :
       {std::tuple{1, 64, DType::f16, DType::f16}, std::tuple{3, 96, DType::bf16, DType::f16},
        std::tuple{8, 128, DType::f16, DType::bf16}, std::tuple{2, 256, DType::bf16, DType::bf16},
        std::tuple{100, 32, DType::f16, DType::f16},
        std::tuple{2, 80, DType::f16, DType::f16},      // floats: no multiple of 32
        std::tuple{2, 64, DType::q8_0, DType::f16}}) {  // and for other types
    Random random(3);
    const KvShape shape = two_heads(group, head_dim, k, v);
    const LogitRules rules{.softcap = 2,
                           .sinks = random.reals(shape.n_heads),
                           .slopes = random.reals(shape.n_heads, 0.01f, 0.6f),
                           .allow_bf16 = true};
    plain = !plain;  // in brief they take turns
    if (plain || !brief()) check_short_sequences(random, shape, {.allow_bf16 = true}, totals);
    if (!plain || !brief()) check_short_sequences(random, shape, rules, totals);
  }
  CHECK(totals.n_evictions > 0);
}

TEST_CASE("chunks that are rounded are equivalent to their tokens one by one, for any threads" *
          doctest::skip(on_gpu())) {
  for (const int32_t group : {1, 3}) {
    for (const bool may_roll : {false, true}) {
      if (brief() && may_roll == (group == 1)) continue;
      check_long_chunks(two_heads(group, 64, DType::f16, DType::f16, may_roll),
                        {.allow_bf16 = true});
    }
  }
}

TEST_CASE("a row that is rounded does not see later values that are not finite" *
          doctest::skip(on_gpu())) {
  check_later_values(two_heads(3, 64, DType::f16, DType::f16), {.allow_bf16 = true});
}

TEST_CASE("attention is that of floats unless it may round" * doctest::skip(on_gpu())) {
  const KvShape shape = two_heads(3, 64, DType::f16, DType::f16);
  const KvPolicy full{};
  Random random(13);
  const Qkv in = random_qkv(random, shape, 60);
  for (const CpuKernels* table : tables()) {
    const auto attend = [&](const std::string& isa, bool allow_bf16) {
      Rig rig(make_cpu_backend(1, isa), std::span(&full, 1), shape);
      rig.set_logits({.allow_bf16 = allow_bf16});
      return rig.attend({{0, 60}}, in);
    };
    const std::vector<float> floats = attend(choose_kernels("", true).isa, false);
    CHECK(same_bits(attend(table->isa, false), floats));
    CHECK_FALSE(same_bits(attend(table->isa, true), floats));
  }
}

}  // namespace
}  // namespace h2o
