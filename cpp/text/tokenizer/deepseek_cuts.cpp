#include "text/tokenizer/deepseek_cuts.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "text/tokenizer/unicode_tables.h"

namespace h2o::deepseek {
namespace {

using enum CodePoint::Kind;

// Most letters with case; not all, so \p{Lu}, \p{Ll} and \p{Lt} would not do.
constexpr unicode::Range kCased[] = {
    {0x41, 0x5a},       {0x61, 0x7a},       {0xb5, 0xb5},       {0xc0, 0xd6},
    {0xd8, 0xf6},       {0xf8, 0x1ba},      {0x1bc, 0x1bf},     {0x1c4, 0x293},
    {0x295, 0x2af},     {0x370, 0x373},     {0x376, 0x377},     {0x37b, 0x37d},
    {0x37f, 0x37f},     {0x386, 0x386},     {0x388, 0x38a},     {0x38c, 0x38c},
    {0x38e, 0x3a1},     {0x3a3, 0x3f5},     {0x3f7, 0x481},     {0x48a, 0x52f},
    {0x531, 0x556},     {0x10a0, 0x10c5},   {0x13a0, 0x13f5},   {0x13f8, 0x13fd},
    {0x1c90, 0x1cba},   {0x1cbd, 0x1cbf},   {0x1d00, 0x1d2b},   {0x1d6b, 0x1d77},
    {0x1d79, 0x1d9a},   {0x1e00, 0x1f15},   {0x1f18, 0x1f1d},   {0x1f20, 0x1f45},
    {0x1f48, 0x1f4d},   {0x1f50, 0x1f57},   {0x1f59, 0x1f59},   {0x1f5b, 0x1f5b},
    {0x1f5d, 0x1f5d},   {0x1f5f, 0x1f7d},   {0x1f80, 0x1fb4},   {0x1fb6, 0x1fbc},
    {0x1fbe, 0x1fbe},   {0x1fc2, 0x1fc4},   {0x1fc6, 0x1fcc},   {0x1fd0, 0x1fd3},
    {0x1fd6, 0x1fdb},   {0x1fe0, 0x1fec},   {0x1ff2, 0x1ff4},   {0x1ff6, 0x1ffc},
    {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210a, 0x2113},   {0x2115, 0x2115},
    {0x2119, 0x211d},   {0x2124, 0x2124},   {0x2126, 0x2126},   {0x2128, 0x2128},
    {0x212a, 0x212d},   {0x212f, 0x2134},   {0x2139, 0x2139},   {0x213c, 0x213f},
    {0x2145, 0x2149},   {0x214e, 0x214e},   {0x2183, 0x2184},   {0x2c00, 0x2c7b},
    {0x2c7e, 0x2ce4},   {0x2ceb, 0x2cee},   {0x2cf2, 0x2cf3},   {0xa640, 0xa66d},
    {0xa680, 0xa69b},   {0xa722, 0xa76f},   {0xa771, 0xa787},   {0xa78b, 0xa78e},
    {0xab70, 0xabbf},   {0xfb00, 0xfb06},   {0xfb13, 0xfb17},   {0xff21, 0xff3a},
    {0xff41, 0xff5a},   {0x10400, 0x1044f}, {0x104b0, 0x104d3}, {0x104d8, 0x104fb},
    {0x10c80, 0x10cb2}, {0x10cc0, 0x10cf2}, {0x118a0, 0x118df}, {0x1e900, 0x1e943},
};

bool is_cased(const CodePoint& c) {
  const auto* range = std::ranges::lower_bound(kCased, c.code, {}, &unicode::Range::last);
  return range != std::end(kCased) && range->first <= c.code;
}

bool is_sign(const CodePoint& c) {
  const auto within = [&c](char32_t first, char32_t last) {
    return c.code >= first && c.code <= last;
  };
  return within('!', '/') || within(':', '~') || within(0xff01, 0xff0f) || within(0xff1a, 0xff5e) ||
         within(0x2018, 0x201f) || within(0x3000, 0x3002);
}

// \s?[...]+, for characters that satisfy `fits`.
template <class Fits>
size_t after_space(Text text, Fits fits) {
  const size_t begin = is(text, 0, space) && !std::invoke(fits, text[0]) ? 1 : 0;
  const size_t end = run(text, begin, fits);
  return end > begin ? end : 0;
}

}  // namespace

// [\r\n]
size_t newline(Text text) { return is_newline(text[0]) ? 1 : 0; }

// \s?\p{L}+
size_t letters(Text text) {
  return after_space(text, [](const CodePoint& c) { return c.kind == letter; });
}

// \s?\p{P}+
size_t punctuation(Text text) { return after_space(text, &CodePoint::is_punctuation); }

// \s?[A-Za-z\u00b5...]+
size_t cased_letters(Text text) { return after_space(text, is_cased); }

// \s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+
size_t signs(Text text) { return after_space(text, is_sign); }

// Divides like \s+$: what is before the last spaces, or the last spaces.
size_t until_last_spaces(Text text) {
  size_t end = text.size();
  while (end > 0 && text[end - 1].kind == space) --end;
  return end > 0 ? end : text.size();
}

// [\u4e00-\u9fa5\u3040-\u30ff]+: ideographs, Hiragana and Katakana
size_t kana_and_ideographs(Text text) {
  return run(text, 0, [](const CodePoint& c) {
    return (c.code >= 0x4e00 && c.code <= 0x9fa5) || (c.code >= 0x3040 && c.code <= 0x30ff);
  });
}

// [\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+
size_t beyond_latin(Text text) {
  return run(text, 0, [](const CodePoint& c) {
    return (c.code >= 0x800 && c.code <= 0x9fa5) || (c.code >= 0xac00 && c.code <= 0xd7ff);
  });
}

// [!-\/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
// | ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
size_t words(Text text) {
  const auto is_ascii_letter = [](const CodePoint& c) { return c.kind == letter && c.code < 0x80; };
  const auto in_word = [](const CodePoint& c) { return c.kind == letter || c.is_mark(); };
  const auto in_signs = [](const CodePoint& c) { return c.is_punctuation() || c.is_symbol(); };
  const auto at = [&](size_t i, auto fits) { return i < text.size() && fits(text[i]); };

  const bool sign = in_signs(text[0]);
  if (sign && text[0].code < 0x80 && at(1, is_ascii_letter)) return run(text, 1, is_ascii_letter);
  if (in_word(text[0])) return run(text, 0, in_word);
  if (!sign && !is_newline(text[0]) && at(1, in_word)) return run(text, 1, in_word);
  const size_t begin = is(text, 0, U' ') ? 1 : 0;
  if (at(begin, in_signs)) return run(text, run(text, begin, in_signs), is_newline);
  return is(text, 0, space) ? lines(text) : 0;
}

}  // namespace h2o::deepseek
