#include "core/dtype.h"

#include <array>

namespace h2o {
namespace {

struct Row {
  uint32_t id;
  DTypeInfo info;
};

// GGUF tensor types: id, name, elements and bytes of a block.
constexpr std::array kTypes = {
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
    Row{41, {"Q1_0", 128, 18}},
};

}  // namespace

const DTypeInfo* find_dtype(uint32_t id) {
  for (const Row& row : kTypes) {
    if (row.id == id) return &row.info;
  }
  return nullptr;
}

const DTypeInfo& info(DType dtype) { return *find_dtype(static_cast<uint32_t>(dtype)); }

bool is_computable(uint32_t id) {
  switch (static_cast<DType>(id)) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::q8_0:
      return true;
  }
  return false;
}

}  // namespace h2o
