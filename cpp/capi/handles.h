// The handles of h2o.h.
#pragma once

#include <memory>

#include "capi/handle.h"
#include "capi/text_session.h"

struct h2o_model : h2o::capi::Handle {
  std::shared_ptr<h2o::capi::TextModel> model;  // none if it could not be loaded
};

struct h2o_session : h2o::capi::Handle {
  std::unique_ptr<h2o::capi::TextSession> session;  // none if it could not be opened
};

namespace h2o::capi {

// Runs `body` with the model or the session of a handle, as Handle::call does.
template <class Body>
h2o_status call(h2o_model* handle, Body body) noexcept {
  if (handle == nullptr) return H2O_INVALID_ARGUMENT;
  return handle->call(Access::change, [&] {
    require(handle->model != nullptr, "this model could not be loaded");
    body(*handle->model);
  });
}
template <class Body>
h2o_status call(h2o_session* handle, Access access, Body body) noexcept {
  if (handle == nullptr) return H2O_INVALID_ARGUMENT;
  return handle->call(access, [&] {
    require(handle->session != nullptr, "this session could not be opened");
    body(*handle->session);
  });
}

// What h2o_model_free and h2o_session_free do.
template <class H>
h2o_status free_handle(H* handle) noexcept {
  if (handle != nullptr && !handle->retire()) return H2O_BUSY;
  delete handle;
  return H2O_OK;
}

}  // namespace h2o::capi
