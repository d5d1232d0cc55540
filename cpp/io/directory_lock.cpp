#include "io/directory_lock.h"

#include <chrono>
#include <thread>

#ifdef _WIN32
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace h2o {
namespace {

constexpr int kTries = 200;
constexpr auto kPause = std::chrono::milliseconds(5);

}  // namespace

#ifdef _WIN32

// A file that nobody else can open, and that ends with its handle.
DirectoryLock::DirectoryLock(const std::filesystem::path& directory) {
  const std::filesystem::path name = directory / ".lock";
  for (int i = 0; i < kTries; ++i) {
    file_ = CreateFileW(name.c_str(), GENERIC_WRITE, 0, nullptr, OPEN_ALWAYS,
                        FILE_ATTRIBUTE_NORMAL | FILE_FLAG_DELETE_ON_CLOSE, nullptr);
    if (file_ != INVALID_HANDLE_VALUE) return;
    const DWORD error = GetLastError();  // access is denied while the file is being deleted
    if (error != ERROR_SHARING_VIOLATION && error != ERROR_ACCESS_DENIED) return;
    std::this_thread::sleep_for(kPause);
  }
  held_ = false;
}

DirectoryLock::~DirectoryLock() {
  if (file_ != INVALID_HANDLE_VALUE) CloseHandle(file_);
}

#else

DirectoryLock::DirectoryLock(const std::filesystem::path& directory)
    : file_(open(directory.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (file_ < 0) return;
  for (int i = 0; i < kTries; ++i) {
    if (flock(file_, LOCK_EX | LOCK_NB) == 0) return;
    if (errno != EWOULDBLOCK && errno != EINTR) return;
    std::this_thread::sleep_for(kPause);
  }
  held_ = false;
}

DirectoryLock::~DirectoryLock() {
  if (file_ < 0) return;
  if (held_) flock(file_, LOCK_UN);  // a child of fork() may have the file open
  close(file_);
}

#endif

}  // namespace h2o
