// Repetitions: finds tokens that would continue a repetition of earlier tokens. "DRY", by p-e-w
// (github.com/oobabooga/text-generation-webui/pull/5677).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace h2o {

class Repetitions {
 public:
  struct Found {
    int32_t token;
    int32_t length;  // of the longest repetition it would extend
  };

  // max_tokens: maximum number of tokens remembered; -1 = all.
  explicit Repetitions(int32_t max_tokens = 0) : max_tokens_(max_tokens) {}

  // Reserves memory so that accept() of n_tokens tokens cannot fail.
  void reserve(size_t n_tokens);
  void accept(std::span<const int32_t> tokens) noexcept;

  // The distinct tokens that would extend a repetition of at least `min_length` tokens. Repetitions
  // do not extend across tokens flagged in `breakers` [n_vocab] (may be empty).
  std::span<const Found> find(int32_t min_length, std::span<const uint8_t> breakers);

 private:
  int32_t max_tokens_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> lengths_;
  std::vector<Found> found_;
};

}  // namespace h2o
