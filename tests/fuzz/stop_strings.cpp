// Stop strings and the detokenizer: strings and bytes from the input, the bytes split into pieces,
// and at snapshots. The output must equal a search through the whole text.
#include <algorithm>
#include <string>
#include <vector>

#include "core/utf8.h"
#include "target.h"
#include "text/detokenizer.h"

namespace {

using namespace h2o;

// Up to the stop string that is completed first; of several at once, the longest.
std::string cut(const std::string& text, const std::vector<std::string>& stop) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& s : stop) {
      if (s.size() <= end && text.compare(end - s.size(), s.size(), s) == 0) {
        longest = std::max(longest, s.size());
      }
    }
    if (longest > 0) return text.substr(0, end - longest);
  }
  return text;
}

}  // namespace

int fuzz(std::span<const std::byte> bytes) {
  Taker from(bytes);
  std::vector<std::string> stop;
  const uint8_t flags = from.byte();
  for (int n = flags % 8; n > 0; --n) {
    // Over few letters, so that they overlap; or any bytes.
    std::string s(from.take_text(from.byte() % 8));
    if (flags & 8) {
      for (char& c : s) c = static_cast<char>('a' + c % 2);
    }
    s = repaired_utf8(s);
    if (!s.empty()) stop.push_back(std::move(s));
  }
  std::string all, shown;
  Detokenizer pieces(stop);
  while (from.left() > 0 && !pieces.stopped()) {
    const uint8_t how = from.byte();
    std::string piece(from.take_text(how % 8));
    if (flags & 8) {
      for (char& c : piece) c = static_cast<char>('a' + c % 2);
    }
    all += piece;
    const std::string out = pieces.push(piece);
    check(is_utf8(out), "pieces of whole characters");
    shown += out;
    if (how & 64 && !pieces.stopped()) {  // saved and continued
      const std::string held = pieces.held_text() + pieces.held_bytes();
      pieces = Detokenizer(stop);
      check(pieces.push(held).empty(), "held-back text is held back again");
    }
  }
  shown += pieces.finish();
  check(is_utf8(shown), "a text of whole characters");
  check(shown == cut(repaired_utf8(all), stop), "the text up to its stop string");
  return 0;
}
