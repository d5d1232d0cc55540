// The parts of the extension module, one function each.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "kv/cache.h"
#include "model/session.h"

namespace h2o::python {

void register_dtype(pybind11::module_& m);
void register_engine(pybind11::module_& m);
void register_gguf(pybind11::module_& m);
void register_kv_cache(pybind11::module_& m);
void register_machine(pybind11::module_& m);
void register_mailbox(pybind11::module_& m);
void register_policy(pybind11::module_& m);
void register_quantize(pybind11::module_& m);
void register_sampler(pybind11::module_& m);
void register_session(pybind11::module_& m);
void register_tokenizer(pybind11::module_& m);
void register_trace(pybind11::module_& m);

// Parses "original", "rolling" or "auto". Throws InvalidArgument.
Positions positions_named(const std::string& name);

// n_recalled: pages that each query recalls; 0: the default; nullopt: no archive. directory: of the
// archive's files; empty: in memory. Throws InvalidArgument.
ArchiveOptions archive_options(std::optional<int32_t> n_recalled, int32_t n_ctx,
                               const std::string& k_dtype, const std::string& v_dtype,
                               const std::filesystem::path& directory);

// Text of a file. Bytes that are not UTF-8 become lone surrogates (PEP 383).
pybind11::str decoded(std::string_view text);

// (positions, scores) as numpy arrays.
pybind11::tuple kept_arrays(const std::vector<KvEntry>& entries);

}  // namespace h2o::python
