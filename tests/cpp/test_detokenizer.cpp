// Turns token bytes into pieces of text: complete characters, ending before a stop string.
#include <doctest/doctest.h>

#include "core/utf8.h"
#include "testing.h"
#include "text/detokenizer.h"

namespace h2o {
namespace {

// Concatenates the pieces of `bytes`, pushed in parts of random lengths; each must be valid UTF-8.
std::string streamed(std::string_view bytes, const std::vector<std::string>& stop, Random& random) {
  Detokenizer pieces(stop);
  std::string out;
  while (!bytes.empty()) {
    const auto n = static_cast<size_t>(random.integer(1, 4));
    const std::string piece = pieces.push(bytes.substr(0, n));
    CHECK(is_utf8(piece));
    out += piece;
    bytes.remove_prefix(std::min(n, bytes.size()));
  }
  return out + pieces.finish();
}

TEST_CASE("invalid UTF-8 becomes U+FFFD, as in the Unicode Standard") {
  // Table 3-8 of the standard, and the other tables of its section 3.9.
  CHECK(repaired_utf8("\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64") ==
        "a\ufffd\ufffd\ufffd"
        "b\ufffd"
        "c\ufffd\ufffd"
        "d");
  CHECK(repaired_utf8("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41") ==
        "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"
        "A");
  CHECK(repaired_utf8("\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41") ==
        "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"
        "A");
  CHECK(repaired_utf8("\xf4\x91\x92\x93\xff\x41\x80\xbf\x42") ==
        "\ufffd\ufffd\ufffd\ufffd\ufffd"
        "A\ufffd\ufffd"
        "B");
  CHECK(repaired_utf8("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41") ==
        "\ufffd\ufffd\ufffd\ufffd"
        "A");
  CHECK(!is_utf8("\xed\xa0\x80"));
  CHECK(!is_utf8("\xc3"));
  CHECK(is_utf8(std::string_view("\0\x7f\xf4\x8f\xbf\xbf", 6)));
}

TEST_CASE("every character round-trips") {
  int n_wrong = 0;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    std::string text;
    append_utf8(text, c);
    const Utf8 read = read_utf8(text);
    n_wrong += read.kind != Utf8::character || read.code != c || read.n_bytes != text.size();
  }
  CHECK(n_wrong == 0);
}

TEST_CASE("streamed text is the whole text, however its bytes are split") {
  Random random(1);
  const std::string text = "naïve 🦙 \xff\xc3 日本 \xf0\x9f";
  for (int i = 0; i < 100; ++i) {
    CHECK(streamed(text, {}, random) == repaired_utf8(text));
    CHECK(streamed(text, {"nowhere", "日 "}, random) == repaired_utf8(text));
  }
}

TEST_CASE("text ends before the first stop string") {
  Random random(2);
  for (int i = 0; i < 100; ++i) {
    CHECK(streamed("one two three", {"three", "two"}, random) == "one ");
    CHECK(streamed("aaab", {"aab"}, random) == "a");
    CHECK(streamed("🦙🦙é🦙", {"é"}, random) == "🦙🦙");
    CHECK(streamed("one tw", {"two"}, random) == "one tw");
    CHECK(streamed("two", {"two"}, random) == "");
  }
}

TEST_CASE("text ends at the stop string that is completed first, the longest of several at once") {
  const auto ended = [](std::string_view text, const std::vector<std::string>& stop) {
    Random random(3);
    const std::string out = streamed(text, stop, random);
    for (int i = 0; i < 100; ++i) CHECK(streamed(text, stop, random) == out);
    return out;
  };
  CHECK(ended("a🦙a", {"🦙", "a🦙a"}) == "a");
  CHECK(ended("a🦙a", {"a🦙a"}) == "");
  CHECK(ended("a🦙a", {"🦙a", "a🦙a"}) == "");
  CHECK(ended("a🦙b", {"a🦙a"}) == "a🦙b");
  CHECK(ended("one two", {"two", "e two"}) == "on");
  CHECK(ended("\xff🦙", {"\ufffd🦙"}) == "");    // compared with the repaired text
  CHECK(ended("a\xf0\x9f", {"a\ufffd"}) == "");  // completed by finish()
}

TEST_CASE("held-back text continues in another detokenizer") {
  const std::string text =
      "ab🦙a🦙\xf0\x9f"
      "ab a🦙é🦙 aab";
  const std::vector<std::string> stop = {"a🦙é🦙a", "🦙 aa", "nowhere"};
  Random random(4);
  const std::string whole = streamed(text, stop, random);
  for (size_t at = 0; at <= text.size(); ++at) {
    Detokenizer first(stop), second(stop);
    std::string out = first.push(std::string_view(text).substr(0, at));
    if (first.stopped()) break;
    out += second.push(first.held_text());
    out += second.push(first.held_bytes());
    out += second.push(std::string_view(text).substr(at));
    CHECK(out + second.finish() == whole);
  }
}

TEST_CASE("only text that may begin a stop string is held back") {
  Detokenizer pieces(std::vector<std::string>{"END.", "N"});
  CHECK(pieces.push("the E") == "the ");
  CHECK(pieces.push("E") == "E");
  CHECK(pieces.push("x") == "Ex");
  CHECK(!pieces.stopped());
  CHECK(pieces.push("yEN") == "yE");
  CHECK(pieces.stopped());
  CHECK(pieces.stop_string() == "N");
  CHECK(pieces.push("D. more") == "");
  CHECK(pieces.finish() == "");
}

}  // namespace
}  // namespace h2o
