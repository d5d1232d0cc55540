// Continues several prompts concurrently, and prints each when it is complete.
//
//   many_requests MODEL.gguf PROMPT...
#include <h2o.hpp>
#include <iostream>

namespace {

int run(int argc, char** argv) {
  const h2o::api::Model model(argv[1]);
  h2o_session_options options = H2O_SESSION_OPTIONS;
  options.hh = 0.2;
  options.n_ctx = 512;
  h2o::api::Engine engine(model, 4, options);  // further requests are queued

  h2o_stream_options limits = H2O_STREAM_OPTIONS;
  limits.max_tokens = 40;
  h2o_request_options asked = H2O_REQUEST_OPTIONS;
  asked.limits = &limits;
  asked.n_top = 0;

  std::vector<h2o::api::Request> requests;
  for (int i = 2; i < argc; ++i) requests.push_back(engine.submit(argv[i], asked));
  for (int i = 2; i < argc; ++i) {
    h2o::api::Request& request = requests[i - 2];
    std::cout << "> " << argv[i] << request.wait() << "\n";
    double sum = 0;
    const size_t n = request.tokens().size();
    for (size_t token = 0; token < n; ++token) sum += request.logprob(token).logprob;
    if (n > 0) std::cout << "[mean log-probability " << sum / static_cast<double>(n) << "]\n";
  }
  const h2o_engine_info info = engine.info();
  std::cout << "[" << requests.size() << " requests, " << info.generated_tokens
            << " tokens generated | caches " << info.cache_bytes / 1024 << " KiB]\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: " << argv[0] << " MODEL.gguf PROMPT...\n";
    return 2;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << argv[0] << ": " << error.what() << "\n";
    return 1;
  }
}
