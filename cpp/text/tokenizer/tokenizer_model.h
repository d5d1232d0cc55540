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

  // Appends the tokens of `text`, UTF-8; begins: it does not continue another text. Ends early,
  // with any of them, when `tokens` would become longer than `most`; then it returns false.
  virtual bool encode(std::string_view text, bool begins, size_t most,
                      std::vector<int32_t>& tokens) const = 0;

  const Vocabulary vocabulary;
  bool add_bos = false;            // a text begins with the token bos
  bool begins_with_space = false;  // a space is put in front of a text
  std::vector<std::string> bytes;  // of each token; none for special ones

 protected:
  // Is a text of so many bytes, as it is cut into tokens, certain to have more than `room` of them?
  bool exceeds(size_t n_bytes, size_t room) const {
    return n_bytes > 0 && most_bytes_ > 0 && (n_bytes - 1) / most_bytes_ >= room;
  }

  size_t most_bytes_ = 0;  // that a token can stand for; 0: any number
};

}  // namespace h2o
