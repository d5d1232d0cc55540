// TokenizerModel: the interface of tokenizer models; encodes text without special tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/vocabulary.h"

namespace h2o {

class TokenizerModel {
 public:
  explicit TokenizerModel(Vocabulary of) : vocabulary(std::move(of)) {}
  virtual ~TokenizerModel() = default;

  // Appends the tokens of `text`, valid UTF-8; begins: at the start of the text. Returns false,
  // having appended only some tokens, once there would be more than `max_tokens`.
  virtual bool encode(std::string_view text, bool begins, size_t max_tokens,
                      std::vector<int32_t>& tokens) const = 0;

  const Vocabulary vocabulary;
  bool add_bos = false;            // prepend BOS
  bool begins_with_space = false;  // prepend a space to the text
  std::vector<std::string> bytes;  // of each token; empty for special tokens

 protected:
  // Is a text of n_bytes certain to have more than `room` tokens?
  bool exceeds(size_t n_bytes, size_t room) const {
    return n_bytes > 0 && max_token_bytes_ > 0 && (n_bytes - 1) / max_token_bytes_ >= room;
  }

  size_t max_token_bytes_ = 0;  // longest token in bytes; 0: unlimited
};

}  // namespace h2o
