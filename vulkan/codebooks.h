// The tables of weights whose blocks have indices (core/iq_grids.h), in the device's memory.
#pragma once

#include <cstdint>
#include <map>

#include "backend/backend.h"

namespace h2o::vulkan {

class Codebooks {
 public:
  // Makes the table of a type available, if it has one. Throws OutOfMemory.
  void require(Backend& backend, DType dtype);

  // Its device address; 0: none.
  uint64_t of(DType dtype) const;

 private:
  std::map<DType, Buffer> tables_;
};

}  // namespace h2o::vulkan
