// The tokenizer, with the vocabularies of two models: any valid text is encoded to tokens of the
// vocabulary that decode to it, however it is split; invalid UTF-8 is rejected.
#include "text/tokenizer/tokenizer.h"

#include "core/error.h"
#include "core/utf8.h"
#include "target.h"
#include "text/detokenizer.h"

namespace {

using namespace h2o;

struct Given {
  GgufFile file;
  int32_t n_vocab = static_cast<int32_t>(file.strings("tokenizer.ggml.tokens").size());
  Tokenizer tokenizer{file, n_vocab};
};

const Given& given(bool pieces) {
  static const Given byte_pairs{GgufFile(H2O_SOURCE_DIR "/models/tiny-opt.gguf")};
  static const Given sentence_pieces{
      GgufFile(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf")};
  return pieces ? sentence_pieces : byte_pairs;
}

}  // namespace

int fuzz(std::span<const std::byte> bytes) {
  Taker from(bytes);
  const uint8_t flags = from.byte();
  const auto& [file, n_vocab, tokenizer] = given(flags & 1);
  const Tokenizer::Options options = {.add_special = (flags & 2) != 0,
                                      .parse_special = (flags & 4) != 0,
                                      .begins = (flags & 8) != 0};
  std::vector<std::string> stop;
  if (flags & 16) stop.emplace_back(repaired_utf8(from.take_text(from.byte() % 8 + 1)));
  std::erase(stop, "");
  const std::string_view raw = from.take_text(from.left());
  const std::string text = flags & 32 ? std::string(raw) : repaired_utf8(raw);

  std::vector<int32_t> tokens;
  try {
    tokens = tokenizer.encode(text, options);
    check(is_utf8(text), "accepted text is UTF-8");
  } catch (const InvalidArgument&) {
    check(!is_utf8(text), "rejected text is not UTF-8");
    return 0;
  }
  check(tokens.size() <= 4 * text.size() + 4, "no more tokens than bytes, besides added ones");
  std::string spelled;
  Detokenizer pieces(stop);
  std::string shown;
  for (const int32_t token : tokens) {
    check(token >= 0 && token < n_vocab, "a token of the vocabulary");
    spelled += tokenizer.token_bytes(token);
    const std::string piece = pieces.push(tokenizer.token_bytes(token));
    check(is_utf8(piece), "pieces of whole characters");
    shown += piece;
    if (pieces.stopped()) break;
  }
  shown += pieces.finish();
  check(is_utf8(shown), "a text of whole characters");
  const std::string decoded = tokenizer.decode(tokens);
  check(is_utf8(decoded), "decoded text is UTF-8");
  if (stop.empty()) check(shown == repaired_utf8(spelled), "the pieces are the text");
  for (const std::string& end : stop)
    check(shown.find(end) == shown.npos, "output ends at the stop string");
  if (!(flags & 1) && !options.parse_special) check(decoded == text, "the text again");
  return 0;
}
