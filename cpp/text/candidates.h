// Candidates: the tokens that are left to choose from, and what leaves out some of them. Sorts only
// as far as it has to.
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

class Candidates {
 public:
  // The first n of `room`, n > 0, with finite logits and in any order.
  Candidates(std::span<Candidate> room, size_t n) : all_(room), n_(n) {}

  // Each keeps one candidate at least.
  void scale(float temperature);  // above 0
  // A temperature from `least` to `most`, by the entropy.
  void scale_by_entropy(float least, float most, float exponent);
  void keep_largest(size_t k);
  void keep_probable(float p);      // the most likely, of this probability together
  void keep_relative(float least);  // at least this times as likely as the likeliest
  void keep_sigma(float n);         // up to n standard deviations below the largest logit
  void keep_typical(float p);       // surprising about as much as the average, likewise
  void drop_top(float threshold);   // all but the least likely of those with this probability
  void keep_surprise(double most);  // up to so many bits

  // How many of the most likely to keep so that the surprise is about `bits`, if they are spread as
  // Zipf's law has it (Basu et al., arXiv 2007.14966).
  size_t zipf_count(double bits, size_t n_vocab);

  size_t size() const { return n_; }

  // The one at `u` of the total probability, 0 <= u < 1, the most likely first; and how many bits
  // its choice was worth.
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
  size_t n_sorted_ = 0;   // of the first, which are the most likely
  bool weighed_ = false;  // are the weights those of the logits, 1 for the largest?
};

}  // namespace h2o
