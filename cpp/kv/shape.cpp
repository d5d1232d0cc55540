#include "kv/shape.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace h2o {
namespace {

// Those of the cache, and last what only an archive has.
constexpr std::array kArchiveKDtypes = {DType::f32,  DType::f16,  DType::bf16, DType::q8_0,
                                        DType::q5_0, DType::q4_0, DType::q3};
constexpr std::array kArchiveVDtypes = {DType::f32,  DType::f16,  DType::bf16, DType::q8_0,
                                        DType::q5_0, DType::q4_0, DType::q2};

void validate_dtype(DType dtype, std::span<const DType> dtypes, int32_t head_dim) {
  require(std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end(), "type ", info(dtype).name,
          " is not one of ", dtype_names(dtypes));
  require(head_dim % info(dtype).block_size == 0, "head_dim is ", head_dim,
          ", expected a multiple of ", info(dtype).block_size, " for type ", info(dtype).name);
}

}  // namespace

std::span<const DType> kv_dtypes() { return std::span(kArchiveKDtypes).first<6>(); }
std::span<const DType> archive_k_dtypes() { return kArchiveKDtypes; }
std::span<const DType> archive_v_dtypes() { return kArchiveVDtypes; }

void validate(const KvShape& shape) {
  require(shape.n_layers >= 0 && shape.n_sequences > 0 && shape.n_heads > 0 &&
              shape.n_kv_heads > 0 && shape.head_dim > 0,
          "layers ", shape.n_layers, ", sequences ", shape.n_sequences, ", heads ", shape.n_heads,
          ", kv_heads ", shape.n_kv_heads, ", head_dim ", shape.head_dim,
          ": all but layers must be positive");
  require(shape.layer_heads.empty() || std::ssize(shape.layer_heads) == shape.n_layers, "heads of ",
          shape.layer_heads.size(), " layers, expected ", shape.n_layers);
  for (int32_t l = 0; l < (shape.layer_heads.empty() ? 1 : shape.n_layers); ++l) {
    const auto [n, dim] = shape.heads(l);
    require(n > 0 && n <= shape.n_kv_heads && dim > 0 && dim <= shape.head_dim, "layer ", l,
            " has ", n, " kv_heads of ", dim, ", expected 1 to ", shape.n_kv_heads, " of at most ",
            shape.head_dim);
    require(shape.n_heads % n == 0, shape.n_heads, " heads cannot share ", n, " kv_heads evenly");
    validate_dtype(shape.k_dtype, kv_dtypes(), dim);
    validate_dtype(shape.v_dtype, kv_dtypes(), dim);
  }
  require(shape.max_tokens > 0, "max_tokens is ", shape.max_tokens, ", expected 1 or more");
  require(shape.max_rows > 0, "max_rows is ", shape.max_rows, ", expected 1 or more");
  require(!shape.shared_values || shape.k_dtype == shape.v_dtype, "keys in ",
          info(shape.k_dtype).name, ", values in ", info(shape.v_dtype).name,
          ": expected the same type, as the cache holds one latent vector for both");
  if (shape.archive.n_recalled != 0) {
    require(!shape.shared_values,
            "latent vectors instead of keys and values do not support an archive");
    require(shape.layer_heads.empty(),
            "heads whose size differs between layers do not support an archive");
    require(shape.archive.n_recalled > 0, "archive_pages is ", shape.archive.n_recalled,
            ", expected 1 or more");
    require(!shape.may_roll(), "an archive does not support rolling positions");
    validate_dtype(shape.archive.k_dtype, kArchiveKDtypes, shape.head_dim);
    validate_dtype(shape.archive.v_dtype, kArchiveVDtypes, shape.head_dim);
    for (const int32_t head : shape.archive.heads) {
      require(head >= 0 && head < int64_t{shape.n_layers} * shape.n_kv_heads, "archived head ",
              head, ", expected 0 to less than ", int64_t{shape.n_layers} * shape.n_kv_heads);
    }
  }
  require(shape.sources.empty() || std::ssize(shape.sources) == shape.n_layers, "sources of ",
          shape.sources.size(), " layers, expected ", shape.n_layers);
  for (int32_t l = 0; l < std::ssize(shape.sources); ++l) {
    const int32_t source = shape.sources[l];
    require(source >= 0 && source <= l && shape.sources[source] == source, "layer ", l,
            " reads the cache of layer ", source, ", expected itself or one before with its own");
    const KvHeads mine = shape.heads(l), its = shape.heads(source);
    require(mine.n == its.n && mine.dim == its.dim && shape.attends(l), "layer ", l,
            " reads the cache of layer ", source, ", which has other heads");
  }
  if (!shape.sources.empty()) {
    require(shape.archive.n_recalled == 0, "layers that share a cache do not support an archive");
    require(!shape.may_roll(), "layers that share a cache do not support rolling positions");
    require(shape.max_drafts == 0, "layers that share a cache do not support drafts");
  }
  require(shape.state_floats.empty() || std::ssize(shape.state_floats) == shape.n_layers,
          "states of ", shape.state_floats.size(), " layers, expected ", shape.n_layers);
  require(shape.attention_layers.empty() || std::ssize(shape.attention_layers) == shape.n_layers,
          "attention in ", shape.attention_layers.size(), " layers, expected ", shape.n_layers);
  double floats = 0;  // of a sequence's states
  for (const int64_t n : shape.state_floats) {
    require(n >= 0, "a state of ", n, " floats, expected 0 or more");
    floats += static_cast<double>(n);
  }
  // Larger byte counts could overflow: up to 16 bytes per element, in a workspace for each of up to
  // 1024 threads. No machine has that much memory.
  const double elements =
      shape.n_sequences * (floats + 1.0 * shape.n_layers * shape.n_heads *
                                        (1.0 * shape.max_tokens + shape.max_rows) * shape.head_dim);
  if (elements > 1e15) {
    throw OutOfMemory(concat(elements, " elements do not fit in memory"));
  }
}

}  // namespace h2o
