// MersenneTwister: the numbers of std::mt19937_64, and its state.
#include <doctest/doctest.h>

#include <random>
#include <sstream>
#include <string>

#include "text/mersenne_twister.h"

namespace h2o {
namespace {

std::string state(const MersenneTwister& random) {
  std::ostringstream out;
  out << random;
  return out.str();
}

bool read_state(MersenneTwister& random, const std::string& text) {
  std::istringstream in(text);
  return static_cast<bool>(in >> random);
}

}  // namespace

TEST_CASE("the numbers of std::mt19937_64, also after reading a state") {
  for (const uint64_t seed : {uint64_t{0}, uint64_t{5489}, ~uint64_t{0}}) {
    CAPTURE(seed);
    MersenneTwister random(seed);
    std::mt19937_64 standard(seed);
    for (int i = 0; i < 1000; ++i) {
      MersenneTwister read;
      CHECK(read_state(read, state(random)));
      const uint64_t expected = standard();
      CHECK(random() == expected);
      CHECK(read() == expected);
    }
  }
}

#ifdef __GLIBCXX__
TEST_CASE("the state is that of libstdc++") {
  MersenneTwister random(3);
  std::mt19937_64 standard(3);
  for (int i = 0; i < 700; ++i) {
    std::ostringstream out;
    out << standard;
    CHECK(state(random) == out.str());
    random();
    standard();
  }
}
#endif

TEST_CASE("an invalid state changes nothing") {
  const std::string good = state(MersenneTwister(1));
  const std::string words = good.substr(0, good.rfind(' '));
  for (const std::string& bad : {std::string(), std::string("x"), words, words + " 313",
                                 words + " -1", "18446744073709551616 " + good}) {
    CAPTURE(bad);
    MersenneTwister random(2);
    CHECK_FALSE(read_state(random, bad));
    CHECK(state(random) == state(MersenneTwister(2)));
  }
}

}  // namespace h2o
