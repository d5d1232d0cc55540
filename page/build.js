// Builds the page into the Python package: `npm ci && npm run build`.
// `npm run check` builds it elsewhere and compares the bytes.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const shipped = resolve(here, "../python/h2o_cpp/serve/static");
const isCheck = process.argv.includes("--check");

// Every browser that runs the page reads woff2.
const woff2Only = {
  name: "woff2-only",
  setup({ onLoad }) {
    onLoad({ filter: /katex\.css$/ }, ({ path }) => ({
      loader: "css",
      contents: readFileSync(path, "utf-8").replaceAll(/, *url\([^)]*\.(woff|ttf)\) *format\("[^"]*"\)/g, ""),
    }));
  },
};

async function write(folder) {
  const { metafile } = await build({
    absWorkingDir: here,
    entryPoints: ["src/page.js", "src/page.css", "src/formulas.css"],
    outdir: folder,
    bundle: true,
    splitting: true,
    format: "esm",
    target: ["chrome123", "firefox121", "safari17.5"],
    minify: true,
    charset: "utf8",
    legalComments: "none",
    chunkNames: "[name]-[hash]",
    assetNames: "fonts/[name]",
    loader: { ".woff2": "file" },
    plugins: [woff2Only],
    metafile: true,
  });
  // Browsers may keep files of an older version; the hashes in the addresses rule that out.
  const html = readFileSync(join(here, "src/index.html"), "utf-8").replaceAll(/static\/page\.(js|css)/g,
    (path) => `${path}?${hash(readFileSync(join(folder, path.slice("static/".length))))}`);
  writeFileSync(join(folder, "index.html"), html);
  writeFileSync(join(folder, "licenses.txt"), licenses(Object.keys(metafile.inputs)));
}

const hash = (bytes) => createHash("sha256").update(bytes).digest("hex").slice(0, 12);

// The license of each package that is in the bundle.
function licenses(inputs) {
  const found = inputs.map((path) => path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1]);
  const names = [...new Set(found.filter(Boolean))].sort();
  return names.map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf-8"));
    const file = readdirSync(folder).filter((one) => /^licen[cs]e/i.test(one)).sort()[0];
    const text = file ? readFileSync(join(folder, file), "utf-8").trim() : `License: ${license}`;
    return `${name} ${version} (${license})\n\n${text}\n`;
  }).join(`\n${"-".repeat(80)}\n\n`);
}

function files(folder) {
  const all = readdirSync(folder, { recursive: true, withFileTypes: true }).filter((one) => one.isFile());
  return new Map(all.map((one) => join(one.parentPath ?? one.path, one.name))
    .map((path) => [path.slice(folder.length), readFileSync(path)]));
}

if (isCheck) {
  const folder = mkdtempSync(join(tmpdir(), "page-"));
  try {
    await write(folder);
    const [built, old] = [files(folder), files(shipped)];
    const names = [...new Set([...built.keys(), ...old.keys()])];
    const wrong = names.filter((name) => !built.get(name)?.equals(old.get(name) ?? Buffer.alloc(0)));
    if (wrong.length) {
      console.error(`npm run build makes other files than those in ${shipped}: ${wrong.join(", ")}`);
      process.exitCode = 1;
    }
  } finally {
    rmSync(folder, { recursive: true });
  }
} else {
  rmSync(shipped, { recursive: true, force: true });
  await write(shipped);
}
