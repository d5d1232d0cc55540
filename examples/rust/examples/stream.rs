//! cargo run --example stream MODEL.gguf "The old man": streams the continuation of a prompt.
use h2o::{EngineOptions, Error, Model, Request};
use std::io::{stdout, Write};

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(prompt)) = (args.next(), args.next()) else {
        eprintln!("usage: stream MODEL.gguf PROMPT");
        std::process::exit(2);
    };
    if let Err(error) = stream(&path, &prompt) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn stream(path: &str, prompt: &str) -> Result<(), Error> {
    let model = Model::open(path, &Default::default())?;
    let engine = model.engine(&EngineOptions { hh: 0.2, ..Default::default() })?;
    let mut stream = engine.stream(prompt, &Request { max_tokens: 100, ..Default::default() })?;
    print!("{prompt}");
    for piece in &mut stream {
        print!("{}", piece?);
        stdout().flush().expect("stdout can be written");
    }
    let done = stream.generation()?;
    let cache = engine.info()?.cache_bytes as f64 / (1 << 20) as f64;
    eprintln!("\n{} tokens, {cache:.1} MiB of cache", done.n_generated);
    Ok(())
}
