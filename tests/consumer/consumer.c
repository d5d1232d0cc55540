/* A C program that streams an output, and checks error messages. */
#include <h2o.h>
#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                      \
  do {                                                        \
    if (!(condition)) {                                       \
      fprintf(stderr, "line %d: " #condition "\n", __LINE__); \
      return 1;                                               \
    }                                                         \
  } while (0)

static int32_t count_bytes(void* user, const char* piece, size_t n_bytes) {
  size_t* n = user;
  *n += n_bytes;
  return strlen(piece) == n_bytes ? 0 : 1;
}

int main(int argc, char** argv) {
  h2o_model* model = NULL;
  h2o_session* session = NULL;
  h2o_session_options options = H2O_SESSION_OPTIONS;
  h2o_stream_options limits = H2O_STREAM_OPTIONS;
  h2o_generation generation = H2O_GENERATION;
  h2o_session_stats stats = H2O_SESSION_STATS;
  h2o_model_options one_thread = H2O_MODEL_OPTIONS;
  h2o_model_info info = H2O_MODEL_INFO;
  h2o_sampling sampling = H2O_SAMPLING;
  h2o_engine* engine = NULL;
  h2o_request* request = NULL;
  h2o_request_options asked = H2O_REQUEST_OPTIONS;
  h2o_logprob logprob, likeliest[2];
  const char* piece = NULL;
  size_t n_piece = 0, n_streamed = 0, n_likeliest = 0;
  const char* prompt = "The old man";
  size_t n_bytes = 0;

  CHECK(argc == 2);
  CHECK(h2o_abi_version() == H2O_ABI_VERSION);

  CHECK(h2o_model_load("nowhere.gguf", NULL, &model) == H2O_CANNOT_OPEN);
  CHECK(strstr(h2o_model_error(model), "nowhere.gguf") != NULL);
  CHECK(h2o_model_free(model) == H2O_OK);

  one_thread.device = "cpu";
  one_thread.n_threads = 1;
  CHECK(h2o_model_load(argv[1], &one_thread, &model) == H2O_OK);
  CHECK(h2o_describe(model, &info) == H2O_OK);
  CHECK(info.n_vocab > 0);
  options.hh = 0.2;
  CHECK(h2o_session_open(model, &options, &session) == H2O_OK);
  CHECK(h2o_engine_open(model, &options, 2, &engine) == H2O_OK);
  CHECK(h2o_model_free(model) == H2O_OK); /* session and engine keep what they need of it */

  sampling.seeded = 1;
  CHECK(h2o_set_sampling(session, &sampling) == H2O_OK);
  limits.max_tokens = 20;
  limits.ignore_end = 1;
  CHECK(h2o_stream(session, prompt, strlen(prompt), &limits, count_bytes, &n_bytes, &generation) ==
        H2O_OK);
  CHECK(generation.finish == H2O_FINISH_LENGTH);
  CHECK(generation.n_generated == 20);
  CHECK(n_bytes > 20);

  CHECK(h2o_stats(session, &stats) == H2O_OK);
  CHECK(stats.n_tokens == generation.n_prompt + 20);
  CHECK(stats.cache_bytes < stats.full_cache_bytes);
  CHECK(h2o_stream(session, NULL, 1, NULL, count_bytes, NULL, NULL) == H2O_INVALID_ARGUMENT);
  CHECK(h2o_session_error(session)[0] != '\0');
  CHECK(h2o_session_free(session) == H2O_OK);

  asked.sampling = &sampling;
  asked.limits = &limits;
  asked.n_top = 2;
  CHECK(h2o_engine_submit(engine, prompt, strlen(prompt), &asked, &request) == H2O_OK);
  do {
    CHECK(h2o_request_next(request, &piece, &n_piece) == H2O_OK);
    n_streamed += n_piece;
  } while (n_piece > 0);
  CHECK(n_streamed == n_bytes); /* equals the session's output */
  CHECK(h2o_request_result(request, &generation) == H2O_OK);
  CHECK(generation.n_generated == 20);
  CHECK(h2o_request_logprobs(request, 19, &logprob, likeliest, 2, &n_likeliest) == H2O_OK);
  CHECK(n_likeliest == 2 && likeliest[0].logprob >= logprob.logprob);
  CHECK(h2o_engine_free(engine) == H2O_OK);
  CHECK(h2o_request_free(request) == H2O_OK);
  return 0;
}
