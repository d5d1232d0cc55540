//! Language models with a bounded, heavy-hitter KV cache: a safe wrapper over libh2o.
//!
//! ```no_run
//! let model = h2o::Model::open("model.gguf", &Default::default())?;
//! let engine = model.engine(&h2o::EngineOptions { hh: 0.2, ..Default::default() })?;
//! for piece in engine.stream("The old man", &Default::default())? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), h2o::Error>(())
//! ```
mod ffi;

pub use ffi::{EngineInfo, Generation};
use std::ffi::{c_char, CStr, CString};
use std::mem::size_of;
use std::{fmt, ptr};

/// The kind of an error, from the status codes of h2o.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    InvalidArgument,
    CannotOpen,
    BadFormat,
    OutOfMemory,
    ContextFull,
    /// The engine of a stream was dropped.
    Cancelled,
    Internal,
}

/// An error of the library, with its message.
#[derive(Clone, Debug)]
pub struct Error {
    pub kind: ErrorKind,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Converts a status; `message` returns the library's error message, a string or NULL.
fn check(status: i32, message: impl FnOnce() -> *const c_char) -> Result<(), Error> {
    let kind = match status {
        0 => return Ok(()),
        1 => ErrorKind::InvalidArgument,
        2 => ErrorKind::CannotOpen,
        3 => ErrorKind::BadFormat,
        4 => ErrorKind::OutOfMemory,
        5 => ErrorKind::ContextFull,
        6 => ErrorKind::Cancelled,
        _ => ErrorKind::Internal,
    };
    // SAFETY: NUL-terminated strings of the library, valid until the next call.
    let message = unsafe {
        let text = message();
        let empty = text.is_null() || *text == 0;
        CStr::from_ptr(if empty { ffi::h2o_status_text(status) } else { text })
    };
    Err(Error { kind, message: message.to_string_lossy().into_owned() })
}

fn c_string(name: &str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error {
        kind: ErrorKind::InvalidArgument,
        message: format!("{name}: got a NUL character, expected none"),
    })
}

/// Device and threads of a model.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    /// "auto" (the default: the CPU), "cpu", "cuda" or "cuda:N".
    pub device: Option<String>,
    /// CPU threads; 0: one per core.
    pub threads: i32,
}

/// A loaded GGUF file. It may be dropped before its engines.
#[derive(Debug)]
pub struct Model(*mut ffi::Model);

// SAFETY: a handle may move to another thread; only one may use it at a time, so it is not Sync.
unsafe impl Send for Model {}

impl Model {
    pub fn open(path: &str, options: &ModelOptions) -> Result<Model, Error> {
        let path = c_string("path", path)?;
        let device = options.device.as_deref().map(|name| c_string("device", name)).transpose()?;
        let given = ffi::ModelOptions {
            size: size_of::<ffi::ModelOptions>(),
            device: device.as_ref().map_or(ptr::null(), |name| name.as_ptr()),
            n_threads: options.threads,
            reserved: 0,
        };
        let mut model = Model(ptr::null_mut());
        // SAFETY: the pointers are valid during the call; Drop frees the handle.
        unsafe {
            assert_eq!(ffi::h2o_abi_version(), ffi::ABI_VERSION, "libh2o has another ABI");
            let status = ffi::h2o_model_load(path.as_ptr(), &given, &mut model.0);
            check(status, || ffi::h2o_model_error(model.0))?;
        }
        Ok(model)
    }

    pub fn engine(&self, options: &EngineOptions) -> Result<Engine, Error> {
        let given = ffi::SessionOptions {
            size: size_of::<ffi::SessionOptions>(),
            hh: options.hh,
            recent: -1.0,
            n_sinks: 0,
            n_ctx: options.context,
            n_batch: 0,
            positions: 0,
        };
        let mut engine = Engine(ptr::null_mut());
        // SAFETY: as in Model::open.
        unsafe {
            let n = options.sequences + i32::from(options.sequences == 0);
            let status = ffi::h2o_engine_open(self.0, &given, n, &mut engine.0);
            check(status, || ffi::h2o_engine_error(engine.0))?;
        }
        Ok(engine)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        unsafe { ffi::h2o_model_free(self.0) };
    }
}

#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Tokens kept per sequence: up to 1 a fraction of the context, from 2 on a number of tokens;
    /// 0: all (full cache).
    pub hh: f64,
    /// Context length in tokens; 0: the trained length, up to 4096.
    pub context: i32,
    /// Streams that are computed concurrently; further ones are queued. 0: one.
    pub sequences: i32,
}

/// Computes streams in batches; can be used from any number of threads.
#[derive(Debug)]
pub struct Engine(*mut ffi::Engine);

// SAFETY: an engine may be called at any time, from any thread.
unsafe impl Send for Engine {}
unsafe impl Sync for Engine {}

impl Engine {
    /// Continues a prompt; generation starts at once, in the engine's threads.
    pub fn stream(&self, prompt: &str, request: &Request) -> Result<Stream, Error> {
        let stop = request.stop.iter().map(|text| c_string("stop", text));
        let stop = stop.collect::<Result<Vec<_>, _>>()?;
        let stop: Vec<_> = stop.iter().map(|text| text.as_ptr()).collect();
        let limits = ffi::StreamOptions {
            size: size_of::<ffi::StreamOptions>(),
            max_tokens: request.max_tokens,
            ignore_end: request.ignore_end.into(),
            parse_special: request.parse_special.into(),
            n_stop: stop.len(),
            stop: stop.as_ptr(),
        };
        let sampling = ffi::Sampling {
            size: size_of::<ffi::Sampling>(),
            temperature: request.temperature,
            top_k: request.top_k,
            top_p: request.top_p,
            min_p: request.min_p,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seeded: request.seed.is_some().into(),
            seed: request.seed.unwrap_or(0),
        };
        let given = ffi::RequestOptions {
            size: size_of::<ffi::RequestOptions>(),
            sampling: &sampling,
            limits: &limits,
        };
        let mut stream = Stream(ptr::null_mut());
        // SAFETY: as in Model::open; the library copies what the options point to.
        unsafe {
            let (text, n) = (prompt.as_ptr().cast(), prompt.len());
            let status = ffi::h2o_engine_submit(self.0, text, n, &given, &mut stream.0);
            check(status, || ffi::h2o_request_error(stream.0))?;
        }
        Ok(stream)
    }

    pub fn info(&self) -> Result<EngineInfo, Error> {
        let mut info = EngineInfo { size: size_of::<EngineInfo>(), ..Default::default() };
        check(unsafe { ffi::h2o_engine_describe(self.0, &mut info) }, ptr::null)?;
        Ok(info)
    }
}

impl Drop for Engine {
    /// Cancels all streams.
    fn drop(&mut self) {
        unsafe { ffi::h2o_engine_free(self.0) };
    }
}

/// Generation and sampling options.
#[derive(Clone, Debug)]
pub struct Request {
    /// 0: up to the end of the context; -1: no limit, where the cache allows it.
    pub max_tokens: i32,
    /// Continue after end-of-text and end-of-turn tokens.
    pub ignore_end: bool,
    /// Parse special tokens in the prompt, such as `</s>`.
    pub parse_special: bool,
    /// Strings that end the output and are not part of it.
    pub stop: Vec<String>,
    /// 0: greedy.
    pub temperature: f32,
    /// 0: no limit.
    pub top_k: i32,
    pub top_p: f32,
    pub min_p: f32,
    /// Seed of the random numbers; None: random.
    pub seed: Option<u64>,
}

impl Default for Request {
    fn default() -> Self {
        Request {
            max_tokens: 0,
            ignore_end: false,
            parse_special: false,
            stop: Vec::new(),
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            seed: None,
        }
    }
}

/// Why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// An error, or the engine was dropped.
    Cancelled,
}

impl Generation {
    /// None: the stream has not ended.
    pub fn finish(&self) -> Option<Finish> {
        match self.finish {
            0 => None,
            1 => Some(Finish::Stop),
            2 => Some(Finish::Length),
            _ => Some(Finish::Cancelled),
        }
    }
}

/// The pieces of an output: whole characters, never empty. `next` blocks until there is one; an
/// error ends the stream. Dropping the stream cancels it after the current step.
#[derive(Debug)]
pub struct Stream(*mut ffi::Request);

// SAFETY: as for Model.
unsafe impl Send for Stream {}

impl Stream {
    /// Token counts, times and finish reason so far.
    pub fn generation(&self) -> Result<Generation, Error> {
        let mut result = Generation { size: size_of::<Generation>(), ..Default::default() };
        let status = unsafe { ffi::h2o_request_result(self.0, &mut result) };
        check(status, || unsafe { ffi::h2o_request_error(self.0) })?;
        Ok(result)
    }
}

impl Iterator for Stream {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut piece, mut n) = (ptr::null(), 0);
        // SAFETY: the piece is valid until the next call with the handle.
        unsafe {
            let status = ffi::h2o_request_next(self.0, &mut piece, &mut n);
            if let Err(error) = check(status, || ffi::h2o_request_error(self.0)) {
                return Some(Err(error));
            }
            if n == 0 {
                return None;
            }
            let bytes = std::slice::from_raw_parts(piece.cast(), n);
            Some(Ok(String::from_utf8_lossy(bytes).into_owned()))
        }
    }
}

impl std::iter::FusedIterator for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        unsafe { ffi::h2o_request_free(self.0) };
    }
}
