// PrefixDisk: states that have left memory, in files of a directory, where they are found again
// after a restart. Those used last stay, as many as fit in some bytes.
//
// A file is "h2o pfx\0", version u32, scope u64, checksum of the head u64, the head (u64 bytes) and
// the snapshot (u64 bytes), which has a checksum of its own. It appears whole, under its own name.
// The scope tells apart what the bits of a state depend on besides its head: the model, types,
// context and chunks, and the kernels.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <list>
#include <optional>
#include <span>
#include <string>

#include "text/prefix_entry.h"

namespace h2o {

struct PrefixDiskOptions {
  std::filesystem::path directory = {};  // made where there is none; empty = nothing is written
  uint64_t max_bytes = 0;                // of all such files in it, whatever their scope
  std::string build = {};                // of this library: another one may compute other bits

  // Told in one line what is wrong with a file, which is then ignored.
  std::function<void(const std::string&)> log = {};
};

class PrefixDisk {
 public:
  // Reads the heads of the files that are there. Throws FileError for a directory that cannot be.
  PrefixDisk(PrefixDiskOptions options, uint64_t scope);

  // The state in which most of a prompt has been read, if that is more than n_least tokens. It is
  // not damaged.
  std::optional<PrefixEntry> find(std::span<const int32_t> prompt,
                                  std::span<const KvPolicy> policies, size_t n_least) noexcept;

  bool has(const PrefixHead& head) const;

  // How many tokens a prompt has in common with what is here, at most.
  size_t common(std::span<const int32_t> prompt, std::span<const KvPolicy> policies) const;

  // Those that were not used for longest make room. A state that cannot be written is dropped.
  void save(const PrefixEntry& entry) noexcept;

  // A state that was found is of no use.
  void forget(const PrefixHead& head, const std::string& why) noexcept;

 private:
  struct File {
    std::filesystem::path path;
    uint64_t bytes;
    std::optional<PrefixHead> head;  // none for another scope: it only takes up room
  };

  void scan();
  void use(std::list<File>::iterator file);
  void say(const std::filesystem::path& path, const std::string& what) noexcept;
  std::list<File>::iterator find(const PrefixHead& head);

  PrefixDiskOptions options_;
  uint64_t scope_;
  int64_t process_;        // that a fork does not write for
  std::list<File> files_;  // the one used last comes first
  uint64_t bytes_ = 0;
};

}  // namespace h2o
