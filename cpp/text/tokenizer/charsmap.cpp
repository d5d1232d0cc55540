#include "text/tokenizer/charsmap.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/utf8.h"

namespace h2o {
namespace {

constexpr std::string_view kKey = "tokenizer.ggml.precompiled_charsmap";

// Bytes of a string in the map and of its replacement, so that a damaged trie, which may have
// cycles, costs no more. Strings of a few characters become at most 33 bytes in Unicode's NFKC.
constexpr size_t kMostString = 64, kMostReplacement = 256;

// The parts of a unit of the trie.
constexpr bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
constexpr uint32_t value(uint32_t unit) { return unit & 0x7fffffff; }
constexpr uint32_t label(uint32_t unit) { return unit & 0x800000ff; }
constexpr uint32_t offset(uint32_t unit) { return unit >> 10 << (unit >> 6 & 8); }

}  // namespace

// The size of the trie in bytes, 32-bit little-endian; the trie; the replacements.
Charsmap::Charsmap(const GgufFile& file) {
  if (file.find(kKey) == nullptr) return;
  std::string bytes;
  for (const int64_t byte : file.integers(kKey)) bytes += static_cast<char>(byte);
  if (bytes.empty()) return;
  const auto word = [&](size_t at) {
    uint32_t word = 0;
    for (size_t i = 4; i > 0; --i) word = word << 8 | static_cast<unsigned char>(bytes[at + i - 1]);
    return word;
  };
  const size_t n_bytes = bytes.size() < 4 ? 0 : word(0);
  if (n_bytes == 0 || n_bytes % 4 != 0 || n_bytes > bytes.size() - 4) {
    throw FormatError(concat(kKey, " has ", bytes.size(), " bytes, with a trie of ", n_bytes));
  }
  for (size_t at = 4; at < 4 + n_bytes; at += 4) units_.push_back(word(at));
  replacements_ = bytes.substr(4 + n_bytes);
  if (!is_utf8(replacements_)) throw FormatError(concat(kKey, " has replacements beyond UTF-8"));
}

Charsmap::Prefix Charsmap::replace(std::string_view text) const {
  Prefix found{text.substr(0, read_utf8(text).n_bytes), read_utf8(text).n_bytes};
  if (units_.empty()) return found;
  uint32_t at = offset(unit(0));
  for (size_t i = 0; i < std::min(text.size(), kMostString); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    at ^= byte;
    if (byte == 0 || label(unit(at)) != byte) break;
    const bool ends = has_leaf(unit(at));
    at ^= offset(unit(at));
    if (!ends) continue;
    const size_t begin = value(unit(at));
    if (begin >= replacements_.size()) continue;
    const std::string_view rest =
        std::string_view(replacements_).substr(begin, kMostReplacement + 1);
    const size_t n_bytes = rest.find('\0');
    if (n_bytes <= kMostReplacement) found = {rest.substr(0, n_bytes), i + 1};
  }
  return found;
}

}  // namespace h2o
