#include "text/tokenizer/unigram.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/utf8.h"

namespace h2o {
namespace {

constexpr double kUnknownPenalty = 10;  // below the worst piece
constexpr size_t kUnigramPart = 4096;   // bytes of a text that are divided at once

// Where the last word begins, with its space.
size_t last_word(std::string_view text) {
  while (text.ends_with(kSpace)) text.remove_suffix(kSpace.size());
  const size_t at = text.rfind(kSpace);
  return at == std::string_view::npos ? 0 : at;
}

}  // namespace

Unigram::Unigram(const GgufFile& file, int32_t n_vocab)
    : TokenizerModel(file, n_vocab, -1, 1),
      charsmap_(file),
      one_space_(file.boolean_or("tokenizer.ggml.remove_extra_whitespaces", true)),
      unknown_(token_id(file, "unknown", n_vocab, 2)),
      scores_(read_scores(file, n_vocab)),
      pieces_(vocabulary.table({TokenType::normal})),
      added_(vocabulary.table({TokenType::user_defined})) {
  add_bos = file.boolean_or("tokenizer.ggml.add_bos_token", false);
  add_eos = true;
  begins_with_space = file.boolean_or("tokenizer.ggml.add_space_prefix", true);
  double least = 0;
  for (int32_t i = 0; i < n_vocab; ++i) {
    const std::string_view piece = vocabulary.utf8(i);
    bytes.push_back(vocabulary.has_no_text(i) ? "" : replaced(piece, kSpace, " "));
    if (vocabulary.types[i] == TokenType::normal) {
      least = std::min(least, scores_[i]);
      divides_ = divides_ && piece.find(kSpace, 1) == std::string_view::npos;
    }
  }
  unknown_score_ = least - kUnknownPenalty;
}

bool Unigram::encode(std::string_view text, bool begins, size_t max_tokens,
                     std::vector<int32_t>& tokens) const {
  const auto on_text = [&](std::string_view part) {
    if (tokens.size() <= max_tokens) encode_text(part, begins, max_tokens, tokens);
    begins = false;
  };
  const auto on_token = [&](int32_t token) {
    tokens.push_back(token);
    begins = true;
  };
  split(text, added_, on_text, on_token);
  return tokens.size() <= max_tokens;
}

// Normalizes as SentencePiece. A long text is encoded in parts, so that it takes little memory.
void Unigram::encode_text(std::string_view text, bool begins, size_t max_tokens,
                          std::vector<int32_t>& tokens) const {
  const size_t first = tokens.size();
  std::string out;
  if (begins && begins_with_space) out += kSpace;
  size_t n_prefix = out.size(), n_part = kUnigramPart;
  bool after_space = one_space_;
  while (!text.empty()) {
    const auto [with, n_bytes] = charsmap_.replace(text);
    for (const char c : with) {
      if (c != ' ') {
        out += c;
      } else if (!after_space) {
        out += kSpace;
      }
      after_space = one_space_ && c == ' ';
    }
    text.remove_prefix(n_bytes);
    if (out.size() < n_part || !divides_) continue;
    if (const size_t end = last_word(out); end > 0) {
      encode_pieces(std::string_view(out).substr(0, end), first, tokens);
      if (tokens.size() > max_tokens) return;
      out.erase(0, end);
      n_prefix = 0;
    }
    n_part = std::max(kUnigramPart, 2 * out.size());
  }
  while (one_space_ && out.size() > n_prefix && out.ends_with(kSpace)) {
    out.resize(out.size() - kSpace.size());
  }
  if (out.size() > n_prefix) encode_pieces(out, first, tokens);
}

// Viterbi's algorithm over the characters of a text, a part of the one whose tokens begin at
// `first`. Neighboring unknown characters are one token.
void Unigram::encode_pieces(std::string_view text, size_t first,
                            std::vector<int32_t>& tokens) const {
  struct Best {
    double score = -std::numeric_limits<double>::infinity();
    uint32_t n_bytes = 0;  // of the last piece
    int32_t token = -1;
  };
  std::vector<Best> best(text.size() + 1);  // of the pieces that end at each byte
  best[0].score = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t n_bytes = read_utf8(text.substr(at)).n_bytes;
    const auto consider = [&](size_t length, int32_t token, double score) {
      Best& end = best[at + length];
      const double sum = best[at].score + score;
      if (sum > end.score) end = {sum, static_cast<uint32_t>(length), token};
    };
    bool has_character = false;
    pieces_.for_prefixes(text.substr(at), [&](const TokenTable::Entry& piece) {
      has_character = has_character || piece.text.size() == n_bytes;
      consider(piece.text.size(), piece.token, scores_[piece.token]);
    });
    if (!has_character) consider(n_bytes, unknown_, unknown_score_);
    at += n_bytes;
  }
  const size_t before = tokens.size();
  for (size_t at = text.size(); at > 0; at -= best[at].n_bytes) {
    const bool repeats =
        best[at].token == unknown_ && tokens.size() > before && tokens.back() == unknown_;
    if (!repeats) tokens.push_back(best[at].token);
  }
  const bool continues = before > first && tokens[before - 1] == unknown_;
  if (continues && tokens.back() == unknown_) tokens.pop_back();
  std::reverse(tokens.begin() + static_cast<ptrdiff_t>(before), tokens.end());
}

}  // namespace h2o
