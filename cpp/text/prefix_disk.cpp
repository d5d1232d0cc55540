#include "text/prefix_disk.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <fstream>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "core/process.h"
#include "io/directory_lock.h"
#include "io/utf8_path.h"
#include "kv/serialized_sequence.h"
#include "model/snapshot.h"

namespace h2o {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic{"h2o pfx\0", 8};
constexpr uint32_t kVersion = 3;
constexpr std::string_view kSuffix = ".prefix";
constexpr std::string_view kUnfinished = ".tmp";
constexpr size_t kPreamble = 8 + sizeof(uint32_t) + 3 * sizeof(uint64_t);  // before the head
constexpr uint64_t kMaxHead = uint64_t{1} << 26;
constexpr auto kAbandoned = std::chrono::hours(1);  // temporary files older than this are deleted

std::vector<std::byte> written(const PrefixHead& head) {
  ByteWriter writer;
  writer.put(head.kind);
  writer.put(uint64_t{head.policies.size()});
  for (const KvPolicy& policy : head.policies) write_policy(policy, writer);
  writer.put(uint64_t{head.tokens.size()});
  writer.put(std::span<const int32_t>(head.tokens));
  writer.put(uint64_t{head.replies.size()});
  for (const auto& [begin, end] : head.replies) {
    writer.put(uint64_t{begin});
    writer.put(uint64_t{end});
  }
  return std::move(writer.bytes());
}

PrefixHead read_head(std::span<const std::byte> bytes) {
  ByteReader reader("the head", bytes);
  PrefixHead head{reader.get<PrefixKind>(), {}, {}, {}};
  const auto n_policies = reader.get<uint64_t>();
  if (n_policies > bytes.size()) throw FormatError("the head ends too early");
  for (uint64_t i = 0; i < n_policies; ++i) head.policies.push_back(read_policy(reader));
  head.tokens = reader.get<int32_t>(reader.get<uint64_t>());
  const auto n_replies = reader.get<uint64_t>();
  if (n_replies > bytes.size()) throw FormatError("the head ends too early");
  for (uint64_t i = 0; i < n_replies; ++i) {
    const auto begin = static_cast<size_t>(reader.get<uint64_t>());
    head.replies.push_back({begin, static_cast<size_t>(reader.get<uint64_t>())});
  }
  if (reader.left() != 0) throw FormatError("the head is too long");
  return head;
}

std::vector<std::byte> read(std::istream& file, uint64_t n) {
  std::vector<std::byte> bytes(n);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(n))) {
    throw FormatError("it ends too early");
  }
  return bytes;
}

// The head, before the snapshot; nullopt if of another scope. Throws FormatError.
std::optional<PrefixHead> read_head(std::istream& file, uint64_t scope) {
  const std::vector<std::byte> preamble = read(file, kPreamble);
  ByteReader reader("it", preamble);
  const std::span<const std::byte> magic = reader.take(kMagic.size());
  if (!std::ranges::equal(magic, std::as_bytes(std::span(kMagic)))) {
    throw FormatError("it is no state of a prompt");
  }
  if (const auto version = reader.get<uint32_t>(); version != kVersion) {
    throw FormatError(concat("its version is ", version, ", expected ", kVersion));
  }
  if (reader.get<uint64_t>() != scope) return std::nullopt;
  const auto sum = reader.get<uint64_t>();
  const auto size = reader.get<uint64_t>();
  if (size > kMaxHead) throw FormatError("its head is too long");
  const std::vector<std::byte> head = read(file, size);
  if (checksum(head) != sum) throw FormatError("its head is damaged");
  return read_head(head);
}

std::string hex(uint64_t value) {
  std::string digits(16, '0');
  std::array<char, 16> some;
  const auto end = std::to_chars(some.data(), some.data() + some.size(), value, 16).ptr;
  std::copy_backward(some.data(), end, digits.end());
  return digits;
}

bool has_magic(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, kMagic.size()> start{};
  file.read(start.data(), start.size());
  return file && std::ranges::equal(start, kMagic);
}

// Is it a file name of save(): two numbers of 16 digits?
bool is_named(const std::string& name) {
  return name.size() == 33 + kSuffix.size() && name.ends_with(kSuffix) && name[16] == '-' &&
         name.find_first_not_of("0123456789abcdef-") == 33;
}

}  // namespace

PrefixDisk::PrefixDisk(PrefixDiskOptions options, uint64_t scope)
    : options_(std::move(options)), scope_(scope), process_(process_id()) {
  std::error_code error, ignored;
  if (fs::create_directories(options_.directory, error)) {  // prompts are private
    fs::permissions(options_.directory, fs::perms::owner_all, ignored);
  }
  if (!fs::is_directory(options_.directory, ignored)) {
    throw FileError(error ? error.value() : ENOTDIR, utf8(options_.directory));
  }
  scan();
}

void PrefixDisk::scan() {
  struct Found {
    bool damaged;
    fs::file_time_type used;
    File file;
  };
  std::map<fs::path, File> known;
  for (File& file : std::exchange(files_, {})) known.emplace(file.path, std::move(file));
  bytes_ = 0;
  std::vector<Found> found;
  std::error_code error;
  for (fs::directory_iterator it(options_.directory, error), end; !error && it != end;
       it.increment(error)) {
    const fs::path& path = it->path();
    const std::string name = utf8(path.filename());
    std::error_code gone;  // another process may have removed it
    const auto used = fs::last_write_time(path, gone);
    const uint64_t bytes = fs::file_size(path, gone);
    if (gone) continue;
    if (const size_t at = name.find(kUnfinished);
        at != std::string::npos && is_named(name.substr(0, at))) {
      if (fs::file_time_type::clock::now() - used > kAbandoned) {
        fs::remove(path, gone);
      } else {
        bytes_ += bytes;
      }
      continue;
    }
    if (!is_named(name)) continue;
    if (const auto same = known.find(path); same != known.end() && same->second.bytes == bytes) {
      found.push_back({same->second.damaged, used, std::move(same->second)});
      continue;
    }
    std::optional<PrefixHead> head;
    try {
      std::ifstream file(path, std::ios::binary);
      head = read_head(file, scope_);
    } catch (const std::exception& problem) {
      if (!fs::exists(path, gone)) continue;
      const bool foreign = !has_magic(path);  // not written here
      if (!foreign || foreign_.insert(path).second) say(path, problem.what());
      if (foreign) continue;
    }
    found.push_back({false, used, {path, bytes, std::move(head)}});
  }
  std::ranges::stable_sort(found, [](const Found& a, const Found& b) {
    return std::pair(a.damaged, b.used) < std::pair(b.damaged, a.used);
  });
  for (Found& one : found) {
    bytes_ += one.file.bytes;
    files_.push_back(std::move(one.file));
  }
}

bool PrefixDisk::reserve(const fs::path& unfinished, uint64_t bytes) {
  const DirectoryLock lock(options_.directory);
  if (!lock.held()) return false;
  scan();
  while (bytes_ + bytes > options_.max_bytes) {
    if (files_.empty()) return false;  // others are writing
    std::error_code ignored;
    fs::remove(files_.back().path, ignored);
    bytes_ -= files_.back().bytes;
    files_.pop_back();
  }
  std::error_code error;
  const bool created = std::ofstream(unfinished, std::ios::binary).is_open();
  if (created) fs::resize_file(unfinished, bytes, error);
  if (!created || error) throw std::runtime_error("it cannot be written");
  return true;
}

std::optional<PrefixEntry> PrefixDisk::find(std::span<const int32_t> prompt,
                                            std::span<const KvPolicy> policies, size_t n_least,
                                            std::span<const TokenSpan> replies) noexcept {
  while (true) {
    auto best = files_.end();
    size_t n_best = n_least;
    for (auto it = files_.begin(); it != files_.end(); ++it) {
      const size_t n = it->head ? it->head->usable(prompt, policies, replies) : 0;
      if (n <= n_best) continue;
      best = it;
      n_best = n;
    }
    if (best == files_.end()) return std::nullopt;
    try {
      std::ifstream file(best->path, std::ios::binary);
      if (read_head(file, scope_) != best->head) throw FormatError("it has changed");
      const std::vector<std::byte> size = read(file, sizeof(uint64_t));
      const auto n = ByteReader("it", size).get<uint64_t>();
      if (n > best->bytes) throw FormatError("it ends too early");
      PrefixEntry entry{*best->head, read(file, n)};
      // Throws if it is damaged.
      if (open_snapshot(entry.state).text.tokens != entry.head.tokens) {
        throw FormatError("its state has other tokens");
      }
      use(best);
      return entry;
    } catch (const std::bad_alloc&) {  // the file is not to blame
      return std::nullopt;
    } catch (const std::exception& problem) {
      std::error_code unknown;
      if (fs::exists(best->path, unknown) || unknown) {
        ignore(best, problem.what());
      } else {  // another process has removed it
        drop(fs::path(best->path));
      }
    }
  }
}

std::list<PrefixDisk::File>::iterator PrefixDisk::find(const PrefixHead& head) {
  return std::ranges::find_if(files_, [&](const File& file) { return file.head == head; });
}

bool PrefixDisk::has(const PrefixHead& head) const {
  return std::ranges::any_of(
      files_, [&](const File& file) { return file.head && file.head->covers(head); });
}

size_t PrefixDisk::common(std::span<const int32_t> prompt,
                          std::span<const KvPolicy> policies) const {
  size_t most = 0;
  for (const File& file : files_) {
    if (!file.head || !file.head->has_policies(policies)) continue;
    most = std::max(most, common_prefix(file.head->tokens, prompt));
  }
  return most;
}

void PrefixDisk::use(std::list<File>::iterator file) {
  std::error_code ignored;
  fs::last_write_time(file->path, fs::file_time_type::clock::now(), ignored);
  files_.splice(files_.begin(), files_, file);
}

void PrefixDisk::save(const PrefixEntry& entry) noexcept {
  if (process_id() != process_) return;
  fs::path unfinished;
  try {
    if (const auto there = find(entry.head); there != files_.end()) {
      if (fs::exists(there->path)) return use(there);
      files_.erase(there);  // another process has removed it
    }
    const std::vector<std::byte> head = written(entry.head);
    ByteWriter writer;
    writer.put(std::span(kMagic));
    writer.put(kVersion);
    writer.put(scope_);
    writer.put(checksum(head));
    writer.put(uint64_t{head.size()});
    writer.put(std::span<const std::byte>(head));
    writer.put(uint64_t{entry.state.size()});
    const uint64_t bytes = writer.bytes().size() + entry.state.size();
    if (bytes > options_.max_bytes) return;
    const std::string name = hex(scope_) + "-" + hex(checksum(head)) + std::string(kSuffix);
    const fs::path path = options_.directory / name;
    unfinished = options_.directory / concat(name, kUnfinished, process_id(), "-", &files_);
    if (!reserve(unfinished, bytes)) return;
    {
      std::fstream file(unfinished, std::ios::in | std::ios::out | std::ios::binary);
      for (const std::span<const std::byte> part :
           {std::span<const std::byte>(writer.bytes()), std::span<const std::byte>(entry.state)}) {
        file.write(reinterpret_cast<const char*>(part.data()),
                   static_cast<std::streamsize>(part.size()));
      }
      file.close();
      if (!file) throw std::runtime_error("it cannot be written");
    }
    fs::rename(unfinished, path);
    drop(path);
    files_.push_front({path, bytes, entry.head});
    bytes_ += bytes;
  } catch (const std::exception& problem) {
    say(unfinished, problem.what());
    std::error_code ignored;
    if (!unfinished.empty()) fs::remove(unfinished, ignored);
  }
}

void PrefixDisk::forget(const PrefixHead& head, const std::string& why) noexcept {
  const auto file = find(head);
  if (file != files_.end()) ignore(file, why);
}

// It still counts towards the size, and is evicted first.
void PrefixDisk::ignore(std::list<File>::iterator file, const std::string& why) noexcept {
  say(file->path, why);
  file->head.reset();
  file->damaged = true;
  files_.splice(files_.end(), files_, file);
}

// The file was replaced.
void PrefixDisk::drop(const fs::path& path) {
  const auto file = std::ranges::find(files_, path, &File::path);
  if (file == files_.end()) return;
  bytes_ -= file->bytes;
  files_.erase(file);
}

void PrefixDisk::say(const fs::path& path, const std::string& what) noexcept {
  try {
    if (options_.log) options_.log(concat("prefix cache: ", utf8(path), " is ignored: ", what));
  } catch (const std::exception&) {  // a failing log callback is ignored
  }
}

}  // namespace h2o
