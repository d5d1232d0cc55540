// Stop strings, compared with a naive search for each of them.
#include <doctest/doctest.h>

#include <algorithm>

#include "core/error.h"
#include "testing.h"
#include "text/stop_strings.h"

namespace h2o {
namespace {

using Strings = std::vector<std::string>;

// Makes strings of random lengths, over the first `n_letters` of "abc".
std::string random_string(Random& random, int least, int most, int n_letters) {
  std::string out(random.integer(least, most), 'a');
  for (char& c : out) c = static_cast<char>('a' + random.integer(0, n_letters - 1));
  return out;
}

struct Found {
  size_t end, length;  // length 0: not found
  bool operator==(const Found&) const = default;
};

// The string that is completed first; of several at once, the longest.
Found naive(const Strings& strings, std::string_view text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& s : strings) {
      if (text.substr(0, end).ends_with(s)) longest = std::max(longest, s.size());
    }
    if (longest > 0) return {end, longest};
  }
  return {text.size(), 0};
}

// The longest suffix of a text that is a prefix of a string.
size_t naive_partial(const Strings& strings, std::string_view text) {
  size_t longest = 0;
  for (const std::string& s : strings) {
    for (size_t n = longest + 1; n <= std::min(s.size(), text.size()); ++n) {
      if (text.ends_with(s.substr(0, n))) longest = n;
    }
  }
  return longest;
}

Found find(const StopStrings& stop, std::string_view text) {
  StopStrings::State state = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    state = stop.next(state, static_cast<unsigned char>(text[i]));
    if (const size_t n = stop.complete(state); n > 0) return {i + 1, n};
  }
  return {text.size(), 0};
}

TEST_CASE("the stop string that is completed first ends the text, the longest of several at once") {
  Random random(1);
  int n_found = 0;
  for (int i = 0; i < 20000; ++i) {
    const int n_letters = random.integer(1, 3);
    Strings strings(random.integer(0, 5));
    for (std::string& s : strings) s = random_string(random, 1, 6, n_letters);
    const std::string text = random_string(random, 0, 24, n_letters);
    const Found found = find(StopStrings(strings), text);
    n_found += found.length > 0;
    REQUIRE(found == naive(strings, text));
  }
  CHECK(n_found > 5000);
  CHECK(n_found < 19000);
}

TEST_CASE("text that may become a stop string is the longest suffix that begins one") {
  Random random(2);
  for (int i = 0; i < 5000; ++i) {
    const int n_letters = random.integer(1, 3);
    Strings strings(random.integer(1, 5));
    for (std::string& s : strings) s = random_string(random, 2, 7, n_letters);
    const StopStrings stop(strings);
    const std::string text = random_string(random, 0, 24, n_letters);
    StopStrings::State state = 0;
    for (size_t n = 1; n <= text.size(); ++n) {
      state = stop.next(state, static_cast<unsigned char>(text[n - 1]));
      REQUIRE(stop.partial(state) == naive_partial(strings, text.substr(0, n)));
    }
  }
}

TEST_CASE("examples of stop strings") {
  CHECK(find(StopStrings(Strings{"b", "abc"}), "xabcx") == Found{3, 1});
  CHECK(find(StopStrings(Strings{"bc", "abc"}), "xabcx") == Found{4, 3});
  CHECK(find(StopStrings(Strings{"abcd", "bc"}), "xabcd") == Found{4, 2});
  CHECK(find(StopStrings(Strings{"a", "a"}), "ba") == Found{2, 1});
  CHECK(find(StopStrings(), "abc") == Found{3, 0});
  CHECK_THROWS_AS(StopStrings(Strings{"a", ""}), InvalidArgument);
  CHECK_THROWS_AS(StopStrings(Strings{"\xf0\x9f"}), InvalidArgument);
}

// One pass: searching for each of them separately would take 10^11 steps.
TEST_CASE("a hundred thousand stop strings") {
  Random random(3);
  Strings strings(100000);
  for (std::string& s : strings) s = random_string(random, 20, 40, 2);
  const std::string deep(100000, 'a');
  strings.push_back(deep + "b");  // with a long chain of fallbacks
  const StopStrings stop(strings);
  std::string text = "c";
  for (int i = 0; i < 10; ++i) text += deep.substr(0, 19) + "c";
  CHECK(find(stop, text).length == 0);
  for (const size_t i : {0, 50000, 99999}) {
    const Found found = find(stop, text + strings[i]);
    CHECK(found.length > 0);
    CHECK(found.end <= text.size() + strings[i].size());
    CHECK(std::ranges::find(strings,
                            (text + strings[i]).substr(found.end - found.length, found.length)) !=
          strings.end());
  }
}

TEST_CASE("a stop string that is repeatedly almost completed") {
  const std::string deep(100000, 'a');
  const StopStrings stop(Strings{deep + "b"});
  std::string text;
  for (int i = 0; i < 10; ++i) text += deep + "c";
  CHECK(find(stop, text).length == 0);
  CHECK(find(stop, text + "aa" + deep + "b") == Found{text.size() + deep.size() + 3, 100001});
}

}  // namespace
}  // namespace h2o
