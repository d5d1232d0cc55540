// TokenizerModel: what differs from one kind of tokenizer to the next: text without special tokens.
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

  // Appends the tokens of `text`, UTF-8; begins: it does not continue another text.
  virtual void encode(std::string_view text, bool begins, std::vector<int32_t>& tokens) const = 0;

  const Vocabulary vocabulary;
  bool add_bos = false;            // a text begins with the token bos
  bool begins_with_space = false;  // a space is put in front of a text
  std::vector<std::string> bytes;  // of each token; none for special ones
};

}  // namespace h2o
