// h2o.h: versions, models, text and tokens.
#include "capi/handle_types.h"
#include "core/utf8.h"

using namespace h2o;
using namespace h2o::capi;

uint32_t h2o_abi_version() noexcept { return H2O_ABI_VERSION; }

const char* h2o_version() noexcept { return H2O_VERSION; }

const char* h2o_status_text(h2o_status status) noexcept {
  switch (status) {
    case H2O_OK:
      return "ok";
    case H2O_INVALID_ARGUMENT:
      return "an argument is invalid";
    case H2O_CANNOT_OPEN:
      return "a file cannot be opened";
    case H2O_BAD_FORMAT:
      return "a file or snapshot is damaged, or not of the expected kind";
    case H2O_OUT_OF_MEMORY:
      return "out of memory";
    case H2O_CONTEXT_FULL:
      return "the context is full";
    case H2O_CANCELLED:
      return "cancelled";
    case H2O_TOO_SMALL:
      return "the capacity is too small";
    case H2O_BUSY:
      return "another call is in progress with the handle";
    case H2O_INTERNAL_ERROR:
      return "internal error";
    default:
      return "unknown status";
  }
}

h2o_status h2o_model_load(const char* path, const h2o_model_options* options,
                          h2o_model** model) noexcept {
  if (model == nullptr) return H2O_INVALID_ARGUMENT;
  h2o_model* handle = *model = new (std::nothrow) h2o_model;
  if (handle == nullptr) return H2O_OUT_OF_MEMORY;
  return handle->call(Access::change, [&] {
    const auto o = given(options, h2o_model_options H2O_MODEL_OPTIONS);
    require(path != nullptr, "the path is NULL");
    require(o.reserved == 0, "reserved is ", o.reserved, ", expected 0");
    require(o.n_threads >= 0, "n_threads is ", o.n_threads, ", expected 0 (all cores) or more");
    handle->model = TextModel::open(path, o.device == nullptr ? "auto" : o.device, o.n_threads);
  });
}

h2o_status h2o_model_free(h2o_model* model) noexcept { return free_handle(model); }

const char* h2o_model_error(const h2o_model* model) noexcept {
  return model == nullptr ? "the handle is NULL" : model->message();
}

h2o_status h2o_describe(h2o_model* model, h2o_model_info* info) noexcept {
  return call(model, [&](const TextModel& m) {
    const Config& config = m.model.config;
    give(h2o_model_info{.size = sizeof(h2o_model_info),
                        .architecture = m.architecture.c_str(),
                        .backend = m.backend.c_str(),
                        .n_vocab = config.n_vocab,
                        .n_ctx_train = config.n_ctx_train,
                        .n_layers = config.n_layers,
                        .n_heads = config.n_heads,
                        .n_kv_heads = config.n_kv_heads,
                        .head_dim = config.head_dim,
                        .bos = m.tokenizer.bos(),
                        .eos = m.tokenizer.eos()},
         info);
  });
}

h2o_status h2o_tokenize(h2o_model* model, const char* text, size_t n_bytes, uint32_t flags,
                        int32_t* tokens, size_t capacity, size_t* n_tokens) noexcept {
  return call(model, [&](const TextModel& m) {
    require(flags < 8, "flags is ", flags, ", expected a sum of H2O_ADD_SPECIAL, ...");
    const std::vector<int32_t> found =
        m.tokenizer.encode(given(text, n_bytes), {.add_special = (flags & H2O_ADD_SPECIAL) != 0,
                                                  .parse_special = (flags & H2O_PARSE_SPECIAL) != 0,
                                                  .begins = (flags & H2O_CONTINUES) == 0});
    give(found.data(), found.size(), tokens, capacity, n_tokens);
  });
}

h2o_status h2o_detokenize(h2o_model* model, const int32_t* tokens, size_t n_tokens, char* text,
                          size_t capacity, size_t* n_bytes) noexcept {
  return call(model, [&](const TextModel& m) {
    give_text(m.tokenizer.decode(given(tokens, n_tokens)), text, capacity, n_bytes);
  });
}

h2o_status h2o_token_text(h2o_model* model, int32_t token, char* text, size_t capacity,
                          size_t* n_bytes) noexcept {
  return call(model, [&](const TextModel& m) {
    give_text(repaired_utf8(m.tokenizer.spelling(token)), text, capacity, n_bytes);
  });
}

h2o_status h2o_chat_template(h2o_model* model, const char** source) noexcept {
  return call(model, [&](const TextModel& m) {
    require(source != nullptr, "source is NULL");
    *source = m.chat_template.empty() ? nullptr : m.chat_template.c_str();
  });
}

int32_t h2o_is_end(const h2o_model* model, int32_t token) noexcept {
  return model != nullptr && model->model != nullptr && model->model->tokenizer.ends(token);
}
