// PrefixDisk: prefix states in files of a directory, which survive restarts. Least recently used
// files are removed above a size limit, which processes that share the directory respect together:
// one at a time, they look at all files, remove some, and reserve the size of their own.
//
// File format: "h2o pfx\0", version u32, scope u64, checksum of the head u64, the head (u64 size),
// the snapshot (u64 size), which has its own checksum. Files are written under a temporary name and
// renamed. The scope identifies everything else that the bits of a state depend on: the model,
// types, context, chunk size and kernels.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <list>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "text/prefix_entry.h"

namespace h2o {

struct PrefixDiskOptions {
  static constexpr uint64_t kDefaultBytes = uint64_t{4} << 30;

  std::filesystem::path directory = {};  // created if missing; empty = disabled
  uint64_t max_bytes = kDefaultBytes;    // limit for all such files in it, of any scope
  std::string build = {};  // id of this library build: others may compute different bits

  // Receives a one-line message about each invalid file, which is ignored.
  std::function<void(const std::string&)> log = {};
};

class PrefixDisk {
 public:
  // Reads the heads of existing files. Throws FileError if the directory cannot be used.
  PrefixDisk(PrefixDiskOptions options, uint64_t scope);

  // The validated state that covers the most tokens of a prompt, if more than n_least.
  std::optional<PrefixEntry> find(std::span<const int32_t> prompt,
                                  std::span<const KvPolicy> policies, size_t n_least,
                                  std::span<const TokenSpan> replies = {}) noexcept;

  bool has(const PrefixHead& head) const;

  // The longest common prefix of a prompt with any state.
  size_t common(std::span<const int32_t> prompt, std::span<const KvPolicy> policies) const;

  // Evicts the least recently used files. A state that cannot be written is dropped.
  void save(const PrefixEntry& entry) noexcept;

  // Ignores a state that turned out to be unusable.
  void forget(const PrefixHead& head, const std::string& why) noexcept;

 private:
  struct File {
    std::filesystem::path path;
    uint64_t bytes;
    std::optional<PrefixHead> head;  // none if unusable here: only counts towards the size
    bool damaged = false;            // evicted first
  };

  // Updates the files to those in the directory; reads the heads of new ones.
  void scan();
  // Removes files until there is room, and creates one of this size. False if there is no room.
  bool reserve(const std::filesystem::path& unfinished, uint64_t bytes);
  void use(std::list<File>::iterator file);
  void ignore(std::list<File>::iterator file, const std::string& why) noexcept;
  void drop(const std::filesystem::path& path);
  void say(const std::filesystem::path& path, const std::string& what) noexcept;
  std::list<File>::iterator find(const PrefixHead& head);

  PrefixDiskOptions options_;
  uint64_t scope_;
  int64_t process_;                          // a forked child does not write
  std::list<File> files_;                    // most recently used first
  uint64_t bytes_ = 0;                       // of these and of unfinished files at the last scan
  std::set<std::filesystem::path> foreign_;  // named like them, but no states
};

}  // namespace h2o
