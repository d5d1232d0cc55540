// MappedFile: a read-only memory-mapped file. The file must not shrink while it is mapped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace h2o {

class MappedFile {
 public:
  // Throws FileError if the file cannot be opened, FormatError if it is not a regular file.
  explicit MappedFile(const std::filesystem::path& path);

  // In-memory bytes presented as a file of this name; they must outlive this object.
  MappedFile(std::string name, std::span<const std::byte> bytes)
      : path_(std::move(name)), bytes_(bytes) {}

  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }  // UTF-8 on Windows

  // Reads a range of a mapping into memory now, where the system supports it, instead of on page
  // faults.
  static void populate(std::span<const std::byte> part);

  // Starts reading a range into the page cache, where the system supports it, without waiting.
  static void prefetch(std::span<const std::byte> part);

  // Releases the pages that lie entirely inside a range; they are read again when touched.
  static bool can_release();
  static void release(std::span<const std::byte> part);

 private:
  std::string path_;
  std::span<const std::byte> bytes_;  // empty for an empty file, which cannot be mapped
  bool mapped_ = false;               // must be unmapped
};

}  // namespace h2o
