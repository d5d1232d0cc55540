// The box to write in, and files that go along.

import { $, bytes, el, iconButton } from "./dom.js";

const MOST = 6 * 2 ** 20; // bytes of a file, of the 8 MiB that a server takes by default

let attached = []; // files: their name and text
let failed = () => {};

export function begin({ send, typed, error }) {
  const box = $("say");
  failed = error;
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  box.addEventListener("input", () => {
    fit();
    typed(box.value);
  });
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    await attach($("file").files);
    $("file").value = "";
  });
  box.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) attach(event.clipboardData.files);
  });
  takeDrops();
}

function takeDrops() {
  let depth = 0; // dragenter comes for every element
  const has = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (change) => {
    depth = Math.max(0, change === 0 ? 0 : depth + change);
    document.body.classList.toggle("dropping", depth > 0);
  };
  addEventListener("dragenter", (event) => has(event) && mark(1));
  addEventListener("dragleave", (event) => has(event) && mark(-1));
  addEventListener("dragover", (event) => has(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!has(event)) return;
    event.preventDefault();
    mark(0);
    attach(event.dataTransfer.files);
  });
}

// The height follows the text.
export function fit() {
  const box = $("say");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}

export function setText(text) {
  $("say").value = text;
  fit();
}

export const files = () => attached;

export function setFiles(files) {
  attached = files;
  $("attached").hidden = !files.length;
  $("attached").replaceChildren(...files.map((file) => el("li", {}, `${file.name}, ${bytes(file.text.length)}`,
    iconButton("close", `Remove ${file.name}`, () => setFiles(attached.filter((one) => one !== file))))));
}

// What is sent: the text, then each file.
export const withFiles = (text, some) =>
  [text, ...some.map((file) => `${file.name}:\n\`\`\`\n${file.text}\n\`\`\``)].join("\n\n");

async function attach(some) {
  failed("");
  for (const file of some) {
    if (file.size > MOST) {
      failed(`${file.name} is too large: at most ${bytes(MOST)} of text can be attached.`);
      continue;
    }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      setFiles([...attached, { name: file.name, text }]);
    } catch {
      failed(`${file.name} is not text.`);
    }
  }
  $("say").focus();
}
