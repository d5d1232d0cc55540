// Decode attention with keys and values of any type.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Single>(const Stream&, const Decode&, const KvView&,
                                    const DeviceBatch&);
}  // namespace h2o::cuda
