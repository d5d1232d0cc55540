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
  // The defaults apply if the file has no id; -1: none. Throws FormatError.
  TokenizerModel(const GgufFile& file, int32_t n_vocab, int32_t default_bos, int32_t default_eos)
      : vocabulary(file, n_vocab, default_bos, default_eos, warnings) {}
  virtual ~TokenizerModel() = default;

  // Appends the tokens of `text`, valid UTF-8; begins: at the start of the text. Returns false,
  // having appended only some tokens, once there would be more than `max_tokens`.
  virtual bool encode(std::string_view text, bool begins, size_t max_tokens,
                      std::vector<int32_t>& tokens) const = 0;

  // Does a token include the white space after it?
  virtual bool takes_space(int32_t) const { return false; }

  std::vector<std::string> warnings;  // what of the file is ignored or assumed
  const Vocabulary vocabulary;
  bool add_bos = false;            // prepend BOS
  bool add_eos = false;            // append EOS, unless the file says otherwise
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
