// Detokenizer: from a token's bytes to pieces of text that can be shown: whole characters, and cut
// before a stop string. python/h2o_cpp/generation/text_pieces.py is the same for Python.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace h2o {

class Detokenizer {
 public:
  // `stop`: UTF-8, none of them empty.
  explicit Detokenizer(std::vector<std::string> stop) : stop_(std::move(stop)) {}

  // The text that `bytes` complete, always UTF-8.
  std::string push(std::string_view bytes);

  // What was held back. An incomplete character becomes U+FFFD.
  std::string finish();

  // Has a stop string appeared?
  bool stopped() const { return stopped_; }

 private:
  std::string release(std::string text);

  std::vector<std::string> stop_;
  std::string bytes_;  // of a character that is not complete
  std::string held_;   // text that may be the beginning of a stop string
  bool stopped_ = false;
};

}  // namespace h2o
