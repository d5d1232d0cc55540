// CodePoint: a character with its Unicode properties.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace h2o {

struct CodePoint {
  enum Kind : uint8_t { letter, number, space, other };

  char32_t code;
  uint32_t begin, end;  // its bytes in the text
  Kind kind;            // \p{L}, \p{N}, \s or other

  bool is_punctuation() const;  // \p{P}
  bool is_symbol() const;       // \p{S}
  bool is_upper() const;        // [\p{Lu}\p{Lt}]
  bool is_lower() const;        // \p{Ll}
  bool is_mark() const;         // \p{M}
  bool is_decimal() const;      // \d
  bool is_word() const;         // \w
  // The classes of BERT's tokenizer:
  bool is_control() const;    // a control or unassigned character, but no \t, \n or \r
  bool is_ideograph() const;  // of the blocks of CJK ideographs that are words
  bool is_sign() const;       // punctuation, and ASCII's other signs: words too
};

// `text` must be UTF-8 of less than 4 GiB.
std::vector<CodePoint> code_points(std::string_view text);

// `text` without white space (\s) at its beginning. `text` must be valid UTF-8.
std::string_view without_leading_space(std::string_view text);

// The canonical decomposition, without nonspacing marks.
std::u32string without_accents(std::u32string codes);

// Appends a character in lower case: one, or several.
void append_lower(std::string& out, char32_t code);

// Unicode normalization form C. `text` must be valid UTF-8.
std::string nfc(std::string_view text);

}  // namespace h2o
