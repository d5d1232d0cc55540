// MersenneTwister: the numbers of std::mt19937_64, and a state as text that is the same with every
// standard library.
#pragma once

#include <array>
#include <cstdint>
#include <istream>
#include <ostream>

namespace h2o {

class MersenneTwister {
 public:
  explicit MersenneTwister(uint64_t seed = 5489) {
    words_[0] = seed;
    for (size_t i = 1; i < kWords; ++i) {
      words_[i] = 6364136223846793005 * (words_[i - 1] ^ words_[i - 1] >> 62) + i;
    }
  }

  uint64_t operator()() {
    if (next_ == kWords) twist();
    uint64_t x = words_[next_++];
    x ^= x >> 29 & 0x5555555555555555;
    x ^= x << 17 & 0x71d67fffeda60000;
    x ^= x << 37 & 0xfff7eee000000000;
    return x ^ x >> 43;
  }

  // 312 words and the index of the next one, as libstdc++ writes std::mt19937_64.
  friend std::ostream& operator<<(std::ostream& out, const MersenneTwister& random) {
    for (const uint64_t word : random.words_) out << word << ' ';
    return out << random.next_;
  }
  // Sets the stream's failbit, and leaves `random` unchanged, if it is not such a text.
  friend std::istream& operator>>(std::istream& in, MersenneTwister& random) {
    MersenneTwister read;
    for (uint64_t& word : read.words_) in >> word;
    in >> read.next_;
    if (read.next_ > kWords) in.setstate(std::ios::failbit);
    if (in) random = read;
    return in;
  }

 private:
  static constexpr size_t kWords = 312;

  // Replaces all words.
  void twist() {
    constexpr size_t kAhead = 156;
    constexpr uint64_t kLow = 0x7fffffff;
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t x = (words_[i] & ~kLow) | (words_[(i + 1) % kWords] & kLow);
      words_[i] = words_[(i + kAhead) % kWords] ^ x >> 1 ^ (x & 1) * 0xb5026f5aa96619e9;
    }
    next_ = 0;
  }

  std::array<uint64_t, kWords> words_;
  size_t next_ = kWords;  // index of the next word
};

}  // namespace h2o
