// Tokenizer: converts text to tokens and back, with the vocabulary of a GGUF file (keys
// tokenizer.*). Matches Hugging Face tokenizers, sentencepiece and llama.cpp
// (tests/python/test_tokenizer_originals.py).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/tokenizer_model.h"
#include "text/tokenizer/unicode.h"

namespace h2o {

class Tokenizer {
 public:
  struct Options {
    bool add_special = true;       // add BOS and EOS as the model expects
    bool parse_special = false;    // match special tokens in the text
    bool begins = true;            // start of the text: a leading space may be added
    size_t max_tokens = SIZE_MAX;  // limit for the number of tokens; checked early
  };

  // `file` must outlive this object. Throws FormatError for an unsupported or invalid vocabulary.
  Tokenizer(const GgufFile& file, int32_t n_vocab);

  // Throws InvalidArgument if `text` is not valid UTF-8, and ContextFull for more than
  // options.max_tokens tokens.
  std::vector<int32_t> encode(std::string_view text, const Options& options) const;

  // Invalid UTF-8 becomes U+FFFD. Throws InvalidArgument for a token that is not in the vocabulary.
  std::string decode(std::span<const int32_t> tokens) const;

  // The bytes of a token, which may be a part of a character; empty for special tokens. begins: the
  // first token with bytes; strips the space that was added in front of the text.
  std::string_view token_bytes(int32_t token, bool begins = false) const;

  // A token's entry in the vocabulary, including special tokens. Throws InvalidArgument for an
  // invalid token.
  std::string_view spelling(int32_t token) const;

  // Does any of these tokens produce text?
  bool has_text(std::span<const int32_t> tokens) const;

  // Where the tokens of the second of two texts begin: after the first separator
  // (tokenizer.ggml.seperator_token_id). SIZE_MAX if there is none.
  size_t second_part(std::span<const int32_t> tokens) const;

  // Does a token end a turn?
  bool ends(int32_t token) const;

  // Calls on_text(non-empty part) and on_token(token) for the special tokens in `text` and the text
  // between them, in order. `text` must be valid UTF-8.
  template <class OnText, class OnToken>
  void split_special(std::string_view text, OnText on_text, OnToken on_token) const {
    bool strips = false;
    const auto on_part = [&](std::string_view part) {
      if (strips) part = without_leading_space(part);
      if (!part.empty()) on_text(part);
    };
    split(text, special_, on_part, [&](int32_t token) {
      on_token(token);
      strips = kind_->takes_space(token);
    });
  }

  const Vocabulary& vocabulary() const { return kind_->vocabulary; }
  const std::vector<std::string>& warnings() const { return kind_->warnings; }
  int32_t bos() const { return vocabulary().bos; }  // -1 if there is none
  int32_t eos() const { return vocabulary().eos; }
  std::span<const int32_t> beginning() const {
    return before_;
  }  // tokens that add_special prepends
  const TokenTable& special() const { return special_; }  // matched only with parse_special
  std::optional<std::string_view> chat_template() const { return chat_template_; }  // Jinja2
  // Further templates by name, such as "tool_use".
  const std::map<std::string_view, std::string_view>& named_templates() const {
    return named_templates_;
  }

 private:
  std::unique_ptr<const TokenizerModel> kind_;
  TokenTable special_;           // matched only with parse_special
  std::vector<int32_t> before_;  // prepended to a text
  std::vector<int32_t> after_;
  int32_t separator_;  // -1: none
  std::optional<std::string_view> chat_template_;
  std::map<std::string_view, std::string_view> named_templates_;
};

}  // namespace h2o
