// A C++ program that streams an output, saves the session and continues in another one.
#include <h2o.hpp>
#include <iostream>
#include <stdexcept>

namespace {

struct Stopped : std::exception {};

std::string stream(h2o::api::Session& session, std::string_view prompt) {
  h2o_stream_options options = H2O_STREAM_OPTIONS;
  options.max_tokens = 20;
  std::string text;
  session.stream(
      prompt,
      [&](std::string_view piece) {
        text += piece;
        return true;
      },
      options);
  return text;
}

void check(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

void run(const char* path) {
  h2o_model_options on_cpu = H2O_MODEL_OPTIONS;
  on_cpu.device = "cpu";
  const h2o::api::Model model(path, on_cpu);
  const std::vector<int32_t> tokens = model.tokenize("naïve café 🦙");
  check(model.detokenize(tokens) == "naïve café 🦙", "text does not round-trip");

  h2o_session_options options = H2O_SESSION_OPTIONS;
  options.hh = 20;
  h2o::api::Session session(model, options), other(model, options);
  stream(session, "The old man");
  other.load(session.save());
  check(stream(session, " and") == stream(other, " and"), "a loaded snapshot differs");
  check(session.tokens() == other.tokens(), "tokens differ");
  check(session.kept(0, 0).size() == 20, "fewer tokens are kept than hh");

  try {
    session.stream("", [](std::string_view) -> bool { throw Stopped(); });
    check(false, "an exception of the callback is lost");
  } catch (const Stopped&) {
  }
  try {
    const h2o::api::Model none("nowhere.gguf");
    check(false, "a missing file is loaded");
  } catch (const h2o::api::Error& error) {
    check(error.status() == H2O_CANNOT_OPEN, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    check(argc == 2, "expected a model");
    run(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
