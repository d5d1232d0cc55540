#include "text/detokenizer.h"

#include <utility>

#include "core/utf8.h"

namespace h2o {
namespace {

// The start of a trailing incomplete character; text.size() if there is none.
size_t incomplete(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8 next = read_utf8(text.substr(at));
    if (next.kind == Utf8::incomplete) break;
    at += next.n_bytes;
  }
  return at;
}

}  // namespace

std::string Detokenizer::push(std::string_view bytes) {
  bytes_ += bytes;
  const size_t end = incomplete(bytes_);
  std::string text = release(repaired_utf8(std::string_view(bytes_).substr(0, end)));
  bytes_.erase(0, end);
  return text;
}

std::string Detokenizer::finish() {
  std::string text = release(repaired_utf8(bytes_));
  text += text_;
  bytes_.clear();
  text_.clear();
  state_ = 0;
  return text;
}

std::string Detokenizer::release(std::string_view text) {
  if (stopped()) return {};
  for (const char c : text) {
    text_ += c;
    state_ = stop_.next(state_, static_cast<unsigned char>(c));
    if (const size_t n = stop_.complete(state_); n > 0) {
      stop_string_ = text_.substr(text_.size() - n);
      text_.erase(text_.size() - n);
      return std::exchange(text_, {});
    }
  }
  // Held-back text starts at a character boundary, as stop strings do.
  std::string released = text_.substr(0, text_.size() - stop_.partial(state_));
  text_.erase(0, released.size());
  return released;
}

}  // namespace h2o
