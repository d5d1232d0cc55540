// From a token's bytes to pieces of text: characters whole, and cut before a stop string.
#include <doctest/doctest.h>

#include "testing.h"
#include "text/detokenizer.h"
#include "text/tokenizer/utf8.h"

namespace h2o {
namespace {

// The pieces of `bytes` pushed in parts of random lengths, joined; each has to be UTF-8.
std::string streamed(std::string_view bytes, std::vector<std::string> stop, Random& random) {
  Detokenizer pieces(std::move(stop));
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

TEST_CASE("what is no UTF-8 becomes U+FFFD, as the Unicode Standard has it") {
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

TEST_CASE("every character is written as it is read") {
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

TEST_CASE("streamed text is the whole text, however its bytes come") {
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

TEST_CASE("what may begin a stop string is held back, and nothing else") {
  Detokenizer pieces(std::vector<std::string>{"END.", "N"});
  CHECK(pieces.push("the E") == "the ");
  CHECK(pieces.push("E") == "E");
  CHECK(pieces.push("x") == "Ex");
  CHECK(!pieces.stopped());
  CHECK(pieces.push("yEN") == "yE");
  CHECK(pieces.stopped());
  CHECK(pieces.push("D. more") == "");
  CHECK(pieces.finish() == "");
}

}  // namespace
}  // namespace h2o
