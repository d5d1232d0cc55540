// Continues a text on the console, as a chat window, server or editor plug-in would.
//
//   stream_text MODEL.gguf "The old man" [BUDGET [MAX_TOKENS]]
//
// BUDGET is the number of tokens to keep, or a fraction of the context (0.2).
// Ctrl-C cancels the generation, not the program.
#include <csignal>
#include <cstdlib>
#include <h2o.hpp>
#include <iostream>

namespace {

h2o_session* running = nullptr;  // cancelled by Ctrl-C

void print_summary(const h2o_generation& text, const h2o_session_stats& cache) {
  std::cerr << "\n[" << text.n_prompt << " prompt tokens, " << text.n_generated << " generated";
  if (text.decode_seconds > 0) {
    std::cerr << ", " << static_cast<int>((text.n_generated - 1) / text.decode_seconds) << "/s";
  }
  std::cerr << " | cache " << cache.cache_bytes / 1024 << " KiB, full "
            << cache.full_cache_bytes / 1024 << " KiB | " << cache.n_evicted << " of "
            << cache.n_read << " evicted]\n";
}

int run(int argc, char** argv) {
  h2o_session_options options = H2O_SESSION_OPTIONS;
  if (argc > 3) options.hh = std::strtod(argv[3], nullptr);
  h2o_stream_options limits = H2O_STREAM_OPTIONS;
  limits.max_tokens = argc > 4 ? std::atoi(argv[4]) : 200;

  const h2o::api::Model model(argv[1]);
  h2o::api::Session session(model, options);
  running = session.handle();
  std::signal(SIGINT, [](int) { h2o_cancel(running); });

  std::cout << argv[2] << std::flush;
  const auto print = [](std::string_view piece) {
    std::cout << piece << std::flush;
    return std::cout.good();
  };
  const h2o_generation text = session.stream(argv[2], print, limits);
  std::signal(SIGINT, SIG_DFL);
  print_summary(text, session.stats());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) {
    std::cerr << "usage: " << argv[0] << " MODEL.gguf PROMPT [BUDGET [MAX_TOKENS]]\n";
    return 2;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << argv[0] << ": " << error.what() << "\n";
    return 1;
  }
}
