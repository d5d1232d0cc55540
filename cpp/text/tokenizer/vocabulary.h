// Vocabulary: what every kind of tokenizer has, by the keys tokenizer.* of a GGUF file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"
#include "text/tokenizer/token_table.h"

namespace h2o {

// tokenizer.ggml.token_type, numbered as in SentencePiece.
enum class TokenType : int8_t {
  normal = 1,
  unknown,
  control,       // has no text; read in text only where asked for
  user_defined,  // always read in text, whole
  unused,
  byte
};

struct Vocabulary {
  std::vector<std::string_view> tokens;  // live as long as the file
  std::vector<TokenType> types;
  int32_t bos, eos;                 // -1 where there is none
  std::vector<int32_t> end_tokens;  // any of them ends a turn; sorted

  // Ids of bos and eos where the file names none, or -1. Throws FormatError.
  Vocabulary(const GgufFile& file, int32_t n_vocab, int32_t default_bos, int32_t default_eos);

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }

  // Does a token stand for no text?
  bool silent(int32_t token) const;

  // Those of some types, by their text.
  TokenTable table(std::initializer_list<TokenType> of) const;
};

// tokenizer.ggml.`name`_token_id; `fallback`, a token or -1, where the file has none.
// Throws FormatError.
int32_t token_id(const GgufFile& file, std::string_view name, int32_t n_vocab, int32_t fallback);

}  // namespace h2o
