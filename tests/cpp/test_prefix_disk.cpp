// PrefixDisk: unusable directories and files.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/process.h"
#include "text/prefix_disk.h"

namespace h2o {
namespace {

namespace fs = std::filesystem;

PrefixEntry entry_of(int32_t token) {
  return {{PrefixKind::plain, std::vector<int32_t>(40, token), {KvPolicy{}}},
          std::vector<std::byte>(4000)};
}

uint64_t bytes_in(const fs::path& directory) {
  uint64_t bytes = 0;
  for (const fs::directory_entry& file : fs::directory_iterator(directory)) {
    bytes += file.file_size();
  }
  return bytes;
}

TEST_CASE("files that cannot be used count towards the size, are evicted first, and replaced") {
  const fs::path directory = fs::temp_directory_path() / text("h2o_prefix_disk_", process_id());
  const PrefixDiskOptions options{.directory = directory, .max_bytes = 10'000};
  for (int32_t run = 0; run < 4; ++run) {
    {
      PrefixDisk disk(options, 1);
      disk.save(entry_of(run));
      disk.save(entry_of(-1));  // the same in each run
      CHECK(disk.has(entry_of(-1).head));
      CHECK(!disk.find(entry_of(run).head.tokens, entry_of(run).head.policies, 0));  // invalid
      CHECK(!disk.has(entry_of(run).head));
      CHECK(bytes_in(directory) > 8000);
      CHECK(bytes_in(directory) <= options.max_bytes);
    }
    for (const fs::directory_entry& file : fs::directory_iterator(directory)) {
      std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(8);  // the version
      stream.put(static_cast<char>(200));
    }
  }
  fs::remove_all(directory);
}

TEST_CASE("a directory that cannot be used") {
  const fs::path file = fs::temp_directory_path() / text("h2o_prefix_file_", process_id());
  std::ofstream(file) << "a file";
  for (const fs::path& path :
       {file, file / "in_a_file", file.parent_path() / std::string(300, 'x')}) {
    CAPTURE(path.string());
    CHECK_THROWS_AS(PrefixDisk({.directory = path, .max_bytes = 1000}, 1), FileError);
  }
  fs::remove(file);
}

}  // namespace
}  // namespace h2o
