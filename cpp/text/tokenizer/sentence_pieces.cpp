#include "text/tokenizer/sentence_pieces.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/utf8.h"
#include "text/tokenizer/merges.h"
#include "text/tokenizer/unicode.h"

namespace h2o {
namespace {

constexpr size_t kMaxPairBytes = 64;  // limit for pieces in the pair table

std::string byte_piece(int byte) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  return concat("<0x", kDigits[byte / 16], kDigits[byte % 16], ">");
}

// SentencePiece requires exactly one unknown token: the one that the file names, else the first of
// that type.
std::vector<TokenType> with_one_unknown(std::vector<TokenType> types, int32_t& unknown) {
  const auto first = std::ranges::find(types, TokenType::unknown);
  if (types[unknown] != TokenType::unknown && first != types.end()) {
    unknown = static_cast<int32_t>(first - types.begin());
  }
  std::ranges::replace(types, TokenType::unknown, TokenType::control);
  types[unknown] = TokenType::unknown;
  return types;
}

}  // namespace

SentencePieces::SentencePieces(const GgufFile& file, int32_t n_vocab, bool by_rank)
    : TokenizerModel(file, n_vocab, by_rank ? -1 : 1, by_rank ? -1 : 2),
      by_rank_(by_rank),
      phi3_(file.string_or("general.architecture", "") == "phi3") {
  add_bos = file.boolean_or("tokenizer.ggml.add_bos_token", !by_rank || vocabulary.bos >= 0);
  begins_with_space = file.boolean_or("tokenizer.ggml.add_space_prefix", !by_rank);
  one_space_ = file.boolean_or("tokenizer.ggml.remove_extra_whitespaces", false);
  if (!by_rank) {
    for (const double score : read_scores(file, n_vocab)) {
      scores_.push_back(static_cast<float>(score));
    }
  }
  if (file.find("tokenizer.ggml.token_type") == nullptr) {
    // required, or byte tokens would be text
    throw FormatError("tokenizer.ggml.token_type is missing");
  }
  unknown_ = token_id(file, "unknown", n_vocab, 0);
  types_ = with_one_unknown(vocabulary.types, unknown_);
  read_pieces(file);
}

// The text after an added token begins as a text does.
bool SentencePieces::encode(std::string_view text, bool begins, size_t max_tokens,
                            std::vector<int32_t>& tokens) const {
  bool fits = true, strips = false;
  const auto on_text = [&](std::string_view part) {
    if (strips) part = without_leading_space(part);
    fits = fits && encode_pieces(part, begins, max_tokens, tokens);
    begins = false;
  };
  const auto on_token = [&](int32_t token) {
    if (fits) tokens.push_back(token);
    fits = fits && tokens.size() <= max_tokens;
    begins = true;
    strips = takes_space(token);
  };
  split(text, added_, on_text, on_token);
  return fits && tokens.size() <= max_tokens;
}

// Hugging Face's rstrip of Phi-3, which files do not have; llama.cpp has the same exceptions.
bool SentencePieces::takes_space(int32_t token) const {
  constexpr std::string_view kExceptions[] = {"<unk>", "<s>", "<|endoftext|>"};
  return phi3_ && std::ranges::find(kExceptions, vocabulary.tokens[token]) == std::end(kExceptions);
}

bool SentencePieces::encode_pieces(std::string_view text, bool begins, size_t max_tokens,
                                   std::vector<int32_t>& tokens) const {
  const std::string normal = normalized(text, begins);
  const std::string_view view = normal;
  if (exceeds(view.size(), max_tokens - std::min(max_tokens, tokens.size()))) return false;
  const auto text_of = [&](const Symbol& s) { return view.substr(s.begin, s.end - s.begin); };

  // User-defined tokens are symbols that do not merge; other symbols start as characters.
  constexpr int32_t kFrozen = -2;
  std::vector<Symbol> symbols;
  for (uint32_t at = 0; at < view.size();) {
    const std::string_view rest = view.substr(at);
    const std::optional<TokenTable::Entry> whole = user_defined_.longest(rest);
    const auto n = static_cast<uint32_t>(whole ? whole->text.size() : read_utf8(rest).n_bytes);
    symbols.push_back({at, at + n, whole ? kFrozen : pieces_.find(rest.substr(0, n))});
    at += n;
  }

  Halves halves;
  merge(symbols, [&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
    if (left.token == kFrozen || right.token == kFrozen) return {};
    const std::string_view both = view.substr(left.begin, right.end - left.begin);
    const std::optional<Merge> found = merged(both, left.token, right.token);
    if (found && types_[found->token] == TokenType::unused) {
      halves[both] = {text_of(left), text_of(right)};
    }
    return found;
  });

  bool after_unknown = false;
  const auto put = [&](int32_t token, std::string_view piece) {
    if (token == unknown_ && has_bytes_) {
      for (const char c : piece) tokens.push_back(byte_tokens_[static_cast<unsigned char>(c)]);
    } else if (token != unknown_ ||
               !after_unknown) {  // consecutive unknown symbols become one token
      tokens.push_back(token);
    }
    after_unknown = token == unknown_;
  };
  for (const Symbol& symbol : symbols) {
    if (symbol.token >= 0 && types_[symbol.token] != TokenType::unused) {
      put(symbol.token, {});
      continue;
    }
    for (const std::string_view piece : parts(text_of(symbol), halves)) put(token_of(piece), piece);
  }
  return tokens.size() <= max_tokens;
}

// The piece formed by two symbols, each a piece or -1.
std::optional<Merge> SentencePieces::merged(std::string_view both, int32_t left,
                                            int32_t right) const {
  const auto by_score = [this](int32_t token) -> std::optional<Merge> {
    if (token < 0) return {};
    return Merge{-static_cast<double>(scores_[token]), token};
  };
  const bool are_pieces = left >= 0 && right >= 0;
  if (!by_rank_ && (!are_pieces || both.size() > kMaxPairBytes))
    return by_score(pieces_.find(both));
  const PairTable::Pair* pair = are_pieces ? pairs_.find(left, right) : nullptr;
  if (pair == nullptr) return {};
  return by_rank_ ? Merge{static_cast<double>(pair->rank), pair->token} : by_score(pair->token);
}

// Applies SentencePiece's normalizer rule "identity".
std::string SentencePieces::normalized(std::string_view text, bool begins) const {
  const bool one_space = begins && one_space_;
  if (one_space) text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  if (text.empty()) return "";
  std::string out(begins && begins_with_space ? kSpace : "");
  bool after_space = false;
  for (const char c : text) {
    if (c != ' ') {
      out += c;
    } else if (!one_space || !after_space) {
      out += kSpace;
    }
    after_space = c == ' ';
  }
  while (one_space && out.ends_with(kSpace)) out.resize(out.size() - kSpace.size());
  return out;
}

// Text never becomes an unused or special piece.
int32_t SentencePieces::token_of(std::string_view piece) const {
  const int32_t token = pieces_.find(piece);
  return token < 0 || types_[token] == TokenType::unused ? unknown_ : token;
}

// Splits an unused piece into the pieces it was merged from, in order.
std::vector<std::string_view> SentencePieces::parts(std::string_view piece,
                                                    const Halves& halves) const {
  std::vector<std::string_view> found, left = {piece};
  while (!left.empty()) {
    const std::string_view part = left.back();
    left.pop_back();
    const auto it = halves.find(part);
    if (it == halves.end()) {
      found.push_back(part);
    } else {
      left.push_back(it->second.second);
      left.push_back(it->second.first);
    }
  }
  return found;
}

// Rejects what the sentencepiece library rejects.
void SentencePieces::read_pieces(const GgufFile& file) {
  std::vector<TokenTable::Entry> all, pieces, added, whole;
  ptrdiff_t n_empty = 0;              // such tokens are never the result of text
  texts_.reserve(vocabulary.size());  // prevents reallocation, which would invalidate views
  for (int32_t i = 0; i < vocabulary.size(); ++i) {
    const std::string& piece = texts_.emplace_back(replaced(vocabulary.utf8(i), " ", kSpace));
    if (piece.empty()) ++n_empty;
    const TokenType type = types_[i];
    const bool merges =
        type == TokenType::normal || type == TokenType::user_defined || type == TokenType::unused;
    all.push_back({piece, i});
    if (merges) pieces.push_back({piece, i});
    if (type == TokenType::user_defined) {
      const std::string_view token = vocabulary.tokens[i];
      if (token.find(kSpace) == token.npos) added.push_back({token, i});
      whole.push_back({piece, i});
    }
    has_bytes_ = has_bytes_ || type == TokenType::byte;
  }
  const TokenTable by_text(std::move(all));
  if (std::ssize(texts_) - n_empty != static_cast<ptrdiff_t>(by_text.size())) {
    throw FormatError("tokenizer.ggml.tokens has a piece twice");
  }
  pieces_ = TokenTable(std::move(pieces));
  added_ = TokenTable(std::move(added));
  user_defined_ = TokenTable(std::move(whole));
  if (by_rank_) {
    pairs_ = read_merges(file, vocabulary);
  } else {
    read_pairs();
  }
  read_bytes(by_text);
}

void SentencePieces::read_pairs() {
  std::vector<PairTable::Pair> pairs;
  for (const auto& [piece, token] : pieces_.entries()) {
    if (piece.size() > kMaxPairBytes) continue;
    for (size_t at = read_utf8(piece).n_bytes; at < piece.size();
         at += read_utf8(piece.substr(at)).n_bytes) {
      const int32_t left = pieces_.find(piece.substr(0, at));
      const int32_t right = left < 0 ? -1 : pieces_.find(piece.substr(at));
      if (right >= 0) pairs.push_back({left, right, 0, token});
    }
  }
  pairs_ = PairTable(std::move(pairs), vocabulary.size());
}

void SentencePieces::read_bytes(const TokenTable& by_text) {
  for (int32_t i = 0; i < vocabulary.size(); ++i) {
    bytes.push_back(vocabulary.has_no_text(i) ? "" : replaced(texts_[i], kSpace, " "));
  }
  if (!has_bytes_) return;  // a run of unknown characters is one token of unlimited length
  max_token_bytes_ = 1;
  for (const std::string& piece : texts_)
    max_token_bytes_ = std::max(max_token_bytes_, piece.size());
  const auto n_bytes = std::ranges::count(types_, TokenType::byte);
  for (int byte = 0; byte < 256; ++byte) {
    const int32_t token = by_text.find(byte_piece(byte));
    if (token < 0 || types_[token] != TokenType::byte || n_bytes != 256) {
      throw FormatError("tokenizer.ggml.tokens: the byte tokens are not <0x00> to <0xFF>");
    }
    byte_tokens_[byte] = token;
    bytes[token] = static_cast<char>(byte);
  }
}

}  // namespace h2o
