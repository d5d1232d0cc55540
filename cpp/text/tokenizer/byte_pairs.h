// BytePairs: byte-level BPE (tokenizer.ggml.model = "gpt2").
#pragma once

#include <array>

#include "text/tokenizer/pre_tokenizer.h"
#include "text/tokenizer/tokenizer_model.h"

namespace h2o {

class BytePairs final : public TokenizerModel {
 public:
  // Throws FormatError.
  BytePairs(const GgufFile& file, int32_t n_vocab);

  void encode(std::string_view text, bool begins, std::vector<int32_t>& tokens) const override;

 private:
  struct Pair {
    int32_t left, right;
    int32_t rank, token;  // what they become
  };

  void read_bytes();
  void read_merges(const GgufFile& file);
  void encode_piece(std::string_view piece, std::vector<int32_t>& tokens) const;
  const Pair* find_pair(int32_t left, int32_t right) const;

  const PreTokenizer& pre_;
  TokenTable whole_;                      // tokens that are read before the text is cut
  TokenTable by_bytes_;                   // tokens that merging can give, by their bytes
  std::array<int32_t, 256> byte_tokens_;  // -1: the byte is no token, and is left out
  std::vector<Pair> pairs_;               // sorted
  std::vector<std::string> texts_;        // what the tables refer to
};

}  // namespace h2o
