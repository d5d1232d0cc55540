// Decode attention with keys and values in F16.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Whole<F16Row>>(const Stream&, const Decode&, const KvView&,
                                           const DeviceBatch&);
template void decode_splits<Rolled<F16Row>>(const Stream&, const Decode&, const KvView&,
                                            const DeviceBatch&);
}  // namespace h2o::cuda
