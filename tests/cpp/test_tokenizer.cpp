// The parts of the tokenizer. tests/python/test_tokenizer_originals.py compares its tokens with
// Hugging Face, sentencepiece and llama.cpp.
#include <doctest/doctest.h>

#include "core/error.h"
#include "core/utf8.h"
#include "testing.h"
#include "text/tokenizer/merge.h"
#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/unicode.h"

namespace h2o {
namespace {

constexpr Tokenizer::Options kPlain = {.add_special = false};

TEST_CASE("characters are composed as Unicode Standard Annex 15 shows") {
  CHECK(nfc("plain") == "plain");
  CHECK(nfc("\u212b") == "\u00c5");  // figure 3: singletons
  CHECK(nfc("\u2126") == "\u03a9");
  CHECK(nfc("A\u030a") == "\u00c5");        // figure 4
  CHECK(nfc("s\u0323\u0307") == "\u1e69");  // figure 5: multiple marks
  CHECK(nfc("s\u0307\u0323") == "\u1e69");
  CHECK(nfc("\u1e0b\u0323") == "\u1e0d\u0307");
  CHECK(nfc("q\u0307\u0323") == "q\u0323\u0307");
  CHECK(nfc("\ufb01 x\u00b2") == "\ufb01 x\u00b2");  // figure 6: compatibility stays
  CHECK(nfc("\u1112\u1161\u11ab") == "\ud55c");      // Hangul
  CHECK(nfc("\ud558\u11ab\u11ab") == "\ud55c\u11ab");
  CHECK(nfc("\u0958") == "\u0915\u093c");         // excluded from composition
  CHECK(nfc("\u0301a\u0301") == "\u0301\u00e1");  // a mark with nothing before it
}

TEST_CASE("the longest token is matched, ties: the last") {
  const TokenTable table({{"ab", 1}, {"abc", 2}, {"b", 3}, {"ab", 4}, {"", 5}, {"\xff", 6}});
  CHECK(table.size() == 4);
  CHECK(table.find("ab") == 4);
  CHECK(table.find("a") == -1);
  CHECK(table.find("") == -1);
  CHECK(table.longest("abd")->token == 4);
  CHECK(table.longest("abcd")->token == 2);
  CHECK(table.longest("\xff")->token == 6);
  CHECK(!table.longest("a"));
  CHECK(!table.longest(""));

  std::string seen;
  split(
      "xabcabb", table, [&](std::string_view part) { seen += part; },
      [&](int32_t token) { seen += std::to_string(token); });
  CHECK(seen == "x243");
}

TEST_CASE("the lowest rank merges first, ties: the leftmost") {
  // Every pair of x and y merges, to a symbol that does not merge further.
  const auto merged = [](std::string_view text, auto rank) {
    std::vector<Symbol> symbols;
    for (uint32_t i = 0; i < text.size(); ++i) symbols.push_back({i, i + 1, text[i]});
    merge(symbols, [&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
      if (left.token == 0 || right.token == 0) return {};
      return Merge{rank(left.token, right.token), 0};
    });
    std::string lengths;
    for (const Symbol& symbol : symbols) lengths += std::to_string(symbol.end - symbol.begin);
    return lengths;
  };
  const auto same = [](int32_t, int32_t) { return 1.0; };
  const auto same_first = [](int32_t left, int32_t right) { return left == right ? 0.0 : 1.0; };
  CHECK(merged("", same) == "");
  CHECK(merged("x", same) == "1");
  CHECK(merged("xxx", same) == "21");
  CHECK(merged("xxxxx", same) == "221");
  CHECK(merged("xyyx", same_first) == "121");
  CHECK(merged("xyyy", same_first) == "121");
}

struct Bundled {
  GgufFile file{H2O_SOURCE_DIR "/models/tiny-opt.gguf"};
  Tokenizer tokenizer{file, 4096};
};

TEST_CASE_FIXTURE(Bundled, "any text round-trips") {
  Random random(3);
  for (int i = 0; i < 200; ++i) {
    std::string text;
    for (int n = random.integer(0, 30); n > 0; --n) {
      char32_t c = random.integer(0, random.flip() ? 0x7f : 0x10ffff);
      if (c >= 0xd800 && c < 0xe000) c = ' ';
      append_utf8(text, c);
    }
    CHECK(tokenizer.decode(tokenizer.encode(text, kPlain)) == text);
  }
}

TEST_CASE_FIXTURE(Bundled, "special tokens are matched with parse_special") {
  CHECK(tokenizer.encode("", {}) == std::vector<int32_t>{2});  // </s> begins every text
  CHECK(tokenizer.encode("</s>", {.add_special = false, .parse_special = true}) ==
        std::vector<int32_t>{2});
  const std::vector<int32_t> spelled = tokenizer.encode("</s>", kPlain);
  CHECK(spelled.size() > 1);
  CHECK(tokenizer.decode(spelled) == "</s>");
  CHECK(tokenizer.decode(std::vector<int32_t>{2, 2}) == "");
  CHECK(tokenizer.ends(2));
  CHECK(!tokenizer.ends(5));
  CHECK(!tokenizer.has_text(std::vector<int32_t>{2}));
  CHECK(tokenizer.has_text(spelled));
}

TEST_CASE_FIXTURE(Bundled, "more tokens than the limit are rejected") {
  const std::string sea = "the old man and the sea";
  const size_t n = tokenizer.encode(sea, {}).size();
  CHECK(tokenizer.encode(sea, {.max_tokens = n}).size() == n);
  CHECK_THROWS_AS(tokenizer.encode(sea, {.max_tokens = n - 1}), ContextFull);
  CHECK_THROWS_AS(tokenizer.encode(std::string(100000, 'x'), {.max_tokens = 10}), ContextFull);
}

TEST_CASE_FIXTURE(Bundled, "invalid text and tokens are rejected") {
  CHECK_THROWS_AS(tokenizer.encode("\xff", kPlain), InvalidArgument);
  CHECK_THROWS_AS(tokenizer.encode("a\xed\xa0\x80", kPlain), InvalidArgument);
  for (const int32_t token : {-1, 4096, INT32_MAX, INT32_MIN}) {
    CHECK_THROWS_AS(tokenizer.decode(std::vector<int32_t>{5, token}), InvalidArgument);
    CHECK(!tokenizer.ends(token));
  }
  CHECK_THROWS_AS(Tokenizer(file, 4095), FormatError);
}

}  // namespace
}  // namespace h2o
