// map() and unmap() are the only functions that differ between operating systems.
#include "io/mapped_file.h"

#include <cerrno>
#include <utility>

#include "core/error.h"
#include "io/utf8_path.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/descriptor.h"
#endif

namespace h2o {
namespace {

using Bytes = std::span<const std::byte>;

#ifdef _WIN32

struct Handle {
  HANDLE value;
  ~Handle() {
    if (value != nullptr && value != INVALID_HANDLE_VALUE) CloseHandle(value);
  }
};

[[noreturn]] void fail(const std::filesystem::path& path) {
  switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND:
      throw FileError(ENOENT, utf8(path));
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION:
      throw FileError(EACCES, utf8(path));
    default:
      throw FileError(EIO, utf8(path));
  }
}

Bytes map(const std::filesystem::path& path) {
  // Windows reports "access denied" for a directory.
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw FileError(EISDIR, utf8(path));

  const Handle file{CreateFileW(path.c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING,
                                FILE_ATTRIBUTE_NORMAL, nullptr)};
  if (file.value == INVALID_HANDLE_VALUE) fail(path);
  LARGE_INTEGER size;
  if (!GetFileSizeEx(file.value, &size)) fail(path);
  if (size.QuadPart == 0) return {};

  // The view keeps the file open; neither handle is needed after it.
  const Handle mapping{CreateFileMappingW(file.value, nullptr, PAGE_READONLY, 0, 0, nullptr)};
  if (mapping.value == nullptr) fail(path);
  const void* data = MapViewOfFile(mapping.value, FILE_MAP_READ, 0, 0, 0);
  if (data == nullptr) fail(path);
  return {static_cast<const std::byte*>(data), static_cast<size_t>(size.QuadPart)};
}

void populate_pages(Bytes) {}
void prefetch_pages(Bytes) {}
constexpr bool kReleases = false;
void release_pages(Bytes) {}

void unmap(Bytes bytes) {
  if (!bytes.empty()) UnmapViewOfFile(bytes.data());
}

#else

Bytes map(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a named pipe must not wait for a writer. No effect on regular files.
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.value < 0) throw FileError(errno, utf8(path));
  struct stat status;
  if (fstat(file.value, &status) != 0) throw FileError(errno, utf8(path));
  if (S_ISDIR(status.st_mode)) throw FileError(EISDIR, utf8(path));
  if (!S_ISREG(status.st_mode)) throw FormatError(concat(utf8(path), ": not a regular file"));
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return {};

  // The mapping keeps the file open; the descriptor is not needed after it.
  const void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.value, 0);
  if (data == MAP_FAILED) throw FileError(errno, utf8(path));
  return {static_cast<const std::byte*>(data), size};
}

// Rounds down to the start of a page.
std::byte* page_before(const std::byte* address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(address) / page * page);
}
std::byte* page_after(const std::byte* address) {
  return page_before(address + sysconf(_SC_PAGESIZE) - 1);
}

void populate_pages([[maybe_unused]] Bytes bytes) {
#ifdef MADV_POPULATE_READ  // Linux 5.14; without it pages are only read when touched
  std::byte* begin = page_before(bytes.data());
  madvise(begin, static_cast<size_t>(bytes.data() + bytes.size() - begin), MADV_POPULATE_READ);
#endif
}

void prefetch_pages(Bytes bytes) {
  std::byte* begin = page_before(bytes.data());
  madvise(begin, static_cast<size_t>(bytes.data() + bytes.size() - begin), MADV_WILLNEED);
}

constexpr bool kReleases = true;

void release_pages(Bytes bytes) {
  std::byte* begin = page_after(bytes.data());
  std::byte* end = page_before(bytes.data() + bytes.size());
  if (begin < end) madvise(begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

void unmap(Bytes bytes) {
  if (!bytes.empty()) munmap(const_cast<std::byte*>(bytes.data()), bytes.size());
}

#endif

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path)
    : path_(utf8(path)), bytes_(map(path)), mapped_(true) {}

MappedFile::~MappedFile() {
  if (mapped_) unmap(bytes_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      mapped_(std::exchange(other.mapped_, false)) {}

void MappedFile::populate(std::span<const std::byte> part) {
  if (!part.empty()) populate_pages(part);
}

void MappedFile::prefetch(std::span<const std::byte> part) {
  if (!part.empty()) prefetch_pages(part);
}

bool MappedFile::can_release() { return kReleases; }

void MappedFile::release(std::span<const std::byte> part) {
  if (!part.empty()) release_pages(part);
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace h2o
