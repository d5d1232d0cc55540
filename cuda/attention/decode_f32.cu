// Decode attention with keys and values in F32.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Whole<F32Row>>(const Stream&, const Decode&, const KvView&,
                                           const DeviceBatch&);
template void decode_splits<Rolled<F32Row>>(const Stream&, const Decode&, const KvView&,
                                            const DeviceBatch&);
}  // namespace h2o::cuda
