//! Tests of the wrapper, with the bundled model or $H2O_MODEL.
use h2o::{Engine, EngineOptions, ErrorKind, Finish, Model, ModelOptions, Request};
use std::thread;

const PROMPT: &str = "The old man";

fn model() -> Model {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-opt.gguf");
    let path = std::env::var("H2O_MODEL").unwrap_or(bundled.into());
    Model::open(&path, &ModelOptions { device: Some("cpu".into()), threads: 1 }).unwrap()
}

fn engine(sequences: i32) -> Engine {
    model().engine(&EngineOptions { hh: 20.0, sequences, ..Default::default() }).unwrap()
}

fn greedy(max_tokens: i32) -> Request {
    Request { temperature: 0.0, ignore_end: true, max_tokens, ..Default::default() }
}

fn text(engine: &Engine, request: &Request) -> String {
    engine.stream(PROMPT, request).unwrap().map(Result::unwrap).collect()
}

#[test]
fn pieces_join_to_the_output() {
    let engine = engine(1);
    let mut stream = engine.stream(PROMPT, &greedy(30)).unwrap();
    let pieces: Vec<_> = stream.by_ref().map(Result::unwrap).collect();
    assert!(pieces.len() > 5 && pieces.iter().all(|piece| !piece.is_empty()));
    assert!(stream.next().is_none());
    let done = stream.generation().unwrap();
    assert_eq!((done.finish(), done.n_generated), (Some(Finish::Length), 30));
    assert!(done.n_prompt > 1);
    assert_eq!(pieces.concat(), text(&engine, &greedy(30)));
}

#[test]
fn threads_stream_concurrently() {
    let engine = engine(2);
    let alone = text(&engine, &greedy(20));
    thread::scope(|scope| {
        let others = [0; 3].map(|_| scope.spawn(|| text(&engine, &greedy(20))));
        for other in others {
            assert_eq!(other.join().unwrap(), alone);
        }
    });
    let mut stream = engine.stream(PROMPT, &greedy(20)).unwrap();
    let moved = thread::spawn(move || stream.by_ref().map(Result::unwrap).collect::<String>());
    assert_eq!(moved.join().unwrap(), alone);
}

#[test]
fn dropping_cancels() {
    let engine = engine(1);
    let mut endless = engine.stream(PROMPT, &greedy(-1)).unwrap();
    assert!(endless.next().unwrap().is_ok());
    assert_eq!(endless.generation().unwrap().finish(), None);
    assert_eq!(engine.info().unwrap().n_active, 1);
    drop(endless);
    assert_eq!(engine.info().unwrap().n_active, 0);
    assert!(!text(&engine, &greedy(5)).is_empty());
}

#[test]
fn dropping_the_engine_cancels_its_streams() {
    let engine = engine(1);
    let mut stream = engine.stream(PROMPT, &greedy(-1)).unwrap();
    assert!(stream.next().unwrap().is_ok());
    drop(engine);
    stream.by_ref().for_each(drop);
    assert_eq!(stream.generation().unwrap().finish(), Some(Finish::Cancelled));
}

#[test]
fn seeds_and_stop_strings() {
    let engine = engine(1);
    let request = Request { seed: Some(7), temperature: 1.0, ..greedy(30) };
    let whole = text(&engine, &request);
    assert_eq!(text(&engine, &request), whole);
    assert_ne!(text(&engine, &Request { seed: Some(8), ..request.clone() }), whole);
    let stop: String = whole.chars().skip(10).take(4).collect();
    let stopped = Request { stop: vec![stop.clone()], ..request };
    let mut stream = engine.stream(PROMPT, &stopped).unwrap();
    let ended: String = stream.by_ref().map(Result::unwrap).collect();
    assert_eq!(Some(ended.as_str()), whole.split(&stop).next());
    assert_eq!(stream.generation().unwrap().finish(), Some(Finish::Stop));
}

#[test]
fn errors_have_a_kind_and_a_message() {
    let error_of = |path: &str| Model::open(path, &Default::default()).unwrap_err();
    let missing = error_of("nowhere.gguf");
    assert_eq!(missing.kind, ErrorKind::CannotOpen);
    assert!(missing.to_string().contains("nowhere.gguf"), "{missing}");
    let damaged = error_of(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    assert_eq!(damaged.kind, ErrorKind::BadFormat);
    assert_eq!(error_of("a\0b").kind, ErrorKind::InvalidArgument);
    let invalid = model().engine(&EngineOptions { hh: -1.0, ..Default::default() }).unwrap_err();
    assert_eq!(invalid.kind, ErrorKind::InvalidArgument);
    assert!(!invalid.message.is_empty());
    let invalid = engine(1).stream(PROMPT, &greedy(-2)).unwrap_err();
    assert_eq!(invalid.kind, ErrorKind::InvalidArgument);
}
