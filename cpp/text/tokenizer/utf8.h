// UTF-8: reading it, checking it, and repairing what is not.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace h2o {

// What a text that is not empty begins with: a character, or as many bytes as could have become
// one, which the Unicode Standard (3.9, "maximal subparts") has replaced by a single U+FFFD.
struct Utf8 {
  enum Kind { character, incomplete, invalid };  // incomplete: the text ends too early
  Kind kind;
  size_t n_bytes;
  char32_t code;  // of a character
};
Utf8 read_utf8(std::string_view text);

bool is_utf8(std::string_view text);

void append_utf8(std::string& text, char32_t code);

// The text with U+FFFD for bytes that are not UTF-8. Python: bytes.decode("utf-8", "replace").
std::string repaired_utf8(std::string_view bytes);

}  // namespace h2o
