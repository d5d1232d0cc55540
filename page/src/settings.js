// Settings that stay in this browser.

const KEY = "h2o.settings";

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? {};
  } catch { // no storage, or not JSON
    return {};
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch { // storage is full or forbidden: it lasts until the page is closed
  }
}

export const settings = { system: "", temperature: 0.8, tools: "", key: "", theme: "", budget: "", ...read(KEY) };

export function set(name, value) {
  settings[name] = value;
  write(KEY, settings);
}

// Text that was typed and not sent, by conversation. Another tab may have written some since.
const DRAFTS = "h2o.drafts";

export const draft = (id) => read(DRAFTS)[id] ?? "";

export function setDraft(id, text) {
  const drafts = read(DRAFTS);
  if (text) drafts[id] = text;
  else delete drafts[id];
  write(DRAFTS, drafts);
}
