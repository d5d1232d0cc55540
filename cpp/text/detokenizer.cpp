#include "text/detokenizer.h"

#include <algorithm>

#include "text/tokenizer/utf8.h"

namespace h2o {
namespace {

// Where the text ends with a character that is not complete; its size if it does not.
size_t incomplete(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8 next = read_utf8(text.substr(at));
    if (next.kind == Utf8::incomplete) break;
    at += next.n_bytes;
  }
  return at;
}

// Length of the longest end of `text` that begins `stop`, but is not all of it.
size_t overlap(std::string_view text, std::string_view stop) {
  size_t n = std::min(stop.size() - 1, text.size());
  while (n > 0 && !text.ends_with(stop.substr(0, n))) --n;
  return n;
}

}  // namespace

std::string Detokenizer::push(std::string_view bytes) {
  bytes_ += bytes;
  const size_t end = incomplete(bytes_);
  std::string text = repaired_utf8(std::string_view(bytes_).substr(0, end));
  bytes_.erase(0, end);
  return release(std::move(text));
}

std::string Detokenizer::finish() {
  std::string text = release(repaired_utf8(bytes_)) + held_;
  bytes_.clear();
  held_.clear();
  return text;
}

std::string Detokenizer::release(std::string text) {
  if (stopped_) return "";
  held_ += text;
  size_t n = held_.size(), kept = 0;
  for (const std::string& stop : stop_) {
    n = std::min(n, held_.find(stop));
    kept = std::max(kept, overlap(held_, stop));
  }
  stopped_ = n < held_.size();
  if (!stopped_) n = held_.size() - kept;
  std::string released = held_.substr(0, n);
  held_ = stopped_ ? "" : held_.substr(n);
  return released;
}

}  // namespace h2o
