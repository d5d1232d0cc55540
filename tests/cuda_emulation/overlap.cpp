#include "overlap.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>

namespace h2o::cuda::emulation {
namespace {

constexpr uint32_t kUnknown = 0xffffffff;
constexpr size_t kPage = 1024;  // words compared at a time

// Comparing memory takes half of the time, and chains are similar: only the first chains of a
// process are checked, and later one in 8, or in 32 with H2O_TEST_BRIEF.
constexpr int kFirstChains = 100;
const int kChainsForOne = std::getenv("H2O_TEST_BRIEF") != nullptr ? 32 : 8;
int n_chains = 0;

constexpr int kFirstBlocks = 8;  // early ones of a function, which are checked for any write
std::map<const void*, int> n_blocks;

// Calls found(begin, end) for each range of words that differ.
template <class Found>
void each_difference(const Memory& a, const std::vector<uint32_t>& b, const Found& found) {
  for (size_t page = 0; page < a.size(); page += kPage) {
    const size_t end = std::min(page + kPage, a.size());
    if (std::equal(a.begin() + page, a.begin() + end, b.begin() + page)) continue;
    for (size_t i = page; i < end; ++i) {
      const size_t begin = i;
      while (i < end && a[i] != b[i]) ++i;
      if (i > begin) found(begin, i);
    }
  }
}

}  // namespace

void Chain::check_next() { n_chains = 0; }

void Chain::begin_kernel(const void* function, const std::vector<Memory>& device) {
  function_ = function;
  device_ = device;
  changed_.clear();
  if (!begun_) {
    begun_ = true;
    before_.clear();
    if (++n_chains > kFirstChains && n_chains % kChainsForOne != 0) return;
    before_.resize(device.size());
    for (size_t i = 0; i < device.size(); ++i) {
      before_[i].memory = device[i];
      before_[i].content.assign(device[i].begin(), device[i].end());
    }
    return;
  }
  for (const auto& [memory, content] : before_) {
    each_difference(memory, content, [&](size_t begin, size_t end) {
      changed_.push_back({memory.subspan(begin, end - begin), {}});
    });
  }
}

void Chain::hide() {
  for (auto& [memory, content] : changed_) {
    content.assign(memory.begin(), memory.end());
    std::ranges::fill(memory, kUnknown);
  }
  watches_ = function_ == nullptr || n_blocks[function_]++ < kFirstBlocks;
  if (watches_) begin_watch(device_);
}

void Chain::show() {
  bool written = watches_ && end_watch();
  for (const auto& [memory, content] : changed_) {
    written |= std::ranges::any_of(memory, [](uint32_t word) { return word != kUnknown; });
    std::ranges::copy(content, memory.begin());
  }
  if (written)
    throw std::logic_error("a kernel writes before it has waited for the preceding kernels");
}

}  // namespace h2o::cuda::emulation
