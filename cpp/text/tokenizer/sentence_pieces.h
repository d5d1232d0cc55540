// SentencePieces: SentencePiece BPE (tokenizer.ggml.model = "llama"), or the same pieces with a
// list of merges ("gemma4").
#pragma once

#include <array>
#include <map>
#include <optional>

#include "text/tokenizer/merge.h"
#include "text/tokenizer/pair_table.h"
#include "text/tokenizer/tokenizer_model.h"

namespace h2o {

class SentencePieces final : public TokenizerModel {
 public:
  // by_rank: merges have ranks, rather than pieces scores. Throws FormatError.
  SentencePieces(const GgufFile& file, int32_t n_vocab, bool by_rank);

  bool encode(std::string_view text, bool begins, size_t max_tokens,
              std::vector<int32_t>& tokens) const override;
  bool takes_space(int32_t token) const override;

 private:
  // For unused pieces: the two pieces each was merged from, by text.
  using Halves = std::map<std::string_view, std::pair<std::string_view, std::string_view>>;

  // Does what encode() does for text without added tokens.
  bool encode_pieces(std::string_view text, bool begins, size_t max_tokens,
                     std::vector<int32_t>& tokens) const;
  void read_pieces(const GgufFile& file);
  void read_bytes(const TokenTable& by_text);
  void read_pairs();
  std::optional<Merge> merged(std::string_view both, int32_t left, int32_t right) const;
  std::string normalized(std::string_view text, bool begins) const;
  int32_t token_of(std::string_view piece) const;  // unknown_ if there is none
  std::vector<std::string_view> parts(std::string_view piece, const Halves& halves) const;

  std::vector<std::string> texts_;  // of the tokens, in SentencePiece's spelling
  std::vector<TokenType> types_;    // exactly one is unknown
  const bool by_rank_;
  std::vector<float> scores_;  // unless by rank
  bool phi3_;
  bool one_space_;  // collapse runs of spaces and strip the ends
  int32_t unknown_;
  TokenTable pieces_;        // candidates for merging
  TokenTable added_;         // user-defined tokens that divide a text before it is normalized
  TokenTable user_defined_;  // those that are pieces, also in the text between
  // by rank: all merges; otherwise short pairs of pieces_: faster than looking up text
  PairTable pairs_;
  bool has_bytes_ = false;
  std::array<int32_t, 256> byte_tokens_;
};

}  // namespace h2o
