// Decode attention with keys and values of any type.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Single>(const Stream&, const Decode&, const KvView&, const DeviceBatch&,
                                    int32_t);
}  // namespace h2o::cuda
