#include "core/dtype.h"

#include <algorithm>
#include <array>

#include "core/blocks.h"

namespace h2o {
namespace {

struct Row {
  uint32_t id;
  DTypeInfo info;
};

// GGUF tensor types: id, name, elements and bytes of a block.
constexpr std::array kRows = {
    Row{0, {"F32", 1, 4}},         Row{1, {"F16", 1, 2}},         Row{2, {"Q4_0", 32, 18}},
    Row{3, {"Q4_1", 32, 20}},      Row{6, {"Q5_0", 32, 22}},      Row{7, {"Q5_1", 32, 24}},
    Row{8, {"Q8_0", 32, 34}},      Row{9, {"Q8_1", 32, 36}},      Row{10, {"Q2_K", 256, 84}},
    Row{11, {"Q3_K", 256, 110}},   Row{12, {"Q4_K", 256, 144}},   Row{13, {"Q5_K", 256, 176}},
    Row{14, {"Q6_K", 256, 210}},   Row{15, {"Q8_K", 256, 292}},   Row{16, {"IQ2_XXS", 256, 66}},
    Row{17, {"IQ2_XS", 256, 74}},  Row{18, {"IQ3_XXS", 256, 98}}, Row{19, {"IQ1_S", 256, 50}},
    Row{20, {"IQ4_NL", 32, 18}},   Row{21, {"IQ3_S", 256, 110}},  Row{22, {"IQ2_S", 256, 82}},
    Row{23, {"IQ4_XS", 256, 136}}, Row{24, {"I8", 1, 1}},         Row{25, {"I16", 1, 2}},
    Row{26, {"I32", 1, 4}},        Row{27, {"I64", 1, 8}},        Row{28, {"F64", 1, 8}},
    Row{29, {"IQ1_M", 256, 56}},   Row{30, {"BF16", 1, 2}},       Row{34, {"TQ1_0", 256, 54}},
    Row{35, {"TQ2_0", 256, 66}},   Row{39, {"MXFP4", 32, 17}},    Row{40, {"NVFP4", 64, 36}},
    Row{41, {"Q1_0", 128, 18}},    Row{42, {"Q2_0", 64, 18}},
};

// Indexed by type id; unused ids have an empty name.
constexpr auto kTypes = [] {
  std::array<DTypeInfo, kRows.back().id + 1> types;
  for (const Row& row : kRows) types[row.id] = row.info;
  return types;
}();

// Layouts from DType::q2 on.
constexpr std::array kArchiveTypes = {
    DTypeInfo{"Q2", 64, sizeof(BlockQ2)},
    DTypeInfo{"Q3", 32, sizeof(BlockQ3)},
};

constexpr std::array kComputable = {
    DType::f32,     DType::f16,   DType::bf16,   DType::q4_0,    DType::q4_1,   DType::q5_0,
    DType::q5_1,    DType::q8_0,  DType::q2_k,   DType::q3_k,    DType::q4_k,   DType::q5_k,
    DType::q6_k,    DType::iq1_s, DType::iq1_m,  DType::iq2_xxs, DType::iq2_xs, DType::iq2_s,
    DType::iq3_xxs, DType::iq3_s, DType::iq4_nl, DType::iq4_xs,  DType::tq1_0,  DType::tq2_0,
    DType::mxfp4,   DType::nvfp4, DType::q1_0,   DType::q2_0,
};

}  // namespace

const DTypeInfo* find_dtype(uint32_t id) {
  return id < kTypes.size() && !kTypes[id].name.empty() ? &kTypes[id] : nullptr;
}

const DTypeInfo& info(DType dtype) {
  const auto id = static_cast<uint32_t>(dtype);
  const auto first = static_cast<uint32_t>(DType::q2);
  return id < first ? kTypes[id] : kArchiveTypes[id - first];
}

int64_t interleaved_block_bytes(DType dtype) {
  switch (dtype) {
    case DType::iq1_s:
    case DType::iq2_xxs:
    case DType::iq3_xxs:
    case DType::iq3_s:
      return sizeof(BlockNibbles<32>);
    case DType::iq1_m:
    case DType::iq2_xs:
    case DType::iq2_s:
      return sizeof(BlockNibbles<16>);
    case DType::tq1_0:
      return sizeof(BlockTQ2_0);
    case DType::nvfp4:
      return sizeof(BlockNvfp4Halves);
    default:
      return info(dtype).block_bytes;
  }
}

std::span<const DType> computable_dtypes() { return kComputable; }

bool is_computable(uint32_t id) {
  return std::ranges::find(kComputable, static_cast<DType>(id)) != kComputable.end();
}

std::string dtype_names(std::span<const DType> dtypes) {
  std::string names;
  for (DType dtype : dtypes) {
    if (!names.empty()) names += ", ";
    names += info(dtype).name;
  }
  return names;
}

std::optional<DType> find_dtype(std::string_view name, std::span<const DType> dtypes) {
  for (const DType dtype : dtypes) {
    if (name == info(dtype).name) return dtype;
  }
  return std::nullopt;
}

}  // namespace h2o
