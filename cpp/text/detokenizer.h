// Detokenizer: from the bytes of tokens, as they come, to text that can be shown: whole characters,
// up to the first stop string.
//
// A text ends at the stop string that is complete first; of those complete at the same place, at
// the longest. The stop string is not part of the text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/stop_strings.h"

namespace h2o {

class Detokenizer {
 public:
  // Throws InvalidArgument for a stop string that is empty or not UTF-8.
  explicit Detokenizer(std::span<const std::string> stop = {}) : stop_(stop) {}

  // The text that `bytes` complete, always UTF-8: U+FFFD stands for what is not.
  std::string push(std::string_view bytes);

  // The text that was held back. An incomplete character becomes U+FFFD.
  std::string finish();

  // Has a stop string appeared?
  bool stopped() const { return stopped_; }

  // What is held back: text that may begin a stop string, then bytes of an incomplete character.
  // Pushed to another Detokenizer, it goes on from here.
  const std::string& held_text() const { return text_; }
  const std::string& held_bytes() const { return bytes_; }

 private:
  std::string release(std::string_view text);

  StopStrings stop_;
  StopStrings::State state_ = 0;  // of the text
  std::string text_;
  std::string bytes_;
  bool stopped_ = false;
};

}  // namespace h2o
