// Detokenizer: converts token bytes to text incrementally: complete characters, up to the first
// stop string.
//
// Output ends at the stop string that is completed first; if several are completed at the same
// byte, at the longest. The stop string is not part of the output.
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

  // The text completed by `bytes`, always valid UTF-8: invalid bytes become U+FFFD.
  std::string push(std::string_view bytes);

  // Returns the text held back. An incomplete character becomes U+FFFD.
  std::string finish();

  // The stop string that appeared; "" if none has.
  const std::string& stop_string() const { return stop_string_; }
  bool stopped() const { return !stop_string_.empty(); }

  // Held back: text that may begin a stop string, then bytes of an incomplete character. Pushing
  // both to another Detokenizer continues from here.
  const std::string& held_text() const { return text_; }
  const std::string& held_bytes() const { return bytes_; }

 private:
  std::string release(std::string_view text);

  StopStrings stop_;
  StopStrings::State state_ = 0;  // of the output so far
  std::string text_;
  std::string bytes_;
  std::string stop_string_;
};

}  // namespace h2o
