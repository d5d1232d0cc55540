'use strict';

const assert = require('node:assert');
const path = require('node:path');
const { test } = require('node:test');
const { spawnSync } = require('node:child_process');
const { Model } = require('.');

const MODEL = process.env.H2O_MODEL ?? path.join(__dirname, '../../models/tiny-opt.gguf');
const PROMPT = 'The old man';
const greedy = { temperature: 0 };

async function open(options = {}) {
  const model = await Model.open(MODEL, { device: 'cpu', threads: 1 });
  return model.session({ hh: 20, sampling: greedy, ...options });
}

test('pieces join to the output, and the generation has the expected result', async () => {
  const session = await open();
  const pieces = [];
  const stream = session.stream(PROMPT, { maxTokens: 30, ignoreEnd: true });
  let next;
  while (!(next = await stream.next()).done) pieces.push(next.value);
  assert.equal(next.value.finish, 'length');
  assert.equal(next.value.generatedTokens, 30);
  assert.ok(pieces.length > 5);
  const other = await open();
  assert.equal(await other.generate(PROMPT, { maxTokens: 30, ignoreEnd: true }), pieces.join(''));
  const stats = session.stats();
  assert.equal(stats.kept, 20);
  assert.ok(stats.evicted > 0 && stats.cacheBytes < stats.fullCacheBytes);
  const { positions, scores } = session.kept(0, 0);
  assert.equal(positions.length, 20);
  assert.equal(scores.length, 20);
});

test('leaving the loop cancels the stream, and the session can continue', async () => {
  const session = await open();
  for await (const piece of session.stream(PROMPT, { maxTokens: -1, ignoreEnd: true })) {
    assert.ok(piece.length > 0);
    assert.throws(() => session.stats(), { code: 'H2O_BUSY' });
    break;
  }
  const n = session.stats().tokens;
  assert.equal(typeof (await session.generate('', { maxTokens: 3, ignoreEnd: true })), 'string');
  assert.equal(session.stats().tokens, n + 3);
});

test('a stream that has ended when it is left does not end the next one', async () => {
  const session = await open();
  const isBusy = () => {
    try {
      return session.stats() === undefined;
    } catch {
      return true;
    }
  };
  for await (const _ of session.stream(PROMPT, { maxTokens: 1, ignoreEnd: true })) {
    while (isBusy()) {} // the end has not reached this thread
    break;
  }
  assert.notEqual(await session.generate('', { maxTokens: 3, ignoreEnd: true }), '');
});

test('an AbortSignal cancels a stream, during it and before it', async () => {
  const session = await open();
  const controller = new AbortController();
  const options = { maxTokens: -1, ignoreEnd: true, signal: controller.signal };
  await assert.rejects(async () => {
    for await (const _ of session.stream(PROMPT, options)) controller.abort();
  }, { name: 'AbortError' });
  await assert.rejects(session.generate(PROMPT, options), { name: 'AbortError' });
  await session.close();
});

test('two sessions stream concurrently; one session has one stream at a time', async () => {
  const model = await Model.open(MODEL, { device: 'cpu', threads: 1 });
  const sessions = await Promise.all([1, 2].map(() => model.session({ sampling: greedy })));
  model.close();
  const options = { maxTokens: 20, ignoreEnd: true };
  const texts = await Promise.all(sessions.map((session) => session.generate(PROMPT, options)));
  assert.equal(texts[0], texts[1]);
  const first = sessions[0].stream('', options);
  await first.next();
  await assert.rejects(sessions[0].generate('', options), { code: 'H2O_BUSY' });
  await first.return();
});

test('a seed reproduces an output; a stop string ends it', async () => {
  const sampling = { temperature: 1, seed: 7 };
  const options = { maxTokens: 30, ignoreEnd: true };
  const [a, b] = [await open({ sampling }), await open({ sampling })];
  const text = await a.generate(PROMPT, options);
  assert.equal(await b.generate(PROMPT, options), text);
  a.reset();
  a.setSampling(sampling);
  const stop = text.slice(10, 14);
  assert.equal(await a.generate(PROMPT, { ...options, stop: [stop] }), text.split(stop)[0]);
});

test('errors have a message and a code', async () => {
  await assert.rejects(Model.open('nowhere.gguf'), { code: 'H2O_CANNOT_OPEN', message: /nowhere/ });
  await assert.rejects(Model.open(__filename), { code: 'H2O_BAD_FORMAT' });
  await assert.rejects(Model.open(7), { name: 'TypeError', message: /path: expected a string/ });
  const model = await Model.open(MODEL, { device: 'cpu' });
  assert.equal(model.info.architecture, 'opt');
  assert.ok(model.tokenize(PROMPT).length > 1);
  await assert.rejects(model.session({ hh: -1 }), { code: 'H2O_INVALID_ARGUMENT' });
  await assert.rejects(model.session({ context: 1.5 }), /context: expected a 32-bit integer/);
  await assert.rejects(model.session({ positions: 'other' }), /positions: got other/);
  const session = await model.session();
  await assert.rejects(session.generate(PROMPT, { stop: 'x' }), /stop: expected an array/);
  for (const seed of [-1, 1.5, 2 ** 54]) {
    assert.throws(() => session.setSampling({ seed }), /seed: expected an integer from 0 to 2\^53/);
  }
  await session.close();
  await session.close();
  assert.throws(() => session.stats(), { code: 'H2O_CLOSED' });
  model.close();
  model.close();
  await assert.rejects(model.session(), { code: 'H2O_CLOSED' });
});

test('a process may exit during a stream', () => {
  const script = `const { Model } = require('.');
    Model.open(${JSON.stringify(MODEL)}, { device: 'cpu' }).then(async (model) => {
      const session = await model.session({ hh: 20 });
      for await (const _ of session.stream('The', { maxTokens: -1, ignoreEnd: true })) process.exit(3);
    });`;
  const { status, signal } = spawnSync(process.execPath, ['-e', script], { cwd: __dirname });
  assert.deepEqual([status, signal], [3, null]);
});
