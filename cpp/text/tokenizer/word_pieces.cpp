#include "text/tokenizer/word_pieces.h"

#include "core/error.h"
#include "core/utf8.h"
#include "text/tokenizer/unicode.h"

namespace h2o {
namespace {

constexpr size_t kMostCharacters = 100;  // of a word; longer ones are unknown

constexpr size_t kWordPart = 4096;  // least bytes of a text that are normalized at once

// The ids of BERT's own vocabulary, for old files that name none.
constexpr int32_t kUnknown = 100, kClassification = 101, kSeparator = 102;

// The token of a text's beginning or end, if the file does not call it `name`; -1: it does.
int32_t unnamed(const GgufFile& file, const char* name, const char* other, int32_t n_vocab,
                int32_t fallback) {
  if (file.find(concat("tokenizer.ggml.", name, "_token_id")) != nullptr) return -1;
  return token_id(file, other, n_vocab, fallback);
}

// The bytes of the first part of a text: parts begin where a word does, whatever is normalized.
size_t first_part(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Utf8 next = read_utf8(text.substr(at));
    const CodePoint c = {next.code, 0, 0, CodePoint::other};
    const bool begins = c.code == U' ' || c.code == U'\n' || c.is_ideograph();
    if (at >= kWordPart && begins) return at;
    at += next.n_bytes;
  }
  return text.size();
}

}  // namespace

WordPieces::WordPieces(const GgufFile& file, int32_t n_vocab)
    : TokenizerModel(file, n_vocab, unnamed(file, "bos", "cls", n_vocab, kClassification),
                     unnamed(file, "eos", "seperator", n_vocab, kSeparator)),
      lowercases_(file.boolean_or("tokenizer.ggml.normalizer.lowercase", true)),
      strips_accents_(file.boolean_or("tokenizer.ggml.normalizer.strip_accents", lowercases_)),
      unknown_(token_id(file, "unknown", n_vocab, kUnknown)),
      added_(vocabulary.table({TokenType::user_defined})) {
  add_bos = file.boolean_or("tokenizer.ggml.add_bos_token", true);
  add_eos = true;
  begins_with_space = true;
  std::vector<TokenTable::Entry> begin, within;
  bytes.reserve(n_vocab);
  for (int32_t i = 0; i < n_vocab; ++i) {
    std::string_view piece = vocabulary.utf8(i);
    const bool begins = piece.starts_with(kSpace);
    if (begins) piece.remove_prefix(kSpace.size());
    bytes.push_back(vocabulary.has_no_text(i) ? "" : concat(begins ? " " : "", piece));
    if (vocabulary.types[i] == TokenType::normal) (begins ? begin : within).push_back({piece, i});
  }
  begin_ = TokenTable(std::move(begin));
  within_ = TokenTable(std::move(within));
}

bool WordPieces::encode(std::string_view text, bool /*begins*/, size_t max_tokens,
                        std::vector<int32_t>& tokens) const {
  split(
      text, added_, [&](std::string_view part) { encode_text(part, max_tokens, tokens); },
      [&](int32_t token) { tokens.push_back(token); });
  return tokens.size() <= max_tokens;
}

// Reads a text in parts, so that a long one takes little memory.
void WordPieces::encode_text(std::string_view text, size_t max_tokens,
                             std::vector<int32_t>& tokens) const {
  while (!text.empty() && tokens.size() <= max_tokens) {
    const size_t n_bytes = first_part(text);
    encode_part(text.substr(0, n_bytes), max_tokens, tokens);
    text.remove_prefix(n_bytes);
  }
}

// Divides a text at white space and around each punctuation mark.
void WordPieces::encode_part(std::string_view text, size_t max_tokens,
                             std::vector<int32_t>& tokens) const {
  const std::string normal = normalized(text);
  const std::vector<CodePoint> all = code_points(normal);
  for (size_t i = 0; i < all.size() && tokens.size() <= max_tokens;) {
    size_t end = i + 1;
    const auto is_inside = [&](const CodePoint& c) {
      return c.kind != CodePoint::space && !c.is_sign();
    };
    while (is_inside(all[i]) && end < all.size() && is_inside(all[end])) ++end;
    if (end - i > kMostCharacters) {
      tokens.push_back(unknown_);
    } else if (all[i].kind != CodePoint::space) {
      encode_word(std::string_view(normal).substr(all[i].begin, all[end - 1].end - all[i].begin),
                  tokens);
    }
    i = end;
  }
}

// The longest piece at each position; the whole word is unknown if there is none.
void WordPieces::encode_word(std::string_view word, std::vector<int32_t>& tokens) const {
  const size_t n_before = tokens.size();
  for (const TokenTable* table = &begin_; !word.empty(); table = &within_) {
    const std::optional<TokenTable::Entry> piece = table->longest(word);
    if (!piece) {
      tokens.resize(n_before);
      tokens.push_back(unknown_);
      return;
    }
    tokens.push_back(piece->token);
    word.remove_prefix(piece->text.size());
  }
}

// Does as Hugging Face's BertNormalizer.
std::string WordPieces::normalized(std::string_view text) const {
  std::u32string codes;
  codes.reserve(text.size());
  for (const CodePoint& c : code_points(text)) {
    if (c.is_control()) continue;
    if (c.kind == CodePoint::space) {
      codes += U' ';
    } else if (c.is_ideograph()) {
      codes += {U' ', c.code, U' '};
    } else {
      codes += c.code;
    }
  }
  if (strips_accents_) codes = without_accents(std::move(codes));
  std::string out;
  out.reserve(text.size());
  for (const char32_t code : codes) {
    if (lowercases_) {
      append_lower(out, code);
    } else {
      append_utf8(out, code);
    }
  }
  return out;
}

}  // namespace h2o
