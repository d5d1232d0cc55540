// Conversations, stored only in the browser, not on the server.

const KEY = "h2o.conversations";
const MOST = 50;

let all = read();

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY));
    return Array.isArray(found) ? found.filter((one) => Array.isArray(one.messages)) : [];
  } catch { // no entry, or not a valid one
    return [];
  }
}

export const list = () => all;

export function create(mode) {
  const made = { mode, messages: [], text: "" };
  all = [made, ...all.filter((one) => !isEmpty(one))].slice(0, MOST);
  return made;
}

export function remove(conversation) {
  all = all.filter((one) => one !== conversation);
  save();
}

export function save() {
  try {
    localStorage.setItem(KEY, JSON.stringify(all.filter((one) => !isEmpty(one))));
  } catch { // storage is full: conversations last until the page is closed
  }
}

const isEmpty = (one) => !one.messages.length && !one.text;

export function title(one) {
  const first = one.mode === "chat" ? one.messages[0]?.content : one.text;
  return first?.trim().slice(0, 40) || "New text";
}
