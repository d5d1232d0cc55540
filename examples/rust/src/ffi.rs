//! The part of h2o.h that this package uses. Structures may be truncated: `size` tells the library
//! to use defaults for the rest. None ends with padding, which would count as set.
use std::ffi::c_char;

pub enum Model {}
pub enum Engine {}
pub enum Request {}

#[repr(C)]
pub struct ModelOptions {
    pub size: usize,
    pub device: *const c_char,
    pub n_threads: i32,
    pub reserved: i32,
}

#[repr(C)]
pub struct SessionOptions {
    pub size: usize,
    pub hh: f64,
    pub recent: f64,
    pub n_sinks: i32,
    pub n_ctx: i32,
    pub n_batch: i32,
    pub positions: i32,
}

/// The state of an engine: active and queued streams, context and cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineInfo {
    pub(crate) size: usize,
    pub n_sequences: i32,
    pub n_active: i32,
    pub n_waiting: i32,
    pub n_ctx: i32,
    pub cache_bytes: u64,
}

#[repr(C)]
pub struct Sampling {
    pub size: usize,
    pub temperature: f32,
    pub top_k: i32,
    pub top_p: f32,
    pub min_p: f32,
    pub repeat_penalty: f32,
    pub repeat_last_n: i32,
    pub seeded: i32,
    pub seed: u64,
}

#[repr(C)]
pub struct StreamOptions {
    pub size: usize,
    pub max_tokens: i32,
    pub ignore_end: i32,
    pub parse_special: i32,
    pub n_stop: usize,
    pub stop: *const *const c_char,
}

#[repr(C)]
pub struct RequestOptions {
    pub size: usize,
    pub sampling: *const Sampling,
    pub limits: *const StreamOptions,
}

/// Token counts and times of a stream.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Generation {
    pub(crate) size: usize,
    pub(crate) finish: i32,
    pub n_prompt: i32,
    pub n_generated: i32,
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
}

pub const ABI_VERSION: u32 = 1;

extern "C" {
    pub fn h2o_abi_version() -> u32;
    pub fn h2o_model_load(
        path: *const c_char,
        options: *const ModelOptions,
        model: *mut *mut Model,
    ) -> i32;
    pub fn h2o_model_free(model: *mut Model) -> i32;
    pub fn h2o_model_error(model: *const Model) -> *const c_char;
    pub fn h2o_engine_open(
        model: *mut Model,
        options: *const SessionOptions,
        max_sequences: i32,
        engine: *mut *mut Engine,
    ) -> i32;
    pub fn h2o_engine_free(engine: *mut Engine) -> i32;
    pub fn h2o_engine_error(engine: *const Engine) -> *const c_char;
    pub fn h2o_engine_describe(engine: *mut Engine, info: *mut EngineInfo) -> i32;
    pub fn h2o_engine_submit(
        engine: *mut Engine,
        prompt: *const c_char,
        n_bytes: usize,
        options: *const RequestOptions,
        request: *mut *mut Request,
    ) -> i32;
    pub fn h2o_request_next(
        request: *mut Request,
        piece: *mut *const c_char,
        n_bytes: *mut usize,
    ) -> i32;
    pub fn h2o_request_free(request: *mut Request) -> i32;
    pub fn h2o_request_error(request: *const Request) -> *const c_char;
    pub fn h2o_request_result(request: *mut Request, generation: *mut Generation) -> i32;
    pub fn h2o_status_text(status: i32) -> *const c_char;
}
