// Node-API bindings of h2o.h, on which index.js builds Model and Session. Long-running calls run in
// another thread and return a promise.
#include <h2o.h>
#include <node_api.h>

#include <atomic>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "values.h"

namespace h2o_node {
namespace {

// The objects behind JavaScript handles.
struct Model {
  h2o_model* handle = nullptr;
  ~Model() { h2o_model_free(handle); }
};
struct Session {
  h2o_session* handle = nullptr;
  std::atomic<bool> is_busy{false};
  ~Session() { h2o_session_free(handle); }
};

template <class T>
std::shared_ptr<T>& shared_or_closed(napi_env env, napi_value value) {
  void* data = nullptr;
  if (napi_get_value_external(env, value, &data) != napi_ok) type_error(env, "expected a handle");
  return *static_cast<std::shared_ptr<T>*>(data);
}
template <class T>
std::shared_ptr<T>& shared(napi_env env, napi_value value) {
  std::shared_ptr<T>& object = shared_or_closed<T>(env, value);
  if (object == nullptr) {
    napi_throw_error(env, "H2O_CLOSED", "the model or session is closed");
    throw Pending();
  }
  return object;
}
template <class T>
napi_value external(napi_env env, const std::shared_ptr<T>& object) {
  napi_value value;
  auto data = std::make_unique<std::shared_ptr<T>>(object);
  const auto finalize = [](napi_env, void* p, void*) {
    delete static_cast<std::shared_ptr<T>*>(p);
  };
  check(env, napi_create_external(env, data.get(), finalize, nullptr, &value));
  data.release();
  return value;
}

// Wraps a function of the module: reads its arguments and converts exceptions.
template <size_t kArguments, napi_value (*kBody)(napi_env, napi_value*)>
napi_value entry(napi_env env, napi_callback_info info) {
  napi_value arguments[kArguments];
  size_t n = kArguments;
  try {
    check(env, napi_get_cb_info(env, info, &n, arguments, nullptr, nullptr));
    return kBody(env, arguments);
  } catch (const Pending&) {
  } catch (const std::exception& error) {
    napi_throw_error(env, nullptr, error.what());
  }
  return nullptr;
}

// Work for Node's thread pool, and the promise of its result.
struct Task {
  virtual ~Task() = default;
  virtual void run() = 0;
  virtual napi_value result(napi_env env) = 0;

  h2o_status status = H2O_OK;
  std::string message;
  napi_deferred deferred = nullptr;
  napi_async_work work = nullptr;
};

napi_value start(napi_env env, std::unique_ptr<Task> task) {
  napi_value promise;
  check(env, napi_create_promise(env, &task->deferred, &promise));
  const auto execute = [](napi_env, void* data) { static_cast<Task*>(data)->run(); };
  const auto complete = [](napi_env env, napi_status, void* data) {
    const std::unique_ptr<Task> task(static_cast<Task*>(data));
    try {
      if (task->status == H2O_OK) {
        napi_resolve_deferred(env, task->deferred, task->result(env));
      } else {
        napi_reject_deferred(env, task->deferred, error_of(env, task->status, task->message));
      }
    } catch (const Pending&) {
    }
    napi_delete_async_work(env, task->work);
  };
  check(env, napi_create_async_work(env, nullptr, string(env, "h2o"), execute, complete, task.get(),
                                    &task->work));
  check(env, napi_queue_async_work(env, task->work));
  task.release();
  return promise;
}

struct Load : Task {
  std::string path, device;
  int32_t n_threads = 0;
  std::shared_ptr<Model> model = std::make_shared<Model>();

  void run() override {
    h2o_model_options options = H2O_MODEL_OPTIONS;
    if (!device.empty()) options.device = device.c_str();
    options.n_threads = n_threads;
    status = h2o_model_load(path.c_str(), &options, &model->handle);
    message = model->handle != nullptr ? h2o_model_error(model->handle) : "";
  }
  napi_value result(napi_env env) override { return external(env, model); }
};

napi_value load(napi_env env, napi_value* arguments) {
  auto task = std::make_unique<Load>();
  task->path = text_of(env, arguments[0], "path");
  const Options options(env, arguments[1]);
  options.read("device", task->device);
  options.read("threads", task->n_threads);
  return start(env, std::move(task));
}

struct Open : Task {
  std::shared_ptr<Model> model;
  std::shared_ptr<Session> session = std::make_shared<Session>();
  h2o_session_options options = H2O_SESSION_OPTIONS;
  std::string key_type, value_type;

  void run() override {
    if (!key_type.empty()) options.k_type = key_type.c_str();
    if (!value_type.empty()) options.v_type = value_type.c_str();
    status = h2o_session_open(model->handle, &options, &session->handle);
    message = session->handle != nullptr ? h2o_session_error(session->handle) : "";
  }
  napi_value result(napi_env env) override { return external(env, session); }
};

napi_value open(napi_env env, napi_value* arguments) {
  auto task = std::make_unique<Open>();
  task->model = shared<Model>(env, arguments[0]);
  const Options options(env, arguments[1]);
  options.read("hh", task->options.hh);
  options.read("recent", task->options.recent);
  options.read("sinks", task->options.n_sinks);
  options.read("context", task->options.n_ctx);
  options.read("batch", task->options.n_batch);
  options.read("positions", task->options.positions);
  options.read("keyType", task->key_type);
  options.read("valueType", task->value_type);
  return start(env, std::move(task));
}

napi_value describe(napi_env env, napi_value* arguments) {
  h2o_model* model = shared<Model>(env, arguments[0])->handle;
  h2o_model_info info = H2O_MODEL_INFO;
  check(env, h2o_describe(model, &info), h2o_model_error(model));
  napi_value object;
  check(env, napi_create_object(env, &object));
  set(env, object, "architecture", string(env, info.architecture));
  set(env, object, "backend", string(env, info.backend));
  set(env, object, "vocabulary", number(env, info.n_vocab));
  set(env, object, "trainedContext", number(env, info.n_ctx_train));
  set(env, object, "layers", number(env, info.n_layers));
  set(env, object, "kvHeads", number(env, info.n_kv_heads));
  return object;
}

napi_value tokenize(napi_env env, napi_value* arguments) {
  h2o_model* model = shared<Model>(env, arguments[0])->handle;
  const std::string text = text_of(env, arguments[1], "text");
  std::vector<int32_t> tokens(text.size() + 2);
  size_t n = 0;
  check(env,
        h2o_tokenize(model, text.data(), text.size(), H2O_ADD_SPECIAL, tokens.data(), tokens.size(),
                     &n),
        h2o_model_error(model));
  return array(env, napi_int32_array, tokens.data(), n);
}

napi_value stats(napi_env env, napi_value* arguments) {
  h2o_session* session = shared<Session>(env, arguments[0])->handle;
  h2o_session_stats stats = H2O_SESSION_STATS;
  check(env, h2o_stats(session, &stats), h2o_session_error(session));
  napi_value object;
  check(env, napi_create_object(env, &object));
  set(env, object, "tokens", number(env, stats.n_tokens));
  set(env, object, "kept", number(env, stats.n_kept));
  set(env, object, "evicted", number(env, stats.n_evicted));
  set(env, object, "context", number(env, stats.n_ctx));
  set(env, object, "room", number(env, stats.room));
  set(env, object, "cacheBytes", number(env, static_cast<double>(stats.cache_bytes)));
  set(env, object, "fullCacheBytes", number(env, static_cast<double>(stats.full_cache_bytes)));
  return object;
}

napi_value kept(napi_env env, napi_value* arguments) {
  h2o_session* session = shared<Session>(env, arguments[0])->handle;
  const int32_t layer = integer_of(env, arguments[1], "layer");
  const int32_t head = integer_of(env, arguments[2], "head");
  h2o_session_stats stats = H2O_SESSION_STATS;
  check(env, h2o_stats(session, &stats), h2o_session_error(session));
  std::vector<int32_t> positions(stats.n_kept);
  std::vector<float> scores(stats.n_kept);
  size_t n = 0;
  check(env, h2o_kept(session, layer, head, positions.data(), scores.data(), scores.size(), &n),
        h2o_session_error(session));
  napi_value object;
  check(env, napi_create_object(env, &object));
  set(env, object, "positions", array(env, napi_int32_array, positions.data(), n));
  set(env, object, "scores", array(env, napi_float32_array, scores.data(), n));
  return object;
}

napi_value reset(napi_env env, napi_value* arguments) {
  h2o_session* session = shared<Session>(env, arguments[0])->handle;
  check(env, h2o_reset(session), h2o_session_error(session));
  return nullptr;
}

napi_value set_sampling(napi_env env, napi_value* arguments) {
  h2o_session* session = shared<Session>(env, arguments[0])->handle;
  h2o_sampling sampling = H2O_SAMPLING;
  const Options options(env, arguments[1]);
  options.read("temperature", sampling.temperature);
  options.read("topK", sampling.top_k);
  options.read("topP", sampling.top_p);
  options.read("minP", sampling.min_p);
  options.read("repeatPenalty", sampling.repeat_penalty);
  options.read("repeatLastN", sampling.repeat_last_n);
  sampling.seeded = options.read("seed", sampling.seed) ? 1 : 0;
  check(env, h2o_set_sampling(session, &sampling), h2o_session_error(session));
  return nullptr;
}

napi_value cancel(napi_env env, napi_value* arguments) {
  h2o_cancel(shared<Session>(env, arguments[0])->handle);
  return nullptr;
}

// Frees it without waiting for the garbage collector; nothing is done the second time.
napi_value close_model(napi_env env, napi_value* arguments) {
  shared_or_closed<Model>(env, arguments[0]).reset();
  return nullptr;
}
napi_value close_session(napi_env env, napi_value* arguments) {
  std::shared_ptr<Session>& session = shared_or_closed<Session>(env, arguments[0]);
  const bool is_busy = session != nullptr && session->is_busy;
  check(env, is_busy ? H2O_BUSY : H2O_OK, "a stream is in progress: cancel it first");
  session.reset();
  return nullptr;
}

// A stream runs in its own thread, which passes pieces to the JavaScript thread. The end is passed
// in the same way, so that it arrives last.
class Stream {
 public:
  std::shared_ptr<Session> session;
  std::string prompt;
  std::vector<std::string> stop;
  h2o_stream_options options = H2O_STREAM_OPTIONS;
  napi_deferred deferred = nullptr;
  napi_threadsafe_function pieces = nullptr;

  void run(napi_env env) {
    check(env, napi_add_env_cleanup_hook(env, leave, this));  // also runs on process.exit()
    env_ = env;
    session->is_busy = true;
    h2o_clear_cancel(session->handle);  // one that came just after the last stream ended
    thread_ = std::thread([this] {
      std::vector<const char*> strings;
      for (const std::string& string : stop) strings.push_back(string.c_str());
      options.n_stop = strings.size();
      options.stop = strings.data();
      status_ = h2o_stream(session->handle, prompt.data(), prompt.size(), &options, on_piece, this,
                           &generation_);
      message_ = h2o_session_error(session->handle);
      napi_call_threadsafe_function(pieces, nullptr, napi_tsfn_blocking);
    });
  }

  // In the JavaScript thread: a piece, or nullptr at the end.
  static void arrive(napi_env env, napi_value callback, void* context, void* data) {
    const std::unique_ptr<std::string> piece(static_cast<std::string*>(data));
    auto* stream = static_cast<Stream*>(context);
    if (env == nullptr) return;  // the environment is being torn down
    try {
      if (piece == nullptr) return stream->end(env);
      napi_value self, argument = string(env, piece->data(), piece->size());
      check(env, napi_get_undefined(env, &self));
      check(env, napi_call_function(env, self, callback, 1, &argument, nullptr));
    } catch (const Pending&) {
    }
  }

 private:
  static int32_t on_piece(void* user, const char* piece, size_t n_bytes) {
    auto* stream = static_cast<Stream*>(user);
    auto data = std::make_unique<std::string>(piece, n_bytes);
    if (napi_call_threadsafe_function(stream->pieces, data.get(), napi_tsfn_blocking) != napi_ok) {
      return 1;
    }
    data.release();
    return 0;
  }

  // The cleanup hook: called only if the environment exits during the stream.
  static void leave(void* data) {
    const std::unique_ptr<Stream> stream(static_cast<Stream*>(data));
    h2o_cancel(stream->session->handle);
    stream->thread_.join();
    stream->session->is_busy = false;
    napi_release_threadsafe_function(stream->pieces, napi_tsfn_abort);
  }

  void end(napi_env env) {
    thread_.join();
    session->is_busy = false;
    napi_remove_env_cleanup_hook(env, leave, this);
    napi_release_threadsafe_function(pieces, napi_tsfn_release);
    const std::unique_ptr<Stream> self(this);
    if (status_ != H2O_OK) {
      check(env, napi_reject_deferred(env, deferred, error_of(env, status_, message_)));
      return;
    }
    static const char* const kFinish[] = {"", "stop", "length", "cancelled"};
    napi_value object;
    check(env, napi_create_object(env, &object));
    set(env, object, "finish", string(env, kFinish[generation_.finish]));
    set(env, object, "promptTokens", number(env, generation_.n_prompt));
    set(env, object, "generatedTokens", number(env, generation_.n_generated));
    set(env, object, "promptSeconds", number(env, generation_.prompt_seconds));
    set(env, object, "decodeSeconds", number(env, generation_.decode_seconds));
    check(env, napi_resolve_deferred(env, deferred, object));
  }

  napi_env env_ = nullptr;
  std::thread thread_;
  h2o_generation generation_ = H2O_GENERATION;
  h2o_status status_ = H2O_OK;
  std::string message_;
};

// stream(session, prompt, options, onPiece): a promise of the generation's result.
napi_value stream(napi_env env, napi_value* arguments) {
  auto stream = std::make_unique<Stream>();
  stream->session = shared<Session>(env, arguments[0]);
  check(env, stream->session->is_busy ? H2O_BUSY : H2O_OK, "another stream is in progress");
  stream->prompt = text_of(env, arguments[1], "prompt");
  const Options options(env, arguments[2]);
  options.read("maxTokens", stream->options.max_tokens);
  options.read_flag("ignoreEnd", stream->options.ignore_end);
  options.read_flag("parseSpecial", stream->options.parse_special);
  options.read("stop", stream->stop);
  napi_value promise;
  check(env, napi_create_promise(env, &stream->deferred, &promise));
  check(env, napi_create_threadsafe_function(env, arguments[3], nullptr, string(env, "h2o"), 0, 1,
                                             nullptr, nullptr, stream.get(), Stream::arrive,
                                             &stream->pieces));
  stream->run(env);
  stream.release();
  return promise;
}

napi_value init(napi_env env, napi_value exports) {
  const auto function = [](const char* name, napi_callback call) {
    return napi_property_descriptor{name,    nullptr,         call,   nullptr, nullptr,
                                    nullptr, napi_enumerable, nullptr};
  };
  const napi_property_descriptor functions[] = {
      function("load", entry<2, load>),
      function("open", entry<2, open>),
      function("describe", entry<1, describe>),
      function("tokenize", entry<2, tokenize>),
      function("stats", entry<1, stats>),
      function("kept", entry<3, kept>),
      function("reset", entry<1, reset>),
      function("setSampling", entry<2, set_sampling>),
      function("cancel", entry<1, cancel>),
      function("stream", entry<4, stream>),
      function("closeModel", entry<1, close_model>),
      function("closeSession", entry<1, close_session>),
  };
  napi_define_properties(env, exports, std::size(functions), functions);
  return exports;
}

}  // namespace
}  // namespace h2o_node

NAPI_MODULE(h2o, h2o_node::init)
