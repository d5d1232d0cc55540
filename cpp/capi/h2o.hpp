// h2o.hpp: h2o.h for C++17, with RAII handles, exceptions and std::string.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "h2o.h"

namespace h2o::api {

// A failed call's status, with its message.
class Error : public std::runtime_error {
 public:
  Error(h2o_status status, const char* message)
      : std::runtime_error(*message != '\0' ? message : h2o_status_text(status)), status_(status) {}
  h2o_status status() const { return status_; }

 private:
  h2o_status status_;
};

namespace detail {

// Calls call(array, capacity, &n) until the array, of the size of `results` at first, is long
// enough for all results, whose number may grow between calls.
template <class Results, class Call>
h2o_status get_all(Results& results, Call call) {
  while (true) {
    size_t n = 0;
    const h2o_status status = call(results.data(), results.size(), &n);
    results.resize(status == H2O_TOO_SMALL ? n + 64 : n);
    if (status != H2O_TOO_SMALL) return status;
  }
}

}  // namespace detail

class Model {
 public:
  explicit Model(const std::string& path, h2o_model_options options = H2O_MODEL_OPTIONS) {
    h2o_model* handle = nullptr;
    const h2o_status status = h2o_model_load(path.c_str(), &options, &handle);
    handle_.reset(handle);
    check(status);
  }

  h2o_model_info info() const {
    h2o_model_info info = H2O_MODEL_INFO;
    check(h2o_describe(handle(), &info));
    return info;
  }

  std::vector<int32_t> tokenize(std::string_view text, uint32_t flags = H2O_ADD_SPECIAL) const {
    std::vector<int32_t> tokens(text.size() + 2);  // rarely more than one token per byte
    check(detail::get_all(tokens, [&](int32_t* out, size_t capacity, size_t* n) {
      return h2o_tokenize(handle(), text.data(), text.size(), flags, out, capacity, n);
    }));
    return tokens;
  }

  std::string detokenize(const std::vector<int32_t>& tokens) const {
    std::string text(64, '\0');
    check(detail::get_all(text, [&](char* out, size_t capacity, size_t* n) {
      return h2o_detokenize(handle(), tokens.data(), tokens.size(), out, capacity, n);
    }));
    return text;
  }

  // A token's entry in the vocabulary.
  std::string token_text(int32_t token) const {
    std::string text(64, '\0');
    check(detail::get_all(text, [&](char* out, size_t capacity, size_t* n) {
      return h2o_token_text(handle(), token, out, capacity, n);
    }));
    return text;
  }

  // The template in Jinja; "" if the file has none.
  std::string chat_template() const {
    const char* source = nullptr;
    check(h2o_chat_template(handle(), &source));
    return source == nullptr ? "" : source;
  }

  h2o_model* handle() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(h2o_model* model) const { h2o_model_free(model); }
  };
  void check(h2o_status status) const {
    if (status == H2O_OK) return;
    // While another call is in progress the message belongs to that call.
    throw Error(status, status == H2O_BUSY ? h2o_status_text(status) : h2o_model_error(handle()));
  }

  std::unique_ptr<h2o_model, Free> handle_;
};

class Session {
 public:
  explicit Session(const Model& model, h2o_session_options options = H2O_SESSION_OPTIONS) {
    h2o_session* handle = nullptr;
    const h2o_status status = h2o_session_open(model.handle(), &options, &handle);
    handle_.reset(handle);
    check(status);
  }

  void reset() { check(h2o_reset(handle())); }
  void cancel() { h2o_cancel(handle()); }  // from any thread
  void clear_cancel() { h2o_clear_cancel(handle()); }
  void set_sampling(const h2o_sampling& sampling) { check(h2o_set_sampling(handle(), &sampling)); }

  // Calls on_piece(std::string_view) with each piece of text; the stream ends if it returns false
  // or throws.
  template <class OnPiece>
  h2o_generation stream(std::string_view prompt, OnPiece on_piece,
                        h2o_stream_options options = H2O_STREAM_OPTIONS) {
    struct Call {
      OnPiece& on_piece;
      std::exception_ptr thrown;
    } call{on_piece, nullptr};
    const auto callback = [](void* user, const char* piece, size_t n_bytes) -> int32_t {
      Call& call = *static_cast<Call*>(user);
      try {
        return call.on_piece(std::string_view(piece, n_bytes)) ? 0 : 1;
      } catch (...) {
        call.thrown = std::current_exception();
        return 1;
      }
    };
    h2o_generation generation = H2O_GENERATION;
    const h2o_status status =
        h2o_stream(handle(), prompt.data(), prompt.size(), &options, callback, &call, &generation);
    if (call.thrown) std::rethrow_exception(call.thrown);
    check(status);
    return generation;
  }

  void feed(const std::vector<int32_t>& tokens) {
    check(h2o_feed(handle(), tokens.data(), tokens.size()));
  }
  void decode(int32_t token) { check(h2o_decode(handle(), token)); }
  int32_t sample() {
    int32_t token = 0;
    check(h2o_sample(handle(), &token));
    return token;
  }

  h2o_session_stats stats() const {
    h2o_session_stats stats = H2O_SESSION_STATS;
    check(h2o_stats(handle(), &stats));
    return stats;
  }

  // Positions that one KV head of a layer keeps.
  std::vector<int32_t> kept(int32_t layer, int32_t kv_head) const {
    std::vector<int32_t> positions(stats().n_kept);
    size_t n = 0;
    check(h2o_kept(handle(), layer, kv_head, positions.data(), nullptr, positions.size(), &n));
    positions.resize(n);
    return positions;
  }

  std::vector<int32_t> tokens() const {
    std::vector<int32_t> tokens(stats().n_tokens);
    size_t n = 0;
    check(h2o_tokens(handle(), tokens.data(), tokens.size(), &n));
    return tokens;
  }

  std::string save() const {
    void* bytes = nullptr;
    size_t n = 0;
    check(h2o_snapshot_save(handle(), &bytes, &n));
    const std::unique_ptr<void, void (*)(void*)> owner(
        bytes, [](void* saved) { h2o_snapshot_free(saved); });
    return {static_cast<const char*>(bytes), n};
  }
  void load(std::string_view snapshot) {
    check(h2o_snapshot_load(handle(), snapshot.data(), snapshot.size()));
  }

  h2o_session* handle() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(h2o_session* session) const { h2o_session_free(session); }
  };
  void check(h2o_status status) const {
    if (status == H2O_OK) return;
    // While another call is in progress the message belongs to that call.
    throw Error(status, status == H2O_BUSY ? h2o_status_text(status) : h2o_session_error(handle()));
  }

  std::unique_ptr<h2o_session, Free> handle_;
};

// Selects the allowed next tokens: allow(token) in a mask of n_words words.
using Constraint =
    std::function<void(const int32_t* tokens, size_t n_tokens, uint32_t* allowed, size_t n_words)>;
inline void allow(uint32_t* allowed, int32_t token) {
  allowed[token / 32] |= uint32_t{1} << (token % 32);
}

// Created by Engine::submit().
class Request {
 public:
  // The next piece of text; nullopt after the end. Throws the error that ended it, once.
  std::optional<std::string> next() { return piece_by(h2o_request_next); }

  // All text that is ready, without waiting; nullopt if there is none.
  std::optional<std::string> poll() { return piece_by(h2o_request_poll); }

  // Waits for the end; returns all text.
  std::string wait() {
    while (next()) {
    }
    return text();
  }

  void cancel() { h2o_request_cancel(handle()); }  // from any thread

  h2o_generation result() const {
    h2o_generation generation = H2O_GENERATION;
    check(h2o_request_result(handle(), &generation));
    return generation;
  }

  // All text generated so far.
  std::string text() const {
    std::string text(64, '\0');
    check(detail::get_all(text, [this](char* out, size_t capacity, size_t* n) {
      return h2o_request_text(handle(), out, capacity, n);
    }));
    return text;
  }
  std::vector<int32_t> tokens() const {
    std::vector<int32_t> tokens(64);
    check(detail::get_all(tokens, [this](int32_t* out, size_t capacity, size_t* n) {
      return h2o_request_tokens(handle(), out, capacity, n);
    }));
    return tokens;
  }

  // The log-probability of the i-th generated token; `top` receives the most likely tokens.
  h2o_logprob logprob(size_t i, std::vector<h2o_logprob>* top = nullptr) const {
    h2o_logprob found{};
    std::vector<h2o_logprob> likeliest(64);
    check(detail::get_all(likeliest, [&](h2o_logprob* out, size_t capacity, size_t* n) {
      return h2o_request_logprobs(handle(), i, &found, out, capacity, n);
    }));
    if (top != nullptr) *top = std::move(likeliest);
    return found;
  }

  h2o_request* handle() const { return handle_.get(); }

 private:
  friend class Engine;
  // Requests destroyed in a constraint of their engine: they are freed after it.
  struct Unfreed {
    std::mutex mutex;
    std::vector<std::pair<h2o_request*, std::unique_ptr<Constraint>>> requests;

    ~Unfreed() {
      for (const auto& request : requests) h2o_request_free(request.first);
    }
  };
  struct Free {
    std::unique_ptr<Constraint> constraint;  // must outlive the request's callbacks
    std::shared_ptr<Unfreed> unfreed;

    void operator()(h2o_request* request) {
      if (h2o_request_free(request) != H2O_BUSY) return;
      h2o_request_cancel(request);
      try {
        const std::lock_guard<std::mutex> lock(unfreed->mutex);
        unfreed->requests.emplace_back(request, std::move(constraint));
      } catch (const std::bad_alloc&) {
        static_cast<void>(constraint.release());  // may still be called
      }
    }
  };
  Request() = default;

  void check(h2o_status status) const {
    if (status == H2O_OK) return;
    throw Error(status, status == H2O_BUSY ? h2o_status_text(status) : h2o_request_error(handle()));
  }

  template <class Call>
  std::optional<std::string> piece_by(Call call) {
    const char* piece = nullptr;
    size_t n = 0;
    check(call(handle(), &piece, &n));
    if (n == 0) return std::nullopt;
    return std::string(piece, n);
  }

  std::unique_ptr<h2o_request, Free> handle_;
};

class Engine {
 public:
  Engine(const Model& model, int32_t max_sequences,
         h2o_session_options options = H2O_SESSION_OPTIONS) {
    h2o_engine* handle = nullptr;
    const h2o_status status = h2o_engine_open(model.handle(), &options, max_sequences, &handle);
    handle_.reset(handle);
    if (status != H2O_OK) throw Error(status, h2o_engine_error(handle));
  }

  // Thread-safe. An exception in a constraint ends the request.
  Request submit(std::string_view prompt, h2o_request_options options = H2O_REQUEST_OPTIONS,
                 Constraint constraint = nullptr) {
    Request request;
    request.handle_.get_deleter().unfreed = unfreed_;
    if (constraint) {
      std::unique_ptr<Constraint>& kept = request.handle_.get_deleter().constraint;
      kept = std::make_unique<Constraint>(std::move(constraint));
      options.user = kept.get();
      options.constraint = [](void* user, const int32_t* tokens, size_t n_tokens, uint32_t* allowed,
                              size_t n_words) -> int32_t {
        try {
          (*static_cast<Constraint*>(user))(tokens, n_tokens, allowed, n_words);
          return 0;
        } catch (...) {
          return 1;
        }
      };
    }
    h2o_request* handle = nullptr;
    const h2o_status status =
        h2o_engine_submit(this->handle(), prompt.data(), prompt.size(), &options, &handle);
    request.handle_.reset(handle);
    request.check(status);
    return request;
  }

  h2o_engine_info info() const {
    h2o_engine_info info = H2O_ENGINE_INFO;
    const h2o_status status = h2o_engine_describe(handle(), &info);
    if (status != H2O_OK) throw Error(status, "");
    return info;
  }

  h2o_engine* handle() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(h2o_engine* engine) const { h2o_engine_free(engine); }
  };
  std::shared_ptr<Request::Unfreed> unfreed_ = std::make_shared<Request::Unfreed>();
  std::unique_ptr<h2o_engine, Free> handle_;
};

}  // namespace h2o::api
