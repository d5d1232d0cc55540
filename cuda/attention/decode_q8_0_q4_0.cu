// Decode attention with keys in Q8_0 and values in Q4_0.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Whole<Q8_0Row, Q4_0Row>>(const Stream&, const Decode&, const KvView&,
                                                     const DeviceBatch&);
template void decode_splits<Rolled<Q8_0Row, Q4_0Row>>(const Stream&, const Decode&, const KvView&,
                                                      const DeviceBatch&);
}  // namespace h2o::cuda
