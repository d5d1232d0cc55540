// Tokenizer: text to tokens and back, by the vocabulary in a GGUF file (keys tokenizer.*).
// The C API and Python share it. Its tokens are those of Hugging Face tokenizers, sentencepiece and
// llama.cpp (tests/python/test_tokenizer_originals.py).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/tokenizer_model.h"

namespace h2o {

class Tokenizer {
 public:
  struct Options {
    bool add_special = true;     // with the tokens that the model wants around a text
    bool parse_special = false;  // special tokens that the text spells are those tokens
    bool begins = true;          // it does not continue another text: a space may belong in front
    size_t most = SIZE_MAX;      // tokens; refusing more takes less time than reading them
  };

  // `file` must outlive it. Throws FormatError for a vocabulary of an unknown kind or that is
  // damaged.
  Tokenizer(const GgufFile& file, int32_t n_vocab);

  // Tokens of a text. Throws InvalidArgument unless it is UTF-8, and ContextFull for more than
  // options.most.
  std::vector<int32_t> encode(std::string_view text, const Options& options) const;

  // Text of tokens; bytes that are not UTF-8 become U+FFFD. Throws InvalidArgument for a token that
  // is not in the vocabulary.
  std::string decode(std::span<const int32_t> tokens) const;

  // The bytes of a token: part of a character, or several; none for special tokens.
  // begins: it is the first with any bytes, so without the space put in front of a text.
  std::string_view token_bytes(int32_t token, bool begins = false) const;

  // A token as the vocabulary spells it, special ones too. Throws InvalidArgument for what is none.
  std::string_view spelling(int32_t token) const;

  // Has a text begun with these tokens?
  bool has_text(std::span<const int32_t> tokens) const;

  // Does a token end a turn?
  bool ends(int32_t token) const;

  // Calls on_text(part, not empty) and on_token(token) for the special tokens that `text` spells
  // and the text between them, in their order.
  template <class OnText, class OnToken>
  void split_special(std::string_view text, OnText on_text, OnToken on_token) const {
    split(text, special_, on_text, on_token);
  }

  const Vocabulary& vocabulary() const { return kind_->vocabulary; }
  int32_t bos() const { return vocabulary().bos; }  // -1 where there is none
  int32_t eos() const { return vocabulary().eos; }
  std::span<const int32_t> beginning() const { return before_; }  // what add_special puts in front
  const TokenTable& special() const { return special_; }          // read only with parse_special
  std::optional<std::string_view> chat_template() const { return chat_template_; }  // Jinja2

 private:
  std::unique_ptr<const TokenizerModel> kind_;
  TokenTable special_;           // read in text only where asked for
  std::vector<int32_t> before_;  // added to a text
  std::vector<int32_t> after_;
  std::optional<std::string_view> chat_template_;
};

}  // namespace h2o
