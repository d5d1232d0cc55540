// Pre-tokenization: splits text before byte-pair merging, by tokenizer.ggml.pre.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "text/tokenizer/cut.h"

namespace h2o {

struct PreTokenizer {
  std::span<const Cut> cuts;  // each splits the pieces of the previous one further
  void (*divide)(Text text, const std::function<void(Text)>& sink) = nullptr;  // before the cuts
  bool nfc = false;            // apply NFC first, as the model's own tokenizer does
  bool ignore_merges = false;  // a piece that is a token becomes that token without merging
  bool add_bos = false;        // default if the file does not say

  // Splits `text` into non-empty pieces.
  void pieces(Text text, const std::function<void(Text)>& sink) const;
};

// Throws FormatError for an unknown name.
const PreTokenizer& pre_tokenizer(std::string_view name);

// Returns the architecture's, for old files that name none; null if it has several.
const PreTokenizer* only_pre_tokenizer(std::string_view architecture);

}  // namespace h2o
