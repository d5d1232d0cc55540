// PrefixDisk: unusable directories and files.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/process.h"
#include "io/directory_lock.h"
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
  const fs::path directory = fs::temp_directory_path() / concat("h2o_prefix_disk_", process_id());
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

TEST_CASE("those who share a directory respect its limit together") {
  const fs::path directory = fs::temp_directory_path() / concat("h2o_prefix_shared_", process_id());
  const PrefixDiskOptions options{.directory = directory, .max_bytes = 20'000};  // four states
  std::vector<std::unique_ptr<PrefixDisk>> disks;
  for (uint64_t scope = 0; scope < 3; ++scope) {  // two of one scope, and one of another
    disks.push_back(std::make_unique<PrefixDisk>(options, scope / 2));
  }
  for (int32_t round = 0; round < 20; ++round) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < disks.size(); ++i) {
      threads.emplace_back([&, i] {
        for (int32_t n = 0; n < 3; ++n) {
          disks[i]->save(entry_of(100 * round + 10 * static_cast<int32_t>(i) + n));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(bytes_in(directory) <= options.max_bytes);
    CHECK(bytes_in(directory) > 12'000);
  }

  // A state that another one has removed is written again.
  const PrefixEntry entry = entry_of(7);
  disks[0]->save(entry);
  for (int32_t i = 0; i < 5; ++i) disks[1]->save(entry_of(10'000 + i));
  disks[0]->save(entry);
  CHECK(PrefixDisk(options, 0).has(entry.head));
  fs::remove_all(directory);
}

TEST_CASE("a state that others have no time to make room for is dropped") {
  const fs::path directory = fs::temp_directory_path() / concat("h2o_prefix_busy_", process_id());
  PrefixDisk disk({.directory = directory, .max_bytes = 20'000}, 1);
  {
    const DirectoryLock lock(directory);
    CHECK(lock.held());
    disk.save(entry_of(1));
    CHECK(!disk.has(entry_of(1).head));
  }
  disk.save(entry_of(1));
  CHECK(disk.has(entry_of(1).head));
  fs::remove_all(directory);
}

TEST_CASE("what cannot be read is reported once, and what cannot be written too") {
  const fs::path directory = fs::temp_directory_path() / concat("h2o_prefix_log_", process_id());
  std::vector<std::string> said;
  const auto log = [&](const std::string& line) { said.push_back(line); };
  fs::create_directories(directory);
  std::ofstream(directory / "0123456789abcdef-0123456789abcdef.prefix") << "of somebody else";
  PrefixDisk disk({.directory = directory, .max_bytes = 10'000, .log = log}, 1);
  for (int32_t i = 0; i < 3; ++i) disk.save(entry_of(i));
  CHECK(disk.has(entry_of(2).head));
  REQUIRE(said.size() == 1);
  CHECK(said[0].ends_with("is ignored: it ends too early"));
  CHECK(fs::exists(directory / "0123456789abcdef-0123456789abcdef.prefix"));
  fs::remove_all(directory);
  disk.save(entry_of(5));
  REQUIRE(said.size() == 2);
  CHECK(said[1].ends_with("is ignored: it cannot be written"));
}

TEST_CASE("a directory that cannot be used") {
  const fs::path file = fs::temp_directory_path() / concat("h2o_prefix_file_", process_id());
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
