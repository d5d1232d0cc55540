// The H2O cache stated once more, in double and as plainly as can be: a list of kept tokens. It
// shares nothing with the engine but the policy's three numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_rig.h"
#include "cpu/isa/detect.h"

namespace h2o {

struct Kept {
  int32_t position;
  std::vector<double> k, v;  // [head_dim], as rounded to the cache's type
  double score = 0;
  double error = 0;  // how far from `score` the engine's may be
};

// One sequence, one kv_head. step() gives the attention outputs of the next tokens and how far
// from them f32 may be; adopt() says which tokens survive.
class ReferenceHead {
 public:
  ReferenceHead(const KvPolicy& policy, const KvShape& shape)
      : policy_(policy), shape_(shape), type_(&choose_kernels("scalar").of(shape.k_dtype)) {}

  struct Output {
    std::vector<double> value;  // [n, group, head_dim]
    std::vector<double> bound;
  };

  Output step(int64_t n, const std::vector<float>& q, const std::vector<float>& k,
              const std::vector<float>& v) {
    const int64_t before = std::ssize(kept_);
    const int64_t group = shape_.n_heads / shape_.n_kv_heads;
    for (int64_t i = 0; i < n; ++i) {
      kept_.push_back({length_++, rounded(k, i), rounded(v, i)});
    }
    Output out;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t h = 0; h < group; ++h) {
        attend(q.data() + (i * group + h) * shape_.head_dim, before + i + 1, out);
      }
    }
    return out;
  }

  // Positions of the survivors: the sinks, the recent, and of the rest the heaviest; of equals the
  // older.
  std::vector<int32_t> survivors() const {
    std::vector<int32_t> positions;
    std::vector<Kept> rest;
    for (const Kept& token : kept_) {
      const bool stays = std::ssize(kept_) <= policy_.budget() || token.position < policy_.sinks ||
                         token.position >= int64_t{length_} - policy_.recent;
      if (stays) {
        positions.push_back(token.position);
      } else {
        rest.push_back(token);
      }
    }
    std::stable_sort(rest.begin(), rest.end(),
                     [](const Kept& a, const Kept& b) { return a.score > b.score; });
    const int64_t n_heavy = std::min<int64_t>(policy_.heavy, std::ssize(rest));
    for (int64_t i = 0; i < n_heavy; ++i) positions.push_back(rest[i].position);
    std::sort(positions.begin(), positions.end());
    return positions;
  }

  // Goes on with the tokens that the engine kept. False if it kept others than survivors() by more
  // than rounding: if a token it evicted certainly scores more than one it kept in its place.
  bool adopt(const std::vector<KvEntry>& entries) {
    std::vector<int32_t> actual;
    for (const KvEntry& entry : entries) actual.push_back(entry.position);
    const std::vector<int32_t> expected = survivors();
    const auto missing_from = [this](const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
      std::vector<int32_t> positions;
      std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(positions));
      std::vector<Kept> tokens;
      for (const Kept& token : kept_) {
        if (std::count(positions.begin(), positions.end(), token.position) > 0) {
          tokens.push_back(token);
        }
      }
      return tokens;
    };
    const std::vector<Kept> evicted = missing_from(expected, actual);
    const std::vector<Kept> instead = missing_from(actual, expected);
    bool right = actual.size() == expected.size() && evicted.size() == instead.size();
    for (const Kept& gone : evicted) {
      for (const Kept& stayed : instead) {
        right = right && policy_.heavy > 0 && stayed.position >= policy_.sinks &&
                stayed.position < length_ - policy_.recent &&
                gone.score - stayed.score <= gone.error + stayed.error;
      }
    }
    n_close_calls_ += std::ssize(evicted);
    std::erase_if(kept_, [&](const Kept& token) {
      return std::count(actual.begin(), actual.end(), token.position) == 0;
    });
    return right;
  }

  const std::vector<Kept>& kept() const { return kept_; }
  int64_t n_close_calls() const { return n_close_calls_; }

 private:
  std::vector<double> rounded(const std::vector<float>& x, int64_t row) const {
    const int64_t n = shape_.head_dim;
    std::vector<std::byte> stored(byte_size(shape_.k_dtype, n));
    std::vector<float> back(n);
    type_->encode(stored.data(), x.data() + row * n, n);
    type_->decode(back.data(), stored.data(), n);
    return {back.begin(), back.end()};
  }

  // One query over the first n_visible tokens.
  void attend(const float* q, int64_t n_visible, Output& out) {
    const int64_t head_dim = shape_.head_dim;
    const double scale = attention_scale(shape_);
    std::vector<double> a(n_visible);
    double logit_error = 0;  // of a logit, scaled: gamma of head_dim + 6 roundings, see test_matmul
    for (int64_t j = 0; j < n_visible; ++j) {
      double magnitude = 0;
      for (int64_t d = 0; d < head_dim; ++d) {
        a[j] += scale * q[d] * kept_[j].k[d];
        magnitude += std::abs(scale * q[d] * kept_[j].k[d]);
      }
      logit_error = std::max(logit_error, gamma(head_dim + 6) * magnitude);
    }
    const double largest = *std::max_element(a.begin(), a.end());
    double total = 0;
    double spread = 0;
    for (double& x : a) {
      spread = std::max(spread, largest - x);
      x = std::exp(x - largest);
      total += x;
    }
    // The exponent a_j - largest is off by two logits' errors and two roundings of it, as is each
    // term of the sum; then the roundings of softmax, see test_kernels.
    const double relative =
        1.01 * (2 * (2 * logit_error + (2 * spread + 4) * kUnit) + gamma(n_visible + 2));
    std::vector<double> value(head_dim);
    std::vector<double> magnitude(head_dim);
    for (int64_t j = 0; j < n_visible; ++j) {
      const double p = a[j] / total;
      for (int64_t d = 0; d < head_dim; ++d) {
        value[d] += p * kept_[j].v[d];
        magnitude[d] += std::abs(p * kept_[j].v[d]);
      }
      kept_[j].score += p;
      kept_[j].error += relative * p + kUnit * kept_[j].score;  // and the rounding of the sum
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      out.value.push_back(value[d]);
      out.bound.push_back((relative + gamma(n_visible + 1)) * magnitude[d]);
    }
  }

  KvPolicy policy_;
  KvShape shape_;
  const TypeKernels* type_;  // rounds to the cache's type
  int32_t length_ = 0;
  std::vector<Kept> kept_;  // in position order
  int64_t n_close_calls_ = 0;
};

}  // namespace h2o
