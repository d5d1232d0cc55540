// Decode attention with keys and values in Q4_0.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Whole<Q4_0Row>>(const Stream&, const Decode&, const KvView&,
                                            const DeviceBatch&);
template void decode_splits<Rolled<Q4_0Row>>(const Stream&, const Decode&, const KvView&,
                                             const DeviceBatch&);
}  // namespace h2o::cuda
