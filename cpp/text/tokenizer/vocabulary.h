// Vocabulary: the part common to all tokenizer models, from the GGUF keys tokenizer.*.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"
#include "text/tokenizer/token_table.h"

namespace h2o {

constexpr std::string_view kSpace = "\u2581";  // the space in pieces of SentencePiece and WordPiece

// A text with another one for each occurrence of `from`.
std::string replaced(std::string_view text, std::string_view from, std::string_view to);

// tokenizer.ggml.token_type, numbered as in SentencePiece.
enum class TokenType : int8_t {
  normal = 1,
  unknown,
  control,       // no text; matched in input only if parse_special
  user_defined,  // always matched in input
  unused,        // never the result of text
  byte
};

struct Vocabulary {
  std::vector<std::string_view> tokens;  // views into the file
  std::vector<TokenType> types;
  int32_t bos, eos;                 // -1 if there is none
  std::vector<int32_t> end_tokens;  // tokens that end a turn; sorted
  std::vector<int32_t> suppressed;  // tokenizer.ggml.suppress_tokens: never sampled; sorted

  // The defaults apply if the file has no id; -1: none. Adds to `warnings` what it ignores. Throws
  // FormatError.
  Vocabulary(const GgufFile& file, int32_t n_vocab, int32_t default_bos, int32_t default_eos,
             std::vector<std::string>& warnings);

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }

  // A token's text. Throws FormatError unless it is valid UTF-8.
  std::string_view utf8(int32_t token) const;

  // Does the token produce no text?
  bool has_no_text(int32_t token) const;

  // The tokens of the given types, by text.
  TokenTable table(std::initializer_list<TokenType> of) const;
};

// May the file have further tokens, of images, that the model's embedding lacks?
bool has_tokens_of_images(const GgufFile& file);

// tokenizer.ggml.scores [n_vocab], within the range of float. Throws FormatError.
std::vector<double> read_scores(const GgufFile& file, int32_t n_vocab);

// tokenizer.ggml.`name`_token_id; `fallback`, a token or -1, if the file has none.
// Throws FormatError.
int32_t token_id(const GgufFile& file, std::string_view name, int32_t n_vocab, int32_t fallback);

}  // namespace h2o
