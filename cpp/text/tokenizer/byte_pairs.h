// BytePairs: byte-level BPE (tokenizer.ggml.model = "gpt2").
#pragma once

#include <array>

#include "text/tokenizer/pair_table.h"
#include "text/tokenizer/pre_tokenizer.h"
#include "text/tokenizer/tokenizer_model.h"

namespace h2o {

class BytePairs final : public TokenizerModel {
 public:
  // Throws FormatError.
  BytePairs(const GgufFile& file, int32_t n_vocab);

  bool encode(std::string_view text, bool begins, size_t max_tokens,
              std::vector<int32_t>& tokens) const override;

 private:
  void read_bytes();
  void encode_piece(std::string_view piece, std::vector<int32_t>& tokens) const;

  const PreTokenizer& pre_;
  TokenTable unsplit_tokens_;             // tokens matched before pre-tokenization
  TokenTable by_bytes_;                   // tokens that merging can produce, by bytes
  std::array<int32_t, 256> byte_tokens_;  // -1: no token; the byte is skipped
  PairTable pairs_;
  std::vector<std::string> texts_;  // storage for the tables
};

}  // namespace h2o
