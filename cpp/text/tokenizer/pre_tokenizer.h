// How text is cut before byte-pair merging, by tokenizer.ggml.pre.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "text/tokenizer/unicode.h"

namespace h2o {

// How many characters a text that is not empty begins with that are to be a piece; 0 if its first
// character does not begin one.
using Cut = size_t (*)(std::span<const CodePoint> text);

struct PreTokenizer {
  std::span<const Cut> cuts;   // each cuts the pieces that the one before it left
  bool nfc = false;            // the model's own tokenizer composes characters first
  bool ignore_merges = false;  // a piece that is a token is that token, however it would merge
  bool add_bos = false;        // where the file does not say

  // Cuts `text` into pieces, none of them empty.
  void pieces(std::span<const CodePoint> text,
              const std::function<void(std::span<const CodePoint>)>& sink) const;
};

// The pre-tokenizer of that name; or without one, of files from before the key, by the model's
// architecture. Throws FormatError for one that would be guessed at.
const PreTokenizer& pre_tokenizer(std::optional<std::string_view> name,
                                  std::string_view architecture);

}  // namespace h2o
