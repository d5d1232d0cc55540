// Model and Session on top of the add-on; the types are in index.d.ts.
'use strict';

const addon = require(process.env.H2O_ADDON ?? './build/h2o.node');

const POSITIONS = { auto: 0, original: 1, rolling: 2 };

class Model {
  #handle;
  #opened = Promise.resolve(); // the last session: a handle takes one call at a time

  constructor(handle) {
    this.#handle = handle;
    this.info = Object.freeze(addon.describe(handle));
  }

  static async open(path, options) {
    return new Model(await addon.load(path, options));
  }

  async session(options) {
    let native = options;
    if (options?.positions !== undefined) {
      const positions = POSITIONS[options.positions];
      if (positions === undefined) {
        throw new TypeError(`positions: got ${options.positions}, expected auto, original or rolling`);
      }
      native = { ...options, positions };
    }
    const opening = this.#opened.then(() => addon.open(this.#handle, native));
    this.#opened = opening.catch(() => {});
    const session = new Session(await opening);
    if (options?.sampling !== undefined) session.setSampling(options.sampling);
    return session;
  }

  tokenize(text) {
    return addon.tokenize(this.#handle, text);
  }

  close() {
    addon.closeModel(this.#handle);
  }
}

class Session {
  #handle;
  #running; // the promise of the active stream

  constructor(handle) {
    this.#handle = handle;
  }

  // The library's thread fills a queue, which the caller's loop drains.
  async *stream(prompt, options) {
    const signal = options?.signal;
    signal?.throwIfAborted();
    const queue = [];
    let wake = () => {};
    let ended = false;
    const running = addon.stream(this.#handle, prompt, options, (piece) => {
      queue.push(piece);
      wake();
    });
    const done = running.finally(() => {
      ended = true;
      wake();
    });
    done.catch(() => {}); // awaited below
    this.#running = done;
    const cancel = () => addon.cancel(this.#handle);
    signal?.addEventListener('abort', cancel);
    try {
      while (true) {
        while (queue.length > 0) yield queue.shift();
        if (ended) break;
        await new Promise((resolve) => (wake = resolve));
      }
      const generation = await done;
      signal?.throwIfAborted();
      return generation;
    } finally {
      signal?.removeEventListener('abort', cancel);
      if (!ended) {
        cancel(); // the loop was left early
        await done.catch(() => {});
      }
      this.#running = undefined;
    }
  }

  async generate(prompt, options) {
    let text = '';
    for await (const piece of this.stream(prompt, options)) text += piece;
    return text;
  }

  cancel() {
    if (this.#running !== undefined) addon.cancel(this.#handle);
  }

  setSampling(options) {
    addon.setSampling(this.#handle, options);
  }

  stats() {
    return addon.stats(this.#handle);
  }

  kept(layer, head) {
    return addon.kept(this.#handle, layer, head);
  }

  reset() {
    addon.reset(this.#handle);
  }

  async close() {
    this.cancel();
    await this.#running?.catch(() => {});
    addon.closeSession(this.#handle);
  }
}

module.exports = { Model, Session };
