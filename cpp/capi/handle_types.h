// Contents of the handles of h2o.h: a model, a session, an engine or a request.
#pragma once

#include <memory>

#include "capi/handle.h"
#include "capi/text_session.h"

struct h2o_model : h2o::capi::Handle {
  std::shared_ptr<h2o::capi::TextModel> model;  // nullptr if it could not be loaded
};

struct h2o_session : h2o::capi::Handle {
  std::unique_ptr<h2o::capi::TextSession> session;  // nullptr if it could not be opened
};

struct h2o_engine : h2o::capi::Handle {
  std::shared_ptr<h2o::Engine> engine;  // nullptr if it could not be opened
};

struct h2o_request : h2o::capi::Handle {
  std::shared_ptr<h2o::Engine> engine;
  h2o::Engine::Handle generation;  // nullptr if it could not be submitted
  std::string piece;               // returned last
};

namespace h2o::capi {

// The model of a handle, to be shared by a session or an engine.
inline std::shared_ptr<TextModel> shared_model(h2o_model* handle) {
  require(handle != nullptr, "the model is NULL");
  std::shared_ptr<TextModel> shared;
  const h2o_status status = handle->call(Access::change, [&] { shared = handle->model; });
  if (status == H2O_BUSY) throw Failure{H2O_BUSY, "another call is in progress with the model"};
  require(shared != nullptr, "this model could not be loaded");
  return shared;
}

// Calls `body` with the model or the session of a handle; see Handle::call.
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

// h2o_model_free and h2o_session_free.
template <class H>
h2o_status free_handle(H* handle) noexcept {
  if (handle != nullptr && !handle->retire()) return H2O_BUSY;
  delete handle;
  return H2O_OK;
}

}  // namespace h2o::capi
