// Pre-tokenization: splits text before byte-pair merging, by tokenizer.ggml.pre.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "text/tokenizer/cut.h"

namespace h2o {

struct PreTokenizer {
  std::span<const Cut> cuts;   // each splits the pieces of the previous one further
  bool nfc = false;            // apply NFC first, as the model's own tokenizer does
  bool ignore_merges = false;  // a piece that is a token becomes that token without merging
  bool add_bos = false;        // default if the file does not say

  // Splits `text` into non-empty pieces.
  void pieces(Text text, const std::function<void(Text)>& sink) const;
};

// The pre-tokenizer of that name; in old files without one, by architecture. Throws FormatError if
// it is unknown or ambiguous.
const PreTokenizer& pre_tokenizer(std::optional<std::string_view> name,
                                  std::string_view architecture);

}  // namespace h2o
