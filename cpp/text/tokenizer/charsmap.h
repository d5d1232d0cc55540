// Charsmap: SentencePiece's precompiled normalization (tokenizer.ggml.precompiled_charsmap): a trie
// of strings, in the layout of Darts-clone, and what replaces each.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"

namespace h2o {

class Charsmap {
 public:
  Charsmap() = default;

  // Nothing is replaced if the file has none. Throws FormatError if it is damaged.
  explicit Charsmap(const GgufFile& file);

  // The replacement of the longest string in the map that begins `text`, which is not empty and
  // valid UTF-8; otherwise its first character.
  struct Prefix {
    std::string_view text;  // of the replacement
    size_t n_bytes;         // replaced
  };
  Prefix replace(std::string_view text) const;

 private:
  // Elements of the trie, by index; 0 beyond its end.
  uint32_t unit(uint32_t at) const { return at < units_.size() ? units_[at] : 0; }

  std::vector<uint32_t> units_;
  std::string replacements_;  // each ends with a zero byte
};

}  // namespace h2o
