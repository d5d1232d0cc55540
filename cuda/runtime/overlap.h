// Support for programmatic dependent launch.
#pragma once

namespace h2o::cuda {

// True if kernels of this build wait for preceding ones on the current device: if they were
// compiled for compute capability 9.0 or later. Kernels that the driver compiled from older PTX do
// not wait. Throws DeviceError if this build has no kernels for the device.
bool kernels_can_overlap();

}  // namespace h2o::cuda
