// The routing of rows to experts on the test device, compared with double.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <span>

#include "bounds.h"
#include "device_routes.h"

namespace h2o {
namespace {

// Multiples of 1/16, some of them equal; and non-finite values.
std::vector<float> random_logits(Random& random, int64_t n) {
  std::vector<float> logits(n);
  for (float& logit : logits) logit = static_cast<float>(random.integer(-100, 100)) / 16;
  return logits;
}

void check_routes(Backend& backend, Random& random, int64_t n_rows, int32_t n_experts,
                  int32_t n_used) {
  CAPTURE(n_rows);
  CAPTURE(n_experts);
  CAPTURE(n_used);
  DeviceRoutes device(backend, n_rows, n_experts, n_used);
  Routes& routes = device.routes;
  routes.normalized = random.flip();
  routes.scale = random.real(0.5, 2);
  std::vector<float> factors(n_experts);
  for (float& factor : factors) factor = random.real(0.5, 2);
  const DeviceMatrix scales(backend, factors, 1, n_experts);
  if (random.flip()) routes.expert_scales = Tensor(scales).floats();
  std::vector<float> logits = random_logits(random, n_rows * n_experts);
  if (n_rows > 3)
    std::fill_n(logits.begin() + n_experts, n_experts, 1.5f);  // one row of equal logits
  const DeviceMatrix x(backend, logits, n_rows, n_experts);
  run_rows(backend, n_rows, [&](const Batch&) { backend.route(routes, x, {}); });
  x.read();  // checks that guards are unchanged
  const std::vector<float> weights = device.weights();
  const std::vector<int32_t> copy_rows = device.copy_rows(), offsets = device.offsets();

  double worst = 0;
  std::vector<std::vector<int64_t>> copies(n_experts);  // of each expert, in order
  for (int64_t i = 0; i < n_rows; ++i) {
    const std::span row = std::span(logits).subspan(i * n_experts, n_experts);
    std::vector<int32_t> order(n_experts);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return row[a] > row[b]; });
    const double largest = row[order[0]];
    double total = 0, of_used = 0, least = 0;
    for (int32_t e = 0; e < n_experts; ++e) {
      total += std::exp(row[e] - largest);
      least = std::min(least, row[e] - largest);
    }
    for (int32_t j = 0; j < n_used; ++j) of_used += std::exp(row[order[j]] - largest) / total;
    for (int32_t j = 0; j < n_used; ++j) {
      copies[order[j]].push_back(i * n_used + j);
      double expected = routes.scale * std::exp(row[order[j]] - largest) / total;
      if (routes.normalized) expected /= of_used;
      if (routes.expert_scales != nullptr) expected *= factors[order[j]];
      // Exponentials in numerator and denominator; sums of n_experts and of n_used of them; two
      // quotients of up to two places, and products of values rounded to f32.
      const double relative = 4 * power_error(least) + gamma(n_experts + n_used) + 8 * kUnit;
      worst = std::max(
          worst, in_bounds(weights[i * n_used + j], expected, relative * expected + 0x1p-126));
    }
  }
  CHECK(worst <= 1);

  std::vector<int32_t> expected_copy_rows(copy_rows.size()), expected_offsets{0};
  int32_t at = 0;
  for (const std::vector<int64_t>& of_expert : copies) {
    for (const int64_t copy : of_expert) expected_copy_rows[copy] = at++;
    expected_offsets.push_back(at);
  }
  CHECK(copy_rows == expected_copy_rows);
  CHECK(offsets == expected_offsets);
}

TEST_CASE("rows are routed to the experts with the largest logits, ties: the first") {
  const auto backend = test_backend(2);
  Random random(1);
  constexpr std::pair<int32_t, int32_t> kShapes[] = {{1, 1},  {2, 1},   {5, 2},   {9, 9},
                                                     {32, 4}, {33, 33}, {128, 8}, {300, 40}};
  for (const auto& [n_experts, n_used] : kShapes) {
    for (const int64_t n_rows : {1, 2, 3, 8, 9, 31, 32, 33, 100}) {
      check_routes(*backend, random, n_rows, n_experts, n_used);
    }
  }
}

// Which experts each row has, in the order of their weights.
std::vector<std::vector<int32_t>> chosen_experts(const DeviceRoutes& device, int64_t n_rows) {
  const std::vector<int32_t> copy_rows = device.copy_rows(), offsets = device.offsets();
  const int32_t n_used = device.routes.n_used;
  std::vector<std::vector<int32_t>> experts(n_rows);
  for (int64_t copy = 0; copy < n_rows * n_used; ++copy) {
    const auto end = std::ranges::upper_bound(offsets, copy_rows[copy]);
    experts[copy / n_used].push_back(static_cast<int32_t>(end - offsets.begin()) - 1);
  }
  return experts;
}

// The sums of the two largest of each group.
std::vector<double> group_sums(std::span<const double> biased, int32_t n_groups) {
  std::vector<double> sums;
  const size_t size = biased.size() / n_groups;
  for (int32_t g = 0; g < n_groups; ++g) {
    std::vector<double> group(biased.begin() + g * size, biased.begin() + (g + 1) * size);
    std::ranges::sort(group, std::greater{});
    sums.push_back(group[0] + (size > 1 ? group[1] : 0));
  }
  return sums;
}

// Scores that are almost equal may be in either order, so the choice is compared with exact scores
// up to their rounding.
void check_choice(std::span<const int32_t> chosen, std::span<const double> biased,
                  const Routes& routes, double error) {
  const std::vector<double> sums = group_sums(biased, routes.n_groups);
  const size_t group_size = biased.size() / routes.n_groups;
  // At most this many groups are certainly, or possibly, before this one.
  const auto rank = [&](size_t g, double margin) {
    return std::ranges::count_if(sums, [&](double sum) { return sum > sums[g] + margin; });
  };
  std::set<size_t> groups;
  // Those of a certainly used group that are not chosen yet.
  std::vector<size_t> others;
  for (size_t e = 0; e < biased.size(); ++e) {
    if (rank(e / group_size, -2 * error) <= routes.n_groups_used) others.push_back(e);
  }
  for (const int32_t expert : chosen) {
    const size_t group = expert / group_size;
    groups.insert(group);
    CHECK(rank(group, 2 * error) < routes.n_groups_used);
    CHECK(std::ranges::count(chosen, expert) == 1);
    double largest = -INFINITY;
    for (const size_t e : others) largest = std::max(largest, biased[e]);
    CHECK(biased[expert] >= largest - error);
    std::erase(others, expert);
  }
  CHECK(std::ssize(groups) <= routes.n_groups_used);
}

void check_scores(Backend& backend, Random& random, int64_t n_rows, int32_t n_experts,
                  int32_t n_used, bool sigmoid, bool has_bias, int32_t n_groups = 1) {
  CAPTURE(n_rows);
  CAPTURE(n_experts);
  CAPTURE(n_used);
  CAPTURE(sigmoid);
  CAPTURE(has_bias);
  CAPTURE(n_groups);
  DeviceRoutes device(backend, n_rows, n_experts, n_used);
  Routes& routes = device.routes;
  routes.sigmoid = sigmoid;
  routes.normalized = random.flip();
  routes.scale = random.real(0.5, 2);
  routes.n_groups = n_groups;
  const int32_t least = (n_used * n_groups + n_experts - 1) / n_experts;
  routes.n_groups_used = random.integer(least, n_groups);
  const std::vector<float> logits = random.reals(n_rows * n_experts, -6, 6);
  const std::vector<float> biases = random.reals(n_experts, -0.5, 0.5);
  const DeviceMatrix x(backend, logits, n_rows, n_experts), bias(backend, biases, 1, n_experts);
  const Tensor no_bias;
  const Tensor& added = has_bias ? static_cast<const Tensor&>(bias) : no_bias;
  run_rows(backend, n_rows, [&](const Batch&) { backend.route(routes, x, added); });
  const std::vector<float> weights = device.weights();
  const std::vector<std::vector<int32_t>> chosen = chosen_experts(device, n_rows);
  // Exponentials in numerator and denominator, a sum of all, and two quotients of up to two places.
  const double relative = 2 * power_error(12) + gamma(n_experts) + 6 * kUnit;
  double worst = 0;
  for (int64_t i = 0; i < n_rows; ++i) {
    const std::span row = std::span(logits).subspan(i * n_experts, n_experts);
    std::vector<double> scores(n_experts), biased(n_experts);
    double total = 0;
    for (const float logit : row) total += std::exp(logit);
    for (int32_t e = 0; e < n_experts; ++e) {
      const double power = std::exp(row[e]);
      scores[e] = sigmoid ? power / (1 + power) : power / total;
      biased[e] = has_bias ? scores[e] + biases[e] : scores[e];
    }
    // A score of at most 1, and a sum of it and the bias rounded to half a unit of at most 1.5.
    check_choice(chosen[i], biased, routes, 2 * (relative + 1.5 * kUnit));
    double of_used = 0;
    for (const int32_t e : chosen[i]) of_used += scores[e];
    for (int32_t j = 0; j < n_used; ++j) {
      double expected = routes.scale * scores[chosen[i][j]];
      if (routes.normalized) expected /= of_used;
      const double bound = (2 * relative + gamma(n_used) + 4 * kUnit) * expected;
      worst = std::max(worst, in_bounds(weights[i * n_used + j], expected, bound));
    }
  }
  CHECK(worst <= 1);
}

TEST_CASE("scores are a softmax or a sigmoid, and a bias changes only the selection") {
  const auto backend = test_backend(2);
  Random random(2);
  for (const auto& [n_experts, n_used] :
       {std::pair<int32_t, int32_t>{1, 1}, {7, 3}, {64, 6}, {128, 8}, {300, 40}}) {
    for (const int64_t n_rows : {1, 3, 32, 33, 70}) {
      for (const bool sigmoid : {false, true}) {
        check_scores(*backend, random, n_rows, n_experts, n_used, sigmoid, true);
      }
      check_scores(*backend, random, n_rows, n_experts, n_used, true, false);
    }
  }
}

TEST_CASE("experts are from the groups with the largest scores") {
  const auto backend = test_backend(2);
  Random random(3);
  struct Shape {
    int32_t n_experts, n_used, n_groups;
  };
  for (const Shape& shape : {Shape{8, 2, 2}, {8, 3, 8}, {32, 32, 32}, {64, 5, 32}, {256, 8, 8}}) {
    for (const int64_t n_rows : {1, 9, 40}) {
      for (const bool sigmoid : {false, true}) {
        for (const bool has_bias : {false, true}) {
          check_scores(*backend, random, n_rows, shape.n_experts, shape.n_used, sigmoid, has_bias,
                       shape.n_groups);
        }
      }
    }
  }
}

// Transformers' sparsemixer() in double.
std::vector<double> sparse_mixer(std::span<const float> logits, std::span<const int32_t> chosen,
                                 double spread) {
  std::vector<double> scores, left(logits.begin(), logits.end());
  for (const int32_t expert : chosen) {
    const double largest = std::ranges::max(left);
    CHECK(left[expert] == largest);
    double total = 0;
    for (size_t e = 0; e < left.size(); ++e) {
      const double factor = std::max(std::abs(double{logits[e]}), largest);
      if ((largest - left[e]) / factor <= spread) total += std::exp(left[e] - largest);
    }
    scores.push_back(1 / total);
    left[expert] = -INFINITY;
  }
  return scores;
}

TEST_CASE("SparseMixer weighs an expert among those near it that are not chosen before") {
  const auto backend = test_backend(2);
  if (!backend->capabilities().block_windows) return;
  Random random(4);
  constexpr int32_t kUsed = 2;
  for (const int32_t n_experts : {2, 5, 16, 70}) {
    for (const int64_t n_rows : {1, 3, 40}) {
      DeviceRoutes device(*backend, n_rows, n_experts, kUsed);
      device.routes.spread = 0.2503f;  // no ratio of such logits is near it
      const std::vector<float> logits = random_logits(random, n_rows * n_experts);
      const DeviceMatrix x(*backend, logits, n_rows, n_experts);
      run_rows(*backend, n_rows, [&](const Batch&) { backend->route(device.routes, x, {}); });
      const std::vector<float> weights = device.weights();
      const std::vector<std::vector<int32_t>> chosen = chosen_experts(device, n_rows);
      double worst = 0;
      for (int64_t i = 0; i < n_rows; ++i) {
        const std::vector<double> expected = sparse_mixer(
            std::span(logits).subspan(i * n_experts, n_experts), chosen[i], device.routes.spread);
        const double relative = 2 * power_error(13) + gamma(n_experts) + 4 * kUnit;
        for (int32_t j = 0; j < kUsed; ++j) {
          const float weight = weights[i * kUsed + j];
          worst = std::max(worst, in_bounds(weight, expected[j], relative * expected[j]));
        }
      }
      CHECK(worst <= 1);
    }
  }
}

TEST_CASE("sigmoids that are all 0 give weights of 0") {
  const auto backend = test_backend();
  const DeviceMatrix x(*backend, std::vector<float>(4, -200), 1, 4);
  DeviceRoutes device(*backend, 1, 4, 2);
  device.routes.sigmoid = device.routes.normalized = true;
  run_rows(*backend, 1, [&](const Batch&) { backend->route(device.routes, x, {}); });
  CHECK(device.weights() == std::vector<float>{0, 0});
}

// Later operations read the experts' weights, so the experts must be valid.
TEST_CASE("rows with NaN logits are routed to different experts") {
  const auto backend = test_backend();
  constexpr int32_t kExperts = 8, kUsed = 3, kRows = 40;
  std::vector<float> logits(kRows * kExperts, NAN);
  logits[kExperts + 4] = 1;
  std::fill_n(logits.begin() + 2 * kExperts, kExperts, -INFINITY);
  std::fill_n(logits.begin() + 3 * kExperts, kExperts, INFINITY);
  for (const int32_t n_groups : {1, 4}) {
    for (const bool sigmoid : {false, true}) {
      const DeviceMatrix x(*backend, logits, kRows, kExperts);
      DeviceRoutes device(*backend, kRows, kExperts, kUsed);
      device.routes.sigmoid = sigmoid;
      device.routes.n_groups = n_groups;
      device.routes.n_groups_used = n_groups > 1 ? 2 : 1;
      run_rows(*backend, kRows, [&](const Batch&) { backend->route(device.routes, x, {}); });
      for (std::vector<int32_t> experts : chosen_experts(device, kRows)) {
        std::ranges::sort(experts);
        CHECK(std::ranges::adjacent_find(experts) == experts.end());
      }
      std::vector<int32_t> copy_rows = device.copy_rows();
      std::ranges::sort(copy_rows);
      std::vector<int32_t> all(copy_rows.size());
      std::iota(all.begin(), all.end(), 0);
      CHECK(copy_rows == all);
    }
  }
}

}  // namespace
}  // namespace h2o
