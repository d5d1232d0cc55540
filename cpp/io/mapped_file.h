// A whole file in memory, read-only: mapped, not read, so it costs no more RAM than is touched.
// The file must not shrink while it is mapped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace h2o {

class MappedFile {
 public:
  // Throws FileError where the operating system refuses the file, or where it is no regular file.
  explicit MappedFile(const std::filesystem::path& path);

  // Bytes that are in memory already and must outlive it, as a file of this name.
  MappedFile(std::string name, std::span<const std::byte> bytes)
      : path_(std::move(name)), bytes_(bytes) {}

  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }  // UTF-8 on Windows

  // Reads a part of a mapping into memory now, where the system can, rather than page by page when
  // touched.
  static void populate(std::span<const std::byte> part);

  // Has a part read into the system's cache, where the system can, and does not wait for it.
  static void prefetch(std::span<const std::byte> part);

  // Lets go of the pages that lie in a part: they are read again when touched. Of the pages at its
  // ends others may have a share, and they stay.
  static bool can_release();
  static void release(std::span<const std::byte> part);

 private:
  std::string path_;
  std::span<const std::byte> bytes_;  // empty for an empty file, which cannot be mapped
  bool mapped_ = false;               // to be unmapped
};

}  // namespace h2o
