// Cut: how a pre-tokenizer finds a piece of text; and what cuts have in common. Their comments are
// the regular expressions that they match.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "text/tokenizer/unicode.h"

namespace h2o {

using Text = std::span<const CodePoint>;

// Returns the length of the piece, in code points, that a non-empty text starts with; 0 if no piece
// starts at its first character.
using Cut = size_t (*)(Text text);

inline bool is(Text text, size_t i, CodePoint::Kind kind) {
  return i < text.size() && text[i].kind == kind;
}
inline bool is(Text text, size_t i, char32_t code) {
  return i < text.size() && text[i].code == code;
}
inline bool is_newline(const CodePoint& c) { return c.code == '\r' || c.code == '\n'; }

// The end of a run of at most `max_length` characters that satisfy `fits`.
template <class Fits>
size_t run(Text text, size_t begin, Fits fits, size_t max_length = SIZE_MAX) {
  const size_t end = max_length < text.size() - begin ? begin + max_length : text.size();
  while (begin < end && std::invoke(fits, text[begin])) ++begin;
  return begin;
}
inline size_t run(Text text, size_t begin, CodePoint::Kind kind, size_t max_length = SIZE_MAX) {
  return run(text, begin, [kind](const CodePoint& c) { return c.kind == kind; }, max_length);
}

// \s+(?!\S)|\s+
inline size_t spaces(Text text) {
  const size_t end = run(text, 0, CodePoint::space);
  return end == text.size() || end == 1 ? end : end - 1;
}

// \s*[\r\n]+|\s+(?!\S)|\s+
inline size_t lines(Text text) {
  size_t end = run(text, 0, CodePoint::space);
  while (end > 0 && !is_newline(text[end - 1])) --end;
  return end > 0 ? end : spaces(text);
}

}  // namespace h2o
