#include "text/tokenizer/token_table.h"

#include <algorithm>

namespace h2o {

TokenTable::TokenTable(std::vector<Entry> entries) : entries_(std::move(entries)) {
  std::erase_if(entries_, [](const Entry& entry) { return entry.text.empty(); });
  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const Entry& a, const Entry& b) { return a.text < b.text; });
  // std::unique keeps the first of equal entries, so iterate in reverse.
  const auto kept = std::unique(entries_.rbegin(), entries_.rend(),
                                [](const Entry& a, const Entry& b) { return a.text == b.text; });
  entries_.erase(entries_.begin(), kept.base());
  entries_.shrink_to_fit();
}

int32_t TokenTable::find(std::string_view text) const {
  const auto it = std::ranges::lower_bound(entries_, text, {}, &Entry::text);
  return it != entries_.end() && it->text == text ? it->token : -1;
}

std::optional<TokenTable::Entry> TokenTable::longest(std::string_view text) const {
  std::optional<Entry> found;
  // Narrows the range to entries that share each further byte with `text`.
  auto begin = entries_.begin(), end = entries_.end();
  for (size_t i = 0; i < text.size() && begin != end; ++i) {
    const auto byte_at = [i](const Entry& entry) {
      return i < entry.text.size() ? static_cast<unsigned char>(entry.text[i]) : -1;
    };
    const int byte = static_cast<unsigned char>(text[i]);
    begin = std::ranges::lower_bound(begin, end, byte, {}, byte_at);
    end = std::ranges::upper_bound(begin, end, byte, {}, byte_at);
    if (begin != end && begin->text.size() == i + 1) found = *begin;
  }
  return found;
}

}  // namespace h2o
