#include "text/tokenizer/vocabulary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"

namespace h2o {
namespace {

// Tokens that end a turn regardless of the file's metadata, as in llama.cpp: files often name only
// one end token and declare the others as normal.
constexpr std::string_view kEnds[] = {"<|eot_id|>",      "<|eom_id|>",    "<|im_end|>",
                                      "<|end|>",         "<|return|>",    "<|endoftext|>",
                                      "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>",
                                      "<EOT>",           "_<EOT>",        "<turn|>",
                                      "<|tool_response>"};

// Type 0, which old converters gave to padding, is treated as unused.
std::vector<TokenType> read_types(const GgufFile& file, size_t n_tokens,
                                  std::vector<std::string>& warnings) {
  constexpr std::string_view kKey = "tokenizer.ggml.token_type";
  if (file.find(kKey) == nullptr) return std::vector(n_tokens, TokenType::normal);
  std::vector<TokenType> types;
  size_t n_undefined = 0;
  for (const int64_t type : file.integers(kKey)) {
    if (type < 0 || type > 6) throw FormatError(concat(kKey, " has ", type, ", expected 1 to 6"));
    types.push_back(type == 0 ? TokenType::unused : static_cast<TokenType>(type));
    if (type == 0) ++n_undefined;
  }
  if (n_undefined > 0) {
    warnings.push_back(concat(kKey, " is 0 for ", n_undefined,
                              " tokens, expected 1 to 6: they are ", "treated as unused"));
  }
  return types;
}

// Ignores ids beyond the vocabulary, as llama.cpp does.
std::vector<int32_t> read_suppressed(const GgufFile& file, int32_t n_vocab) {
  constexpr std::string_view kKey = "tokenizer.ggml.suppress_tokens";
  std::vector<int32_t> tokens;
  if (file.find(kKey) == nullptr) return tokens;
  for (const int64_t token : file.integers(kKey)) {
    if (token >= 0 && token < n_vocab) tokens.push_back(static_cast<int32_t>(token));
  }
  std::ranges::sort(tokens);
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

// Returns what token_id() does, but ignores an id beyond the vocabulary, as some converters wrote.
int32_t checked_token_id(const GgufFile& file, std::string_view name, int32_t n_vocab,
                         int32_t fallback, std::vector<std::string>& warnings) {
  const std::string key = concat("tokenizer.ggml.", name, "_token_id");
  const int64_t token = file.integer_or(key, -1);
  if (token < n_vocab || token > UINT32_MAX) return token_id(file, name, n_vocab, fallback);
  warnings.push_back(
      concat(key, " is ", token, ", the vocabulary has ", n_vocab, " tokens: it is ignored"));
  return fallback < n_vocab ? fallback : -1;
}

// In the harmony format (gpt-oss) and Solar Open's, <|end|> ends a message, after which the
// assistant may continue; two others end a turn.
void correct_message_ends(Vocabulary& v) {
  const auto find = [&](std::string_view token) {
    return static_cast<int32_t>(std::ranges::find(v.tokens, token) - v.tokens.begin());
  };
  for (const auto& ends : {std::pair("<|return|>", "<|call|>"), {"<|flush|>", "<|calls|>"}}) {
    const int32_t one = find(ends.first), other = find(ends.second);
    if (one == v.size() || other == v.size()) continue;
    for (const int32_t token : {one, other}) {
      v.types[token] = TokenType::control;
      v.end_tokens.push_back(token);
    }
    std::erase(v.end_tokens, find("<|end|>"));
  }
}

}  // namespace

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at; (at = text.find(from)) != text.npos; text.remove_prefix(at + from.size())) {
    out.append(text.substr(0, at)).append(to);
  }
  return out.append(text);
}

Vocabulary::Vocabulary(const GgufFile& file, int32_t n_vocab, int32_t default_bos,
                       int32_t default_eos, std::vector<std::string>& warnings)
    : tokens(file.strings("tokenizer.ggml.tokens")),
      types(read_types(file, tokens.size(), warnings)),
      bos(checked_token_id(file, "bos", n_vocab, default_bos, warnings)),
      eos(checked_token_id(file, "eos", n_vocab, default_eos, warnings)),
      end_tokens{eos, checked_token_id(file, "eot", n_vocab, -1, warnings),
                 checked_token_id(file, "eom", n_vocab, -1, warnings)},
      suppressed(read_suppressed(file, n_vocab)) {
  if (has_tokens_of_images(file) && std::min(std::ssize(tokens), std::ssize(types)) >= n_vocab) {
    tokens.resize(n_vocab);
    types.resize(n_vocab);
  }
  if (std::ssize(tokens) != n_vocab || std::ssize(types) != n_vocab) {
    throw FormatError(concat("tokenizer.ggml.tokens has ", tokens.size(),
                             " entries and token_type ", types.size(), ", the model has ",
                             n_vocab));
  }
  for (int32_t i = 0; i < n_vocab; ++i) {
    if (std::ranges::find(kEnds, tokens[i]) == std::end(kEnds)) continue;
    types[i] = TokenType::control;
    end_tokens.push_back(i);
  }
  correct_message_ends(*this);
  std::ranges::sort(end_tokens);
  end_tokens.erase(std::unique(end_tokens.begin(), end_tokens.end()), end_tokens.end());
  std::erase(end_tokens, -1);
}

std::string_view Vocabulary::utf8(int32_t token) const {
  if (!is_utf8(tokens[token])) {
    throw FormatError(concat("tokenizer.ggml.tokens: token ", token, " is not valid UTF-8"));
  }
  return tokens[token];
}

bool Vocabulary::has_no_text(int32_t token) const {
  const TokenType type = types[token];
  return type == TokenType::unknown || type == TokenType::control || type == TokenType::unused;
}

TokenTable Vocabulary::table(std::initializer_list<TokenType> of) const {
  std::vector<TokenTable::Entry> entries;
  for (int32_t i = 0; i < size(); ++i) {
    if (std::ranges::find(of, types[i]) != of.end()) entries.push_back({tokens[i], i});
  }
  return TokenTable(std::move(entries));
}

bool has_tokens_of_images(const GgufFile& file) {  // Ollama's, with the encoder inside
  const std::string_view architecture = file.string_or("general.architecture", "");
  return file.find(concat(architecture, ".vision.block_count")) != nullptr;
}

int32_t token_id(const GgufFile& file, std::string_view name, int32_t n_vocab, int32_t fallback) {
  const std::string key = concat("tokenizer.ggml.", name, "_token_id");
  if (fallback < 0 && file.find(key) == nullptr) return -1;
  const int64_t token = file.integer_or(key, fallback);
  if (token < 0 || token >= n_vocab) {
    throw FormatError(concat(key, " is ", token, ", the vocabulary has ", n_vocab, " tokens"));
  }
  return static_cast<int32_t>(token);
}

std::vector<double> read_scores(const GgufFile& file, int32_t n_vocab) {
  constexpr std::string_view kKey = "tokenizer.ggml.scores";
  const GgufValue* const value = file.find(kKey);
  if (value == nullptr ||
      (value->element_type != GgufType::f32 && value->element_type != GgufType::f64)) {
    throw FormatError(concat(kKey, " is missing or is not an array of floats"));
  }
  std::vector<double> scores = file.numbers(kKey);
  for (const double score : scores) {
    if (!(std::abs(score) <= std::numeric_limits<float>::max())) {  // NaN too
      throw FormatError(concat(kKey, " has ", score));
    }
  }
  if (has_tokens_of_images(file) && std::ssize(scores) > n_vocab) scores.resize(n_vocab);
  if (std::ssize(scores) != n_vocab) {
    throw FormatError(concat(kKey, " has ", scores.size(), " entries, the model has ", n_vocab));
  }
  return scores;
}

}  // namespace h2o
