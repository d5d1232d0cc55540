#pragma once

#include <cstddef>
#include <filesystem>

#include "core/buffer.h"

namespace h2o {

// Zeroed memory backed by an unnamed file in `directory`, so that the system can write it out under
// memory pressure. Disk space is reserved up front and released with the Buffer. Throws FileError
// (directory), OutOfMemory (disk full), InvalidArgument (Windows).
Buffer map_scratch_file(const std::filesystem::path& directory, size_t bytes);

}  // namespace h2o
