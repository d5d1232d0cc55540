// Node-API over h2o.h: what index.js makes Model and Session of. Whatever computes does so in
// another thread, and settles a promise.
#include <h2o.h>
#include <node_api.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

// A JavaScript exception is pending; what returns to JavaScript next throws it.
struct Pending {};

void check(napi_env env, napi_status status) {
  if (status == napi_ok) return;
  bool pending = false;
  napi_is_exception_pending(env, &pending);
  const napi_extended_error_info* info = nullptr;
  napi_get_last_error_info(env, &info);
  if (!pending) {
    napi_throw_error(env, nullptr,
                     info->error_message != nullptr ? info->error_message : "Node-API failed");
  }
  throw Pending();
}

[[noreturn]] void type_error(napi_env env, const std::string& message) {
  napi_throw_type_error(env, nullptr, message.c_str());
  throw Pending();
}

napi_value string(napi_env env, const char* text, size_t n_bytes = NAPI_AUTO_LENGTH) {
  napi_value value;
  check(env, napi_create_string_utf8(env, text, n_bytes, &value));
  return value;
}
napi_value number(napi_env env, double x) {
  napi_value value;
  check(env, napi_create_double(env, x, &value));
  return value;
}
void set(napi_env env, napi_value object, const char* name, napi_value value) {
  check(env, napi_set_named_property(env, object, name, value));
}

// An Error whose code is the name of the status.
napi_value error_of(napi_env env, h2o_status status, const std::string& message) {
  static const char* const kNames[] = {"H2O_OK",         "H2O_INVALID_ARGUMENT", "H2O_CANNOT_OPEN",
                                       "H2O_BAD_FORMAT", "H2O_OUT_OF_MEMORY",    "H2O_CONTEXT_FULL",
                                       "H2O_CANCELLED",  "H2O_TOO_SMALL",        "H2O_BUSY"};
  const bool known = status >= 0 && status < h2o_status(std::size(kNames));
  napi_value error;
  check(env, napi_create_error(
                 env, string(env, known ? kNames[status] : "H2O_INTERNAL_ERROR"),
                 string(env, message.empty() ? h2o_status_text(status) : message.c_str()), &error));
  return error;
}
void check(napi_env env, h2o_status status, const char* message) {
  if (status == H2O_OK) return;
  napi_throw(env, error_of(env, status, message));
  throw Pending();
}

std::string text_of(napi_env env, napi_value value, const std::string& what) {
  size_t n = 0;
  if (napi_get_value_string_utf8(env, value, nullptr, 0, &n) != napi_ok) {
    type_error(env, what + ": expected a string");
  }
  std::string text(n, '\0');
  check(env, napi_get_value_string_utf8(env, value, text.data(), n + 1, &n));
  return text;
}
double number_of(napi_env env, napi_value value, const std::string& what) {
  double x = 0;
  if (napi_get_value_double(env, value, &x) != napi_ok)
    type_error(env, what + ": expected a number");
  return x;
}
int32_t integer_of(napi_env env, napi_value value, const std::string& what) {
  const double x = number_of(env, value, what);
  if (!(std::fabs(x) <= std::numeric_limits<int32_t>::max()) || x != std::trunc(x)) {
    type_error(env, what + ": expected a whole number of 32 bits");
  }
  return static_cast<int32_t>(x);
}

// The properties of an object of options; those that are undefined leave what is there.
class Options {
 public:
  Options(napi_env env, napi_value object) : env_(env), object_(object) {
    napi_valuetype type;
    check(env, napi_typeof(env, object, &type));
    is_given_ = type != napi_undefined;
    if (is_given_ && type != napi_object) type_error(env, "options: expected an object");
  }
  void read(const char* name, double& to) const {
    if (napi_value value; find(name, &value)) to = number_of(env_, value, name);
  }
  void read(const char* name, float& to) const {
    if (napi_value value; find(name, &value)) to = static_cast<float>(number_of(env_, value, name));
  }
  void read(const char* name, int32_t& to) const {
    if (napi_value value; find(name, &value)) to = integer_of(env_, value, name);
  }
  void read_flag(const char* name, int32_t& to) const {
    napi_value value;
    bool flag = false;
    if (!find(name, &value)) return;
    if (napi_get_value_bool(env_, value, &flag) != napi_ok) {
      type_error(env_, std::string(name) + ": expected true or false");
    }
    to = flag ? 1 : 0;
  }
  bool read(const char* name, std::string& to) const {
    napi_value value;
    if (!find(name, &value)) return false;
    to = text_of(env_, value, name);
    return true;
  }
  bool find(const char* name, napi_value* value) const {
    if (!is_given_) return false;
    check(env_, napi_get_named_property(env_, object_, name, value));
    napi_valuetype type;
    check(env_, napi_typeof(env_, *value, &type));
    return type != napi_undefined;
  }

 private:
  napi_env env_;
  napi_value object_;
  bool is_given_ = false;
};

// Handles as JavaScript has them. One that is closed has nullptr.
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
std::shared_ptr<T>& shared(napi_env env, napi_value value) {
  void* data = nullptr;
  if (napi_get_value_external(env, value, &data) != napi_ok) type_error(env, "expected a handle");
  auto& object = *static_cast<std::shared_ptr<T>*>(data);
  if (object == nullptr || object->handle == nullptr) {
    napi_throw_error(env, "H2O_CLOSED", "it is closed");
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

// The body of a function of the module, with its arguments.
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

// Work for a thread of Node's pool, and the promise of its result.
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

napi_value array(napi_env env, napi_typedarray_type type, const void* data, size_t n) {
  void* to = nullptr;
  napi_value buffer, value;
  check(env, napi_create_arraybuffer(env, n * 4, &to, &buffer));
  if (n > 0) std::memcpy(to, data, n * 4);
  check(env, napi_create_typedarray(env, type, n, buffer, 0, &value));
  return value;
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
  double seed = -1;
  options.read("seed", seed);
  sampling.seeded = seed >= 0 ? 1 : 0;
  sampling.seed = seed >= 0 && seed <= 0x1p53 ? static_cast<uint64_t>(seed) : 0;
  check(env, h2o_set_sampling(session, &sampling), h2o_session_error(session));
  return nullptr;
}

napi_value cancel(napi_env env, napi_value* arguments) {
  h2o_cancel(shared<Session>(env, arguments[0])->handle);
  return nullptr;
}

// Frees now what the collector would free later.
napi_value close_model(napi_env env, napi_value* arguments) {
  shared<Model>(env, arguments[0]).reset();
  return nullptr;
}
napi_value close_session(napi_env env, napi_value* arguments) {
  std::shared_ptr<Session>& session = shared<Session>(env, arguments[0]);
  check(env, session->is_busy ? H2O_BUSY : H2O_OK, "a stream is in progress: cancel it first");
  session.reset();
  return nullptr;
}

// A stream has a thread of its own, which hands its pieces to JavaScript's. The end comes the same
// way, so that it comes last.
class Stream {
 public:
  std::shared_ptr<Session> session;
  std::string prompt;
  std::vector<std::string> stop;
  h2o_stream_options options = H2O_STREAM_OPTIONS;
  napi_deferred deferred = nullptr;
  napi_threadsafe_function pieces = nullptr;

  void run(napi_env env) {
    check(env, napi_add_env_cleanup_hook(env, leave, this));  // also of process.exit()
    env_ = env;
    session->is_busy = true;
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

  // In JavaScript's thread: a piece, or nullptr for the end.
  static void arrive(napi_env env, napi_value callback, void* context, void* data) {
    const std::unique_ptr<std::string> piece(static_cast<std::string*>(data));
    auto* stream = static_cast<Stream*>(context);
    if (env == nullptr) return;  // it is being torn down
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

  // Called last of all, whichever way it ends.
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

// stream(session, prompt, options, onPiece): the promise of how it ended.
napi_value stream(napi_env env, napi_value* arguments) {
  auto stream = std::make_unique<Stream>();
  stream->session = shared<Session>(env, arguments[0]);
  check(env, stream->session->is_busy ? H2O_BUSY : H2O_OK, "another stream is in progress");
  stream->prompt = text_of(env, arguments[1], "prompt");
  const Options options(env, arguments[2]);
  options.read("maxTokens", stream->options.max_tokens);
  options.read_flag("ignoreEnd", stream->options.ignore_end);
  options.read_flag("parseSpecial", stream->options.parse_special);
  if (napi_value list; options.find("stop", &list)) {
    uint32_t n = 0;
    if (napi_get_array_length(env, list, &n) != napi_ok) {
      type_error(env, "stop: expected an array of strings");
    }
    for (uint32_t i = 0; i < n; ++i) {
      napi_value item;
      check(env, napi_get_element(env, list, i, &item));
      stream->stop.push_back(text_of(env, item, "stop"));
    }
  }
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

NAPI_MODULE(h2o, init)
