// TokenTable: looks up tokens by text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace h2o {

// A sorted array, so that there is no adversarial worst case. The texts must outlive it.
class TokenTable {
 public:
  struct Entry {
    std::string_view text;
    int32_t token;
  };

  TokenTable() = default;

  // The last of entries with equal text is kept. Empty texts are ignored.
  explicit TokenTable(std::vector<Entry> entries);

  // The token with this text; -1 if there is none.
  int32_t find(std::string_view text) const;

  // The longest token that is a prefix of `text`.
  std::optional<Entry> longest(std::string_view text) const {
    std::optional<Entry> found;
    for_prefixes(text, [&](const Entry& entry) { found = entry; });
    return found;
  }

  // Calls visit(entry) for each token that is a prefix of `text`, the shortest first.
  template <class Visit>
  void for_prefixes(std::string_view text, Visit visit) const {
    // Narrows the range to entries that share each further byte with `text`.
    auto begin = entries_.begin(), end = entries_.end();
    for (size_t i = 0; i < text.size() && begin != end; ++i) {
      const auto byte_at = [i](const Entry& entry) {
        return i < entry.text.size() ? static_cast<unsigned char>(entry.text[i]) : -1;
      };
      const int byte = static_cast<unsigned char>(text[i]);
      begin = std::ranges::lower_bound(begin, end, byte, {}, byte_at);
      end = std::ranges::upper_bound(begin, end, byte, {}, byte_at);
      if (begin != end && begin->text.size() == i + 1) visit(*begin);
    }
  }

  size_t size() const { return entries_.size(); }
  std::span<const Entry> entries() const { return entries_; }  // sorted by text

 private:
  std::vector<Entry> entries_;
};

// Splits `text` at tokens of a table, leftmost longest first: calls on_text(non-empty part) and
// on_token(token) in order.
template <class OnText, class OnToken>
void split(std::string_view text, const TokenTable& table, OnText on_text, OnToken on_token) {
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const std::optional<TokenTable::Entry> found = table.longest(text.substr(at));
    if (!found) {
      ++at;
      continue;
    }
    if (begin < at) on_text(text.substr(begin, at - begin));
    on_token(found->token);
    begin = at += found->text.size();
  }
  if (begin < text.size()) on_text(text.substr(begin));
}

}  // namespace h2o
