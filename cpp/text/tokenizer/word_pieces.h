// WordPieces: BERT's WordPiece (tokenizer.ggml.model = "bert"). Pieces that begin a word have ▁ in
// front, in the file; others are in the middle of words.
#pragma once

#include "text/tokenizer/tokenizer_model.h"

namespace h2o {

class WordPieces final : public TokenizerModel {
 public:
  // Reads tokenizer.ggml.normalizer.lowercase and strip_accents too. Throws FormatError.
  WordPieces(const GgufFile& file, int32_t n_vocab);

  bool encode(std::string_view text, bool begins, size_t max_tokens,
              std::vector<int32_t>& tokens) const override;

 private:
  void encode_text(std::string_view text, size_t max_tokens, std::vector<int32_t>& tokens) const;
  void encode_part(std::string_view text, size_t max_tokens, std::vector<int32_t>& tokens) const;
  void encode_word(std::string_view word, std::vector<int32_t>& tokens) const;
  std::string normalized(std::string_view text) const;

  bool lowercases_;
  bool strips_accents_;
  int32_t unknown_;
  TokenTable added_;   // user-defined tokens that divide a text before it is normalized
  TokenTable begin_;   // pieces at the beginning of a word
  TokenTable within_;  // pieces after it
};

}  // namespace h2o
