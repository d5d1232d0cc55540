#include "text/tokenizer/byte_pairs.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/utf8.h"
#include "text/tokenizer/merge.h"
#include "text/tokenizer/merges.h"

namespace h2o {
namespace {

const PreTokenizer& pre_tokenizer_of(const GgufFile& file, std::vector<std::string>& warnings) {
  constexpr std::string_view kKey = "tokenizer.ggml.pre";
  const std::string_view name = file.string_or(kKey, "");
  if (!name.empty()) return pre_tokenizer(name);
  const std::string_view architecture = file.string_or("general.architecture", "");
  if (const PreTokenizer* only = only_pre_tokenizer(architecture)) return *only;
  warnings.push_back(concat(
      kKey, " is missing: text is divided as by 'default', which may not be the model's way; ",
      "a file that was converted later says which one is"));
  return pre_tokenizer("default");
}

// GPT-2's byte-to-unicode mapping, inverted: printable bytes map to themselves, the others to
// U+0100 and up, in order. -1: not part of the mapping.
constexpr auto kByteOf = [] {
  std::array<int16_t, 0x144> byte_of = {};
  size_t hidden = 0x100;
  for (int16_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
    byte_of[byte] = visible ? byte : int16_t{-1};
    if (!visible) byte_of[hidden++] = byte;
  }
  return byte_of;
}();

// The bytes that a token's characters map to; nullopt if one has no mapping.
std::optional<std::string> spelled_bytes(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const Utf8 next = read_utf8(token);
    if (next.kind != Utf8::character || next.code >= kByteOf.size()) return {};
    const int byte = kByteOf[next.code];
    if (byte < 0) return {};
    bytes += static_cast<char>(byte);
    token.remove_prefix(next.n_bytes);
  }
  return bytes;
}

}  // namespace

BytePairs::BytePairs(const GgufFile& file, int32_t n_vocab)
    : TokenizerModel(file, n_vocab, -1, -1), pre_(pre_tokenizer_of(file, warnings)) {
  add_bos = file.boolean_or("tokenizer.ggml.add_bos_token", pre_.add_bos);
  read_bytes();
  pairs_ = read_merges(file, vocabulary);
}

bool BytePairs::encode(std::string_view text, bool, size_t max_tokens,
                       std::vector<int32_t>& tokens) const {
  std::string composed;
  if (pre_.nfc) text = composed = nfc(text);
  if (exceeds(text.size(), max_tokens - std::min(max_tokens, tokens.size()))) return false;
  const auto on_text = [&](std::string_view part) {
    pre_.pieces(code_points(part), [&](std::span<const CodePoint> piece) {
      if (tokens.size() > max_tokens) return;
      const uint32_t begin = piece.front().begin;
      encode_piece(part.substr(begin, piece.back().end - begin), tokens);
    });
  };
  split(text, unsplit_tokens_, on_text, [&](int32_t token) { tokens.push_back(token); });
  return tokens.size() <= max_tokens;
}

void BytePairs::encode_piece(std::string_view piece, std::vector<int32_t>& tokens) const {
  if (pre_.ignore_merges) {
    if (const int32_t token = by_bytes_.find(piece); token >= 0) return tokens.push_back(token);
  }
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (const char c : piece) {
    const auto at = static_cast<uint32_t>(symbols.size());
    const int32_t token = byte_tokens_[static_cast<unsigned char>(c)];
    if (token >= 0) symbols.push_back({at, at + 1, token});
  }
  merge(symbols, [this](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
    const PairTable::Pair* pair = pairs_.find(left.token, right.token);
    if (pair == nullptr) return {};
    return Merge{static_cast<double>(pair->rank), pair->token};
  });
  for (const Symbol& symbol : symbols) tokens.push_back(symbol.token);
}

// Decodes the tokens' bytes and determines which tokens text can become.
void BytePairs::read_bytes() {
  std::vector<TokenTable::Entry> by_bytes, whole;
  // prevents reallocation, which would invalidate views
  texts_.reserve(2 * size_t{1} * vocabulary.size());
  const auto keep = [this](std::string text) -> std::string_view {
    return texts_.emplace_back(std::move(text));
  };
  for (int32_t i = 0; i < vocabulary.size(); ++i) {
    bytes.emplace_back();
    if (vocabulary.has_no_text(i)) continue;  // never produced from text
    const std::string_view token = vocabulary.utf8(i);
    const std::optional<std::string> spelled = spelled_bytes(token);
    if (spelled) by_bytes.push_back({keep(*spelled), i});
    if (vocabulary.types[i] == TokenType::user_defined) {
      whole.push_back({keep(pre_.nfc ? nfc(token) : std::string(token)), i});
      bytes.back() = token;
    } else {
      bytes.back() = spelled ? *spelled : std::string(token);
    }
  }
  by_bytes_ = TokenTable(std::move(by_bytes));
  unsplit_tokens_ = TokenTable(std::move(whole));
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_tokens_[byte] = by_bytes_.find({&c, 1});
  }
  // skipped bytes are unlimited
  if (std::ranges::find(byte_tokens_, -1) != byte_tokens_.end()) return;
  max_token_bytes_ = 1;
  for (const std::string& token : texts_)
    max_token_bytes_ = std::max(max_token_bytes_, token.size());
}

}  // namespace h2o
