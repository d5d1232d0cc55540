// Unigram: SentencePiece's unigram language model (tokenizer.ggml.model = "t5"): the pieces of a
// text whose scores have the largest sum (arXiv 1804.10959).
#pragma once

#include "text/tokenizer/charsmap.h"
#include "text/tokenizer/tokenizer_model.h"

namespace h2o {

class Unigram final : public TokenizerModel {
 public:
  // Reads tokenizer.ggml.scores, precompiled_charsmap, add_space_prefix and
  // remove_extra_whitespaces too. Throws FormatError.
  Unigram(const GgufFile& file, int32_t n_vocab);

  bool encode(std::string_view text, bool begins, size_t max_tokens,
              std::vector<int32_t>& tokens) const override;

 private:
  void encode_text(std::string_view text, bool begins, size_t max_tokens,
                   std::vector<int32_t>& tokens) const;
  void encode_pieces(std::string_view text, size_t first, std::vector<int32_t>& tokens) const;

  Charsmap charsmap_;
  bool one_space_;       // collapse runs of spaces and strip the ends
  bool divides_ = true;  // whether pieces have a space at their beginning only
  int32_t unknown_;
  double unknown_score_;
  std::vector<double> scores_;
  TokenTable pieces_;  // normal ones
  TokenTable added_;   // user-defined ones, which are not normalized
};

}  // namespace h2o
