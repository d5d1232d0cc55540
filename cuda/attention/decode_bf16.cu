// Decode attention with keys and values in BF16.
#include "cuda/attention/decode_splits.cuh"

namespace h2o::cuda {
template void decode_splits<Whole<BF16Row>>(const Stream&, const Decode&, const KvView&,
                                            const DeviceBatch&);
template void decode_splits<Rolled<BF16Row>>(const Stream&, const Decode&, const KvView&,
                                             const DeviceBatch&);
}  // namespace h2o::cuda
