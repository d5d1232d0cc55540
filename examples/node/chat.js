// node chat.js MODEL.gguf "The old man": streams the continuation; Ctrl-C cancels it.
'use strict';

const { Model } = require('.');

async function main([path, prompt]) {
  const model = await Model.open(path);
  const session = await model.session({ hh: 0.2 });
  const controller = new AbortController();
  process.once('SIGINT', () => controller.abort());
  process.stdout.write(prompt);
  try {
    for await (const piece of session.stream(prompt, { signal: controller.signal })) {
      process.stdout.write(piece);
    }
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
  }
  const { tokens, kept, cacheBytes } = session.stats();
  console.error(`\n${tokens} tokens, ${kept} kept, ${(cacheBytes / 2 ** 20).toFixed(1)} MiB of cache`);
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
