// The prefix cache of the C API's engine, in memory and on disk: outputs are the same with and
// without it.
#include <doctest/doctest.h>

#include <filesystem>

#include "capi_rig.h"
#include "core/error.h"
#include "core/process.h"

namespace h2o {
namespace {

TEST_CASE("a common prompt prefix is processed once, and the output is the same") {
  const api::Model model = load_model();
  h2o_session_options options = with_budget(24);
  options.n_batch = 16;
  api::Engine plain(model, 1, options);
  options.prefix_cache = 4 << 20;
  api::Engine engine(model, 1, options);
  const std::string line = "The old man and the sea were there, and the ship was in the harbour. ";
  const std::string prompt = line + line + line;
  uint64_t read = 0;  // prompt tokens of the last output
  for (const char* const more : {"", " He said", " They went", " He said"}) {
    const std::string text = prompt + more;
    const uint64_t before = engine.info().prompt_tokens;
    CHECK(engine.submit(text, RequestOptions(12).request).wait() ==
          plain.submit(text, RequestOptions(12).request).wait());
    read = engine.info().prompt_tokens - before;
  }
  CHECK(read <= 1);  // the same prompt again
  const h2o_engine_info info = engine.info();
  CHECK(info.cached_tokens >= 3 * 16);
  CHECK(info.prefix_bytes > 0);
  CHECK(info.prefix_bytes <= 4 << 20);
  CHECK(info.prompt_tokens + info.cached_tokens == plain.info().prompt_tokens);
  CHECK(plain.info().prefix_bytes == 0);
}

TEST_CASE("prefix states on disk outlive their engine, whatever the number of threads") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / concat("h2o_prefixes_", process_id());
  std::filesystem::remove_all(folder);
  const std::string name = folder.string();
  h2o_session_options options = with_budget(24);
  options.n_batch = 16;
  options.prefix_disk = name.c_str();
  const std::string line = "The old man and the sea were there, and the ship was in the harbour. ";
  const std::string prompt = line + line;
  std::string said;
  for (const int32_t n_threads : {1, 2}) {
    api::Engine engine(load_model(kTinyModel, n_threads), 1, options);
    const std::string found = engine.submit(prompt, RequestOptions(12).request).wait();
    if (said.empty()) {
      said = found;
      CHECK(engine.info().cached_tokens == 0);
    } else {
      CHECK(found == said);
      CHECK(engine.info().cached_tokens >= 16);
    }
  }
  std::filesystem::remove_all(folder);
  options.prefix_disk = "";
  CHECK_THROWS_AS(api::Engine(load_model(), 1, options), api::Error);
  options.prefix_disk = kTinyModel.c_str();  // a file
  CHECK_THROWS_AS(api::Engine(load_model(), 1, options), api::Error);
}

}  // namespace
}  // namespace h2o
