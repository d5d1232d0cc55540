// The id of the current process, which changes after fork().
#pragma once

#include <cstdint>

#ifdef _WIN32
#include <process.h>
#else
#include <unistd.h>
#endif

namespace h2o {

inline int64_t process_id() {
#ifdef _WIN32
  return _getpid();
#else
  return getpid();
#endif
}

}  // namespace h2o
