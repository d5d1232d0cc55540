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

}  // namespace h2o
