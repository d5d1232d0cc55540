#include "io/scratch_file.h"

#include "core/error.h"
#include "io/utf8_path.h"

#ifndef _WIN32
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "io/descriptor.h"
#endif

namespace h2o {

#ifdef _WIN32

Buffer map_scratch_file(const std::filesystem::path& directory, size_t) {
  throw InvalidArgument(concat("a scratch file in ", utf8(directory), ": not on Windows"));
}

#else

namespace {

constexpr size_t kHeader = 4096;  // bytes before the data; stores the size of the mapping

// Returns an errno, or 0. Without reserved disk space, writing a page while the disk is full would
// kill the process (SIGBUS).
int reserve(int file, size_t bytes) {
#ifdef __APPLE__
  fstore_t all = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, static_cast<off_t>(bytes), 0};
  const bool done = fcntl(file, F_PREALLOCATE, &all) == 0 && ftruncate(file, all.fst_length) == 0;
  return done ? 0 : errno;
#else
  return posix_fallocate(file, 0, static_cast<off_t>(bytes));
#endif
}

}  // namespace

Buffer map_scratch_file(const std::filesystem::path& directory, size_t bytes) {
  if (bytes == 0) return {};
  std::string name = (directory / "h2o-scratch-XXXXXX").string();
  const Descriptor file{mkstemp(name.data())};
  if (file.value < 0) throw FileError(errno, utf8(directory));
  unlink(name.c_str());
  const size_t size = kHeader + bytes;
  if (const int error = reserve(file.value, size); error != 0) {
    throw OutOfMemory(concat("cannot reserve ", bytes, " bytes in ", utf8(directory), ": ",
                             std::strerror(error)));
  }
  void* const mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.value, 0);
  if (mapping == MAP_FAILED) {
    throw OutOfMemory(concat("cannot map ", bytes, " bytes in ", utf8(directory)));
  }
  std::memcpy(mapping, &size, sizeof(size));
  return {static_cast<std::byte*>(mapping) + kHeader, bytes, [](void* data, void*) noexcept {
            void* const start = static_cast<std::byte*>(data) - kHeader;
            size_t mapped;
            std::memcpy(&mapped, start, sizeof(mapped));
            munmap(start, mapped);
          }};
}

#endif

}  // namespace h2o
