// DirectoryLock: while it exists, no other one of this directory does, in any process.
#pragma once

#include <filesystem>

namespace h2o {

class DirectoryLock {
 public:
  // Waits for others for up to a second. Where the system has no such locks, it excludes nobody.
  explicit DirectoryLock(const std::filesystem::path& directory);
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  ~DirectoryLock();

  // False if others did not end in time.
  bool held() const { return held_; }

 private:
  bool held_ = true;
#ifdef _WIN32
  void* file_;
#else
  int file_;  // the directory; negative: it could not be opened
#endif
};

}  // namespace h2o
