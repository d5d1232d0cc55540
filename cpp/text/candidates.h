// Candidates: the tokens a sampler can still choose from, and the steps that truncate them. Sorts
// only as much as necessary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace h2o {

struct Candidate {
  int32_t token;
  float logit;
  float weight;
};

// Descending likelihood.
constexpr auto likelier = [](const auto& a, const auto& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
};

class Candidates {
 public:
  // The first n > 0 elements of `room`, with finite logits, in any order.
  Candidates(std::span<Candidate> room, size_t n) : all_(room), n_(n) {}

  // Each step keeps at least one candidate.
  void scale(float temperature);  // above 0
  // A temperature between `min` and `max`, depending on the entropy.
  void scale_by_entropy(float min, float max, float exponent);
  void keep_largest(size_t k);
  void keep_probable(float p);      // the most likely with this total probability
  void keep_relative(float ratio);  // at least this times as likely as the most likely
  void keep_sigma(float n);         // up to n standard deviations below the largest logit
  void keep_typical(float p);       // closest to the average surprise, with this total probability
  // all but the least likely of those with at least this probability
  void drop_top(float threshold);
  void keep_surprise(double max_bits);  // up to this surprise, in bits

  // The number of most likely candidates to keep for a surprise of about `bits`, assuming a Zipf
  // distribution (Basu et al., arXiv 2007.14966).
  size_t zipf_count(double bits, size_t n_vocab);

  size_t size() const { return n_; }

  // The candidate at cumulative probability `u`, 0 <= u < 1, in descending order of likelihood;
  // sets `surprise` to its surprise in bits.
  int32_t draw(double u, double* surprise = nullptr);

 private:
  void weigh();
  double total();
  double entropy();
  void sort_first(size_t n);
  void keep_first(size_t n);
  template <typename Drop>
  void drop_if(Drop drop);

  std::span<Candidate> all_;
  size_t n_;
  size_t n_sorted_ = 0;   // the first n_sorted_ are sorted and are the most likely
  bool weighed_ = false;  // weights are up to date, relative to the largest logit
};

}  // namespace h2o
