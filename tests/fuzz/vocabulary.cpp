// Hostile vocabularies: a file's tokens, types, scores and merges are either accepted, after which
// any text can be encoded, or rejected with a FormatError.
#include <string>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "core/utf8.h"
#include "target.h"
#include "text/tokenizer/tokenizer.h"

namespace {

using namespace h2o;

constexpr const char* kPre[] = {"gpt-2",  "llama-bpe", "qwen2",  "smollm", "olmo", "default",
                                "refact", "tekken",    "falcon", "mpt",    "dbrx", "unknown"};

// Writes a GGUF file key by key.
class Writer {
 public:
  template <class T>
  void number(std::string_view key, GgufType type, T value) {
    begin(key, type);
    keys_.put(value);
  }
  void text(std::string_view key, std::string_view value) {
    begin(key, GgufType::string);
    keys_.put_text(value);
  }
  void texts(std::string_view key, const std::vector<std::string>& values) {
    array(key, GgufType::string, values.size());
    for (const std::string& value : values) keys_.put_text(value);
  }
  template <class T>
  void numbers(std::string_view key, GgufType type, const std::vector<T>& values) {
    array(key, type, values.size());
    keys_.put(std::span(values));
  }

  std::vector<std::byte> file() {
    ByteWriter file;
    file.put(std::span("GGUF", 4));
    file.put(uint32_t{3});
    file.put(uint64_t{0});
    file.put(n_keys_);
    file.put(std::span<const std::byte>(keys_.bytes()));
    return std::move(file.bytes());
  }

 private:
  void begin(std::string_view key, GgufType type) {
    ++n_keys_;
    keys_.put_text(key);
    keys_.put(type);
  }
  void array(std::string_view key, GgufType type, size_t n) {
    begin(key, GgufType::array);
    keys_.put(type);
    keys_.put(uint64_t{n});
  }

  ByteWriter keys_;
  uint64_t n_keys_ = 0;
};

std::vector<std::byte> file_of(Taker& from, int32_t& n_vocab) {
  Writer writer;
  const uint8_t flags = from.byte(), more = from.byte();
  const bool byte_pairs = flags & 1;
  writer.text("tokenizer.ggml.model", byte_pairs ? "gpt2" : "llama");
  if (flags & 2) writer.text("tokenizer.ggml.pre", kPre[from.byte() % std::size(kPre)]);
  n_vocab = from.byte() % 48 + 1;
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;
  std::vector<float> scores;
  for (int32_t i = 0; i < n_vocab; ++i) {
    const uint8_t what = from.byte();
    // Mostly letters, so that there are merges.
    std::string token(what & 8 ? from.take_text(from.byte() % 6) : "");
    for (int n = what & 8 ? 0 : what >> 4; n >= 0; --n)
      token += static_cast<char>('a' + from.byte() % 4);
    tokens.push_back(std::move(token));
    types.push_back(what & 4 ? from.byte() % 8 : 1);
    scores.push_back(what & 2 ? from.take<float>() : static_cast<float>(-i));
  }
  if (flags & 4) types.resize(from.byte() % 50);
  if (flags & 8) scores.resize(from.byte() % 50);
  for (int n = from.byte() % 32; n > 0; --n) {
    const std::string& left = tokens[from.byte() % tokens.size()];
    const std::string& right = tokens[from.byte() % tokens.size()];
    merges.push_back(left + " " + right);
  }
  if (flags & 16) merges.emplace_back(from.take_text(from.byte() % 8));
  writer.texts("tokenizer.ggml.tokens", tokens);
  if (!(flags & 32)) writer.numbers("tokenizer.ggml.token_type", GgufType::i32, types);
  if (!byte_pairs || flags & 64) writer.numbers("tokenizer.ggml.scores", GgufType::f32, scores);
  if (byte_pairs || flags & 64) writer.texts("tokenizer.ggml.merges", merges);
  const char* const ids[] = {"bos", "eos", "unknown", "eot"};
  for (int i = 0; i < 4; ++i) {
    if (!(more >> i & 1)) continue;
    writer.number(concat("tokenizer.ggml.", ids[i], "_token_id"), GgufType::u32,
                  uint32_t{from.byte()} % 50);
  }
  const char* const switches[] = {"add_bos_token", "add_eos_token", "add_space_prefix",
                                  "remove_extra_whitespaces"};
  for (int i = 0; i < 4; ++i) {
    if (!(more >> (4 + i) & 1)) continue;
    writer.number(concat("tokenizer.ggml.", switches[i]), GgufType::boolean,
                  static_cast<uint8_t>(from.byte() & 1));
  }
  return writer.file();
}

}  // namespace

int fuzz(std::span<const std::byte> bytes) {
  Taker from(bytes);
  int32_t n_vocab = 0;
  const std::vector<std::byte> content = file_of(from, n_vocab);
  try {
    const GgufFile file(MappedFile("fuzz", content));
    const Tokenizer tokenizer(file, n_vocab);
    const std::string text = repaired_utf8(from.take_text(from.left()));
    for (const bool special : {false, true}) {
      const Tokenizer::Options options = {
          .add_special = special, .parse_special = special, .begins = special};
      const std::vector<int32_t> tokens = tokenizer.encode(text, options);
      for (const int32_t token : tokens) {
        check(token >= 0 && token < n_vocab, "a token of the vocabulary");
        tokenizer.ends(token);
      }
      check(is_utf8(tokenizer.decode(tokens)), "decoded text is UTF-8");
      tokenizer.has_text(tokens);
    }
  } catch (const FormatError&) {
  }
  return 0;
}
