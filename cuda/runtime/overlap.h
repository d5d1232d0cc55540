// Launches that begin before the kernel ahead has ended: programmatic dependent launch.
#pragma once

namespace h2o::cuda {

// Whether kernels of this build wait for those ahead of them, on the current device: they do if
// they were compiled for compute capability 9.0 or later. The driver may have compiled them for the
// device from code that was not, and then nothing in them waits. Throws DeviceError if this build
// has no kernels for the device.
bool kernels_can_overlap();

}  // namespace h2o::cuda
