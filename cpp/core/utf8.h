// UTF-8 decoding, validation and repair.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace h2o {

// Beginning of a non-empty text: a character, or a maximal subpart of an ill-formed sequence
// (Unicode Standard, 3.9), to be replaced by a single U+FFFD.
struct Utf8 {
  enum Kind { character, incomplete, invalid };  // incomplete: the text ends too early
  Kind kind;
  size_t n_bytes;
  char32_t code;  // of a character
};
Utf8 read_utf8(std::string_view text);

bool is_utf8(std::string_view text);

void append_utf8(std::string& text, char32_t code);

// Replaces invalid UTF-8 by U+FFFD. Python: bytes.decode("utf-8", "replace").
std::string repaired_utf8(std::string_view bytes);

}  // namespace h2o
