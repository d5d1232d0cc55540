#include "capi/handle.h"

#include "core/utf8.h"
#include "text/request.h"

namespace h2o::capi {
namespace {

// Copies as much of a message as fits, in complete characters.
void copy_message(std::string_view message, char* out, size_t capacity) {
  size_t n = 0;
  while (n < message.size()) {
    const Utf8 next = read_utf8(message.substr(n));
    if (n + next.n_bytes >= capacity) break;
    // A path need not be UTF-8.
    for (size_t i = 0; i < next.n_bytes; ++i, ++n) {
      out[n] = next.kind == Utf8::character ? message[n] : '?';
    }
  }
  out[n] = '\0';
}

}  // namespace

h2o_status Handle::keep_message() noexcept {
  const auto keep = [this](h2o_status status, std::string_view message) {
    copy_message(message, message_, sizeof(message_));
    return status;
  };
  try {
    throw;
  } catch (const Failure& e) {
    return keep(e.status, e.message);
  } catch (const FormatError& e) {
    return keep(H2O_BAD_FORMAT, e.what());
  } catch (const ContextFull& e) {
    return keep(H2O_CONTEXT_FULL, e.what());
  } catch (const InvalidArgument& e) {
    return keep(H2O_INVALID_ARGUMENT, e.what());
  } catch (const FileError& e) {
    return keep(H2O_CANNOT_OPEN, e.what());
  } catch (const std::bad_alloc& e) {
    return keep(H2O_OUT_OF_MEMORY, e.what());
  } catch (const std::length_error&) {
    return keep(H2O_OUT_OF_MEMORY, "more elements than any memory has");
  } catch (const std::exception& e) {
    return keep(H2O_INTERNAL_ERROR, e.what());
  } catch (...) {
    return keep(H2O_INTERNAL_ERROR, "an exception of unknown type");
  }
}

}  // namespace h2o::capi
