// A reference implementation of the H2O cache in double, as simple as possible: a list of kept
// tokens. It shares only the policy's numbers with the engine.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "attention_rig.h"
#include "bounds.h"
#include "cpu/isa/detect.h"

namespace h2o {

struct Score {
  double score = 0;
  double error = 0;        // accumulated error of the probabilities in `score`
  int64_t n_received = 0;  // how many there are

  // The error bound of the engine's score.
  double score_error() const { return error + gamma(n_received) * score; }

  void raise(const Score& other) {
    score = std::max(score, other.score);
    error = std::max(error, other.error);
    n_received = std::max(n_received, other.n_received);
  }
};

struct Kept : Score {
  int32_t position;
  std::vector<double> k, v;  // [head_dim], rounded to the cache's type
};

// Does the device use tensor cores for chunks, with factors rounded to f16?
inline bool uses_tensor_cores(const KvShape& shape) {
  return on_cuda() && shape.k_dtype != DType::f32 && shape.v_dtype != DType::f32 &&
         shape.head_dim % 4 == 0 && shape.head_dim <= 256;
}

// Does the CPU split products into those of bf16?
inline bool splits_products(const KvShape& shape) {
  if (on_gpu()) return false;
  const auto backend = test_backend();
  return multiplies_in_bf16(backend->name()) &&
         backend->name().find("x86_64_v4_amx") != std::string::npos &&
         shape.n_heads >= 7 * shape.n_kv_heads;
}

// Does the CPU round factors to bf16, if attention may round?
inline bool rounds_to_bf16(const KvShape& shape) {
  const auto fits = [](DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; };
  return !on_gpu() && test_backend()->name().find("x86_64_v4_bf16") != std::string::npos &&
         fits(shape.k_dtype) && fits(shape.v_dtype) && shape.head_dim % 32 == 0 &&
         shape.head_dim <= 256;
}

// One sequence and one kv_head. step() returns the attention outputs of the next tokens with error
// bounds for f32; adopt() updates the kept tokens.
class ReferenceHead {
 public:
  ReferenceHead(const KvPolicy& policy, const KvShape& shape, const LogitRules& rules = {},
                int32_t number = 0)
      : policy_(policy),
        shape_(shape),
        rules_(rules),
        number_(number),
        k_type_(&choose_kernels("scalar").of(shape.k_dtype)),
        v_type_(&choose_kernels("scalar").of(shape.v_dtype)) {}

  struct Output {
    std::vector<double> value;  // [n, group, head_dim]
    std::vector<double> bound;
  };

  // `prefill`: the batch has a chunk of more than one row.
  Output step(int64_t n, const std::vector<float>& q, const std::vector<float>& k,
              const std::vector<float>& v, bool prefill) {
    const bool tensor_cores = prefill && uses_tensor_cores(shape_);
    const int64_t before = std::ssize(kept_);
    const int64_t group = shape_.n_heads / shape_.n_kv_heads;
    for (int64_t i = 0; i < n; ++i) {
      kept_.push_back({{}, length_++, rounded(k, i, *k_type_), rounded(v, i, *v_type_)});
    }
    const bool questions = policy_.scoring == Scoring::question;
    Output out;
    for (int64_t i = 0; i < n; ++i) {
      std::vector<Score> previous;
      if (questions) {  // this row's attention alone
        previous.assign(kept_.begin(), kept_.end());
        for (Kept& token : kept_) static_cast<Score&>(token) = {};
      }
      for (int64_t h = 0; h < group; ++h) {
        attend(q.data() + (i * group + h) * shape_.head_dim, h, before + i + 1, tensor_cores, out);
      }
      for (size_t j = 0; questions && j < kept_.size(); ++j) {
        if (i + KvPolicy::kQuestionRows < n) {
          static_cast<Score&>(kept_[j]) = previous[j];
        } else {
          kept_[j].raise(previous[j]);
        }
      }
    }
    if (questions && std::ssize(kept_) > policy_.budget() + 1) pool();
    return out;
  }

  // Positions of the tokens to keep: the sinks, the recent ones, and of the rest those with the
  // highest scores; ties: the older.
  std::vector<int32_t> survivors() const {
    std::vector<int32_t> positions;
    std::vector<const Kept*> rest;
    for (const Kept& token : kept_) {
      if (std::ssize(kept_) <= policy_.budget() || !evictable(token)) {
        positions.push_back(token.position);
      } else {
        rest.push_back(&token);
      }
    }
    const auto importance = [this](const Kept* token) -> double {
      if (policy_.scoring != Scoring::random) return token->score;
      return KvPolicy::random_number(token->position, length_, number_);
    };
    std::ranges::stable_sort(rest, std::ranges::greater(), importance);
    const int64_t n_heavy = std::min<int64_t>(policy_.heavy, std::ssize(rest));
    for (int64_t i = 0; i < n_heavy; ++i) positions.push_back(rest[i]->position);
    std::sort(positions.begin(), positions.end());
    return positions;
  }

  // Continues with the tokens that the engine kept. Returns false if they differ from survivors()
  // by more than rounding explains: if an evicted token certainly has a higher score than a kept
  // one.
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
        right = right && policy_.keeps_scores() && evictable(stayed) &&
                gone.score - stayed.score <= gone.score_error() + stayed.score_error();
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
  std::vector<double> rounded(const std::vector<float>& x, int64_t row,
                              const TypeKernels& type) const {
    const int64_t n = shape_.head_dim;
    std::vector<std::byte> stored(n * sizeof(float));  // the largest element size
    std::vector<float> back(n);
    type.encode(stored.data(), x.data() + row * n, n);
    type.decode(back.data(), stored.data(), n);
    return {back.begin(), back.end()};
  }

  // Tail positions count as recent once they have been read.
  bool evictable(const Kept& token) const {
    int64_t n_tail = 0, n_younger = 0;
    for (int32_t position = 0; position < length_; ++position) {
      const bool in_tail = policy_.tail_begin <= position && position < policy_.tail_end;
      if (in_tail && position == token.position) return false;
      n_tail += in_tail;
      n_younger += !in_tail && position > token.position;
    }
    return token.position >= policy_.sinks && n_younger >= policy_.recent - n_tail;
  }

  // The largest score of each evictable token's evictable neighbors.
  void pool() {
    std::vector<Score> rest;
    std::ranges::copy_if(kept_, std::back_inserter(rest),
                         [this](const Kept& token) { return evictable(token); });
    int64_t i = 0;
    for (Kept& token : kept_) {
      if (!evictable(token)) continue;
      const int64_t begin = std::max<int64_t>(i - KvPolicy::kNeighbors, 0);
      const int64_t end = std::min<int64_t>(i + KvPolicy::kNeighbors + 1, std::ssize(rest));
      for (int64_t j = begin; j < end; ++j) token.raise(rest[j]);
      ++i;
    }
  }

  // Distance from the last of n_visible tokens to token j.
  double distance(int64_t n_visible, int64_t j) const {
    const int64_t last = n_visible - 1;
    return static_cast<double>(rules_.of_ranks ? last - j
                                               : kept_[last].position - kept_[j].position);
  }

  // One query of a head over the first n_visible tokens.
  void attend(const float* q, int64_t head, int64_t n_visible, bool tensor_cores, Output& out) {
    const int64_t head_dim = shape_.head_dim;
    const double scale = attention_scale(shape_);
    // Split factors are off by 2^-16 each, and what is left out is 2^-16 of a product; three sums.
    const auto sum_error = [=, this](int64_t n) {
      return tensor_cores ? tensor_core_gamma(n) : splits_ ? 3.01 * 0x1p-16 + gamma(2 * n) : 0.0;
    };
    const bool rounds = tensor_cores || in_bf16_;
    const DType factor_type = tensor_cores ? DType::f16 : DType::bf16;
    const double factor_unit = tensor_cores ? 0x1p-11 : 0x1p-8;
    std::vector<double> a(n_visible);
    double logit_error = 0;  // of a scaled logit: gamma of head_dim + 6 roundings, see test_matmul
    for (int64_t j = 0; j < n_visible; ++j) {
      const double* k = kept_[j].k.data();
      double logit = 0;
      double magnitude = 0;
      for (int64_t d = 0; d < head_dim; ++d) {
        const double product = scale * q[d] * k[d];
        logit += product;
        magnitude += std::abs(product);
      }
      if (!rules_.slopes.empty()) {  // two roundings, and those of the slope's factor
        const double fall = double{rules_.slopes[head]} * distance(n_visible, j);
        logit -= fall;
        magnitude += std::abs(fall);
      }
      double factors = 0;  // error from rounding q, with or without its scale, and k
      for (int64_t d = 0; rounds && d < head_dim; ++d) {
        const double error = rounding_error(factor_type, k[d]);
        factors += scale * (std::abs(q[d]) * error + factor_unit * std::abs(q[d] * k[d]));
      }
      const double sum = sum_error(head_dim) + gamma(head_dim + 6);
      double error = sum * magnitude + 1.004 * factors;  // and of their product
      if (rules_.softcap > 0) {
        // The derivative of tanh is at most 1. Its error is 16 units on the CPU, see
        // test_operations. CUDA's c - 2 c / (1 + e^(2 x / c)) is off by 15 of c: 2 for four
        // roundings of the exponent, 2 for an exponential off by 4, 2 for 1 + e, 8 for a quotient
        // off by 4, 1 for the difference. And c is rounded when it is divided by the scale.
        logit = rules_.softcap * std::tanh(logit / rules_.softcap);
        error += 18 * kUnit * rules_.softcap;
      }
      a[j] = logit;
      logit_error = std::max(logit_error, error);
    }
    double largest = *std::max_element(a.begin(), a.end());
    double total = 0;
    double power = 0;  // relative error of an exponential
    int64_t n_terms = n_visible;
    if (!rules_.sinks.empty()) {  // a logit rounded as often as a token's logit is scaled
      const double sink = rules_.sinks[head];
      power = power_error(std::abs(sink - largest));
      largest = std::max(largest, sink);
      total = std::exp(sink - largest);
      logit_error = std::max(logit_error, gamma(4) * std::abs(sink));
      n_terms += 4;  // and merging it: exponentials, products, a sum
    }
    for (double& x : a) {
      power = std::max(power, power_error(largest - x));
      x = std::exp(x - largest);
      total += x;
    }
    // The exponent a_j - largest has the errors of two logits, as does each term of the sum; then
    // the roundings of softmax, see test_kernels, and as many for merging parts with different
    // maxima.
    const double sums = gamma(2 * n_terms + 2);
    const double relative = std::expm1(2 * (2 * logit_error + power) + sums);
    std::vector<double> value(head_dim);
    std::vector<double> bound(head_dim);
    // Values are multiplied by weights before the division by their sum, which is at least 1.
    const double weights = relative + sums + sum_error(n_visible);
    std::vector<double> magnitude(head_dim);
    for (int64_t j = 0; j < n_visible; ++j) {
      const double p = a[j] / total;
      const double* v = kept_[j].v.data();
      for (int64_t d = 0; d < head_dim; ++d) {
        const double term = p * v[d];
        value[d] += term;
        magnitude[d] += std::abs(term);
      }
      const double p_error = std::max(factor_unit * p, tensor_cores ? 0x1p-25 / total : 0);
      for (int64_t d = 0; rounds && d < head_dim; ++d) {
        bound[d] += 1.004 * (p_error * std::abs(v[d]) + p * rounding_error(factor_type, v[d]));
      }
      kept_[j].score += p;
      kept_[j].error += relative * p;
      ++kept_[j].n_received;
    }
    for (int64_t d = 0; d < head_dim; ++d) bound[d] += weights * magnitude[d];
    out.value.insert(out.value.end(), value.begin(), value.end());
    out.bound.insert(out.bound.end(), bound.begin(), bound.end());
  }

  KvPolicy policy_;
  KvShape shape_;
  bool splits_ = splits_products(shape_);
  LogitRules rules_;
  int32_t number_;  // of the kv_head  // for the query heads of the group
  bool in_bf16_ = rules_.allow_bf16 && rounds_to_bf16(shape_);
  const TypeKernels* k_type_;  // used to round to the cache's types
  const TypeKernels* v_type_;
  int32_t length_ = 0;
  std::vector<Kept> kept_;  // in position order
  int64_t n_close_calls_ = 0;
};

}  // namespace h2o
