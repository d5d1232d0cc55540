#include "core/utf8.h"

namespace h2o {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// Encoded length and range of the second byte, by first byte.
struct Form {
  size_t n_bytes;
  unsigned char min = 0x80, max = 0xbf;
};

Form form_of(unsigned char first) {
  if (first < 0x80) return {1};
  if (first < 0xc2) return {0};  // continuation byte or overlong form
  if (first < 0xe0) return {2};
  if (first == 0xe0) return {3, 0xa0};
  if (first == 0xed) return {3, 0x80, 0x9f};  // no surrogates
  if (first < 0xf0) return {3};
  if (first == 0xf0) return {4, 0x90};
  if (first < 0xf4) return {4};
  if (first == 0xf4) return {4, 0x80, 0x8f};  // nothing above U+10FFFF
  return {0};
}

}  // namespace

Utf8 read_utf8(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const Form form = form_of(first);
  if (form.n_bytes == 0) return {Utf8::invalid, 1, 0};
  if (form.n_bytes == 1) return {Utf8::character, 1, first};
  char32_t code = first & (0x7f >> form.n_bytes);
  for (size_t i = 1; i < form.n_bytes; ++i) {
    if (i == text.size()) return {Utf8::incomplete, i, 0};
    const auto byte = static_cast<unsigned char>(text[i]);
    const unsigned char min = i == 1 ? form.min : 0x80;
    const unsigned char max = i == 1 ? form.max : 0xbf;
    if (byte < min || byte > max) return {Utf8::invalid, i, 0};
    code = code << 6 | (byte & 0x3f);
  }
  return {Utf8::character, form.n_bytes, code};
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8 next = read_utf8(text);
    if (next.kind != Utf8::character) return false;
    text.remove_prefix(next.n_bytes);
  }
  return true;
}

void append_utf8(std::string& text, char32_t code) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | code >> 6);
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3f));
    put(0x80 | (code >> 6 & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

std::string repaired_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8 next = read_utf8(bytes);
    text += next.kind == Utf8::character ? bytes.substr(0, next.n_bytes) : kReplacement;
    bytes.remove_prefix(next.n_bytes);
  }
  return text;
}

}  // namespace h2o
