// Decode attention with keys and values in Q8_0.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Whole<Q8_0Row>>(const Stream&, const Decode&, const KvView&,
                                            const DeviceBatch&);
template void decode_splits<Rolled<Q8_0Row>>(const Stream&, const Decode&, const KvView&,
                                             const DeviceBatch&);
}  // namespace h2o::cuda
