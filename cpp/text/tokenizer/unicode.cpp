#include "text/tokenizer/unicode.h"

#include <algorithm>

#include "core/utf8.h"
#include "text/tokenizer/unicode_tables.h"

namespace h2o {
namespace {

// The range of a sorted table that contains `code`; nullptr if there is none.
template <class R>
const R* find_range(std::span<const R> ranges, char32_t code) {
  const auto it =
      std::ranges::lower_bound(ranges, code, {}, [](const R& range) { return range.last; });
  return it != ranges.end() && it->first <= code ? &*it : nullptr;
}

// White_Space, unchanged since Unicode 6.3.
bool is_space(char32_t c) {
  return c == ' ' || (c >= '\t' && c <= '\r') || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

CodePoint::Kind kind_of(char32_t code) {
  if (is_space(code)) return CodePoint::space;
  if (find_range(unicode::letters, code) != nullptr) return CodePoint::letter;
  if (find_range(unicode::numbers, code) != nullptr) return CodePoint::number;
  return CodePoint::other;
}

int combining_class(char32_t code) {
  const unicode::CombiningRange* range = find_range(unicode::combining, code);
  return range == nullptr ? 0 : range->combining_class;
}

// Hangul syllables are composed by arithmetic (The Unicode Standard, 3.12).
constexpr char32_t kSyllables = 0xac00, kLeading = 0x1100, kVowels = 0x1161, kTrailing = 0x11a7;
constexpr char32_t kNLeading = 19, kNVowels = 21, kNTrailing = 28;
constexpr char32_t kNSyllables = kNLeading * kNVowels * kNTrailing;

void decompose(char32_t code, std::u32string& out) {
  if (code - kSyllables < kNSyllables) {
    const char32_t i = code - kSyllables;
    out += kLeading + i / (kNVowels * kNTrailing);
    out += kVowels + i / kNTrailing % kNVowels;
    if (i % kNTrailing != 0) out += kTrailing + i % kNTrailing;
    return;
  }
  const auto it =
      std::ranges::lower_bound(unicode::decompositions, code, {}, &unicode::Decomposition::whole);
  if (it == unicode::decompositions.end() || it->whole != code) {
    out += code;
    return;
  }
  decompose(it->first, out);
  if (it->second != 0) decompose(it->second, out);
}

// The composition of two characters; 0 if there is none.
char32_t composed(char32_t first, char32_t second) {
  if (first - kLeading < kNLeading && second - kVowels < kNVowels) {
    return kSyllables + ((first - kLeading) * kNVowels + (second - kVowels)) * kNTrailing;
  }
  if (first - kSyllables < kNSyllables && (first - kSyllables) % kNTrailing == 0 &&
      second > kTrailing && second - kTrailing < kNTrailing) {
    return first + (second - kTrailing);
  }
  const auto key = [](const unicode::Composition& c) { return std::pair(c.first, c.second); };
  const auto it =
      std::ranges::lower_bound(unicode::compositions, std::pair(first, second), {}, key);
  return it != unicode::compositions.end() && key(*it) == std::pair(first, second) ? it->whole : 0;
}

// Sorts combining characters by class, between characters of class 0.
void reorder(std::u32string& codes) {
  for (auto begin = codes.begin(); begin != codes.end();) {
    const auto end =
        std::find_if(begin, codes.end(), [](char32_t c) { return !combining_class(c); });
    std::stable_sort(
        begin, end, [](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
    begin = end == codes.end() ? end : end + 1;
  }
}

// Composes each character with the preceding starter, unless a character in between blocks it.
void compose(std::u32string& codes) {
  size_t n = 0;                           // kept so far
  size_t starter = std::u32string::npos;  // index of the last character of class 0
  int last_class = 0;  // class of the last character kept after it; 0 if there is none
  for (const char32_t code : codes) {
    const int its_class = combining_class(code);
    const bool adjacent = starter + 1 == n;
    if (starter != std::u32string::npos && (adjacent || last_class < its_class)) {
      if (const char32_t whole = composed(codes[starter], code)) {
        codes[starter] = whole;
        continue;
      }
    }
    if (its_class == 0) starter = n;
    last_class = its_class;
    codes[n++] = code;
  }
  codes.resize(n);
}

}  // namespace

bool CodePoint::is_punctuation() const { return find_range(unicode::punctuation, code) != nullptr; }
bool CodePoint::is_symbol() const { return find_range(unicode::symbols, code) != nullptr; }
bool CodePoint::is_upper() const { return find_range(unicode::upper, code) != nullptr; }
bool CodePoint::is_lower() const { return find_range(unicode::lower, code) != nullptr; }
bool CodePoint::is_mark() const { return find_range(unicode::marks, code) != nullptr; }
bool CodePoint::is_decimal() const { return find_range(unicode::decimals, code) != nullptr; }
bool CodePoint::is_word() const {
  return kind == letter || is_mark() || is_decimal() ||
         find_range(unicode::more_words, code) != nullptr;
}

bool CodePoint::is_control() const { return find_range(unicode::controls, code) != nullptr; }
bool CodePoint::is_ideograph() const { return find_range(unicode::ideographs, code) != nullptr; }
bool CodePoint::is_sign() const { return find_range(unicode::signs, code) != nullptr; }

std::vector<CodePoint> code_points(std::string_view text) {
  std::vector<CodePoint> out;
  out.reserve(text.size());
  for (uint32_t at = 0; at < text.size();) {
    const Utf8 next = read_utf8(text.substr(at));
    const auto end = at + static_cast<uint32_t>(next.n_bytes);
    out.push_back({next.code, at, end, kind_of(next.code)});
    at = end;
  }
  return out;
}

std::string_view without_leading_space(std::string_view text) {
  while (!text.empty()) {
    const Utf8 next = read_utf8(text);
    if (!is_space(next.code)) break;
    text.remove_prefix(next.n_bytes);
  }
  return text;
}

std::u32string without_accents(std::u32string codes) {
  // ASCII has none.
  constexpr char32_t kFirst = 0x80;
  if (std::ranges::none_of(codes, [](char32_t c) { return c >= kFirst; })) return codes;
  std::u32string parts;
  for (const char32_t code : codes) decompose(code, parts);
  reorder(parts);
  std::erase_if(parts, [](char32_t c) { return find_range(unicode::nonspacing, c) != nullptr; });
  return parts;
}

void append_lower(std::string& out, char32_t code) {
  constexpr char32_t kCapitalDottedI = 0x130;
  if (code == kCapitalDottedI) {
    out += "i\u0307";
    return;
  }
  const auto it = std::ranges::lower_bound(unicode::lowercase, code, {}, &unicode::LowerCase::code);
  append_utf8(out, it != unicode::lowercase.end() && it->code == code ? it->lower : code);
}

std::string nfc(std::string_view text) {
  // No combining characters below U+0300, so most text is already in NFC.
  constexpr unsigned char kFirstByte = 0xcc;
  const auto combines = [](char c) { return static_cast<unsigned char>(c) >= kFirstByte; };
  if (std::ranges::none_of(text, combines)) return std::string(text);

  std::u32string codes;
  codes.reserve(text.size());
  while (!text.empty()) {
    const Utf8 next = read_utf8(text);
    decompose(next.code, codes);
    text.remove_prefix(next.n_bytes);
  }
  reorder(codes);
  compose(codes);
  std::string out;
  for (const char32_t code : codes) append_utf8(out, code);
  return out;
}

}  // namespace h2o
