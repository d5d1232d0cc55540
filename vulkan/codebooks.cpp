#include "vulkan/codebooks.h"

#include <span>

#include "core/iq_grids.h"
#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

std::span<const std::byte> table_of(DType dtype) {
  const auto bytes = [](const auto& table) { return std::as_bytes(std::span(table.entries)); };
  switch (dtype) {
    case DType::iq1_s:
    case DType::iq1_m:
      return bytes(kIq1Grid);
    case DType::iq2_xxs:
      return bytes(kIq2XxsGrid);
    case DType::iq2_xs:
      return bytes(kIq2XsGrid);
    case DType::iq2_s:
      return bytes(kIq2SGrid);
    case DType::iq3_xxs:
      return bytes(kIq3XxsGrid);
    case DType::iq3_s:
      return bytes(kIq3SGrid);
    default:
      return {};
  }
}

}  // namespace

void Codebooks::require(Backend& backend, DType dtype) {
  const std::span<const std::byte> table = table_of(dtype);
  if (table.empty() || tables_.contains(dtype)) return;
  Buffer buffer = backend.allocate(table.size());
  backend.write(buffer.data(), table.data(), table.size());
  tables_.emplace(dtype, std::move(buffer));
}

uint64_t Codebooks::of(DType dtype) const {
  const auto found = tables_.find(dtype);
  return found == tables_.end() ? 0 : address_of(found->second.data());
}

}  // namespace h2o::vulkan
