// h2o.hpp: h2o.h for C++17: handles that free themselves, exceptions and std::string.
#pragma once

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "h2o.h"

namespace h2o::api {

// What a call of h2o.h returned, with its message.
class Error : public std::runtime_error {
 public:
  Error(h2o_status status, const char* message)
      : std::runtime_error(*message != '\0' ? message : h2o_status_text(status)), status_(status) {}
  h2o_status status() const { return status_; }

 private:
  h2o_status status_;
};

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
    std::vector<int32_t> tokens(text.size() + 2);  // seldom more than bytes
    size_t n = 0;
    const auto attempt = [&] {
      return h2o_tokenize(handle(), text.data(), text.size(), flags, tokens.data(), tokens.size(),
                          &n);
    };
    h2o_status status = attempt();
    tokens.resize(n);
    if (status == H2O_TOO_SMALL) status = attempt();
    check(status);
    return tokens;
  }

  std::string detokenize(const std::vector<int32_t>& tokens) const {
    size_t n = 0;
    const h2o_status status =
        h2o_detokenize(handle(), tokens.data(), tokens.size(), nullptr, 0, &n);
    if (status != H2O_TOO_SMALL) check(status);
    std::string text(n + 1, '\0');
    check(h2o_detokenize(handle(), tokens.data(), tokens.size(), text.data(), text.size(), &n));
    text.resize(n);
    return text;
  }

  h2o_model* handle() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(h2o_model* model) const { h2o_model_free(model); }
  };
  void check(h2o_status status) const {
    if (status == H2O_OK) return;
    // The message of a handle that is in use is the other call's.
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
  void set_sampling(const h2o_sampling& sampling) { check(h2o_set_sampling(handle(), &sampling)); }

  // Calls on_piece(std::string_view) with each piece of text; one that returns false ends the
  // stream, and one that throws too.
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
    // The message of a handle that is in use is the other call's.
    throw Error(status, status == H2O_BUSY ? h2o_status_text(status) : h2o_session_error(handle()));
  }

  std::unique_ptr<h2o_session, Free> handle_;
};

}  // namespace h2o::api
