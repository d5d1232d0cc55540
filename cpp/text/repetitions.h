// Repetitions: tokens that would go on repeating what has been there before. "DRY", by p-e-w
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
    int32_t length;  // of the longest repetition that it extends
  };

  // most: tokens that are remembered; -1 = all.
  explicit Repetitions(int32_t most = 0) : most_(most) {}

  // So that accept() of so many tokens cannot fail.
  void reserve(size_t n_tokens);
  void accept(std::span<const int32_t> tokens) noexcept;

  // The tokens, each once, that would extend a repetition of `least` tokens or more. None goes past
  // a token of `breakers`, a flag for each token of the vocabulary or nothing.
  std::span<const Found> find(int32_t least, std::span<const uint8_t> breakers);

 private:
  int32_t most_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> lengths_;
  std::vector<Found> found_;
};

}  // namespace h2o
