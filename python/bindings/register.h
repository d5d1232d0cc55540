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
#include "kv/names.h"
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

// Text of a file. Bytes that are not UTF-8 become lone surrogates (PEP 383).
pybind11::str decoded(std::string_view text);

// (positions, scores) as numpy arrays.
pybind11::tuple kept_arrays(const std::vector<KvEntry>& entries);

}  // namespace h2o::python
