#pragma once

#include <cstddef>
#include <filesystem>

#include "core/buffer.h"

namespace h2o {

// Zeros in a file without a name in `directory`: when memory is short the system moves them there,
// and back when they are touched. The file has its whole size on the disk from the start, and ends
// with the Buffer. Throws FileError (the directory), OutOfMemory (no room there), InvalidArgument
// (Windows).
Buffer map_scratch_file(const std::filesystem::path& directory, size_t bytes);

}  // namespace h2o
