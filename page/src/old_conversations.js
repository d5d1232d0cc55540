// Conversations that an earlier version of the page stored in localStorage.

import { titleOf } from "./titles.js";

const KEY = "h2o.conversations";

export function read() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY));
    if (!Array.isArray(found)) return [];
    const now = Date.now();
    return found.filter((one) => Array.isArray(one.messages))
      .map((one, i) => converted(one, now - i)) // the newest came first
      .filter((one) => one.leaf);
  } catch { // no storage, or not JSON
    return [];
  }
}

export const remove = () => localStorage.removeItem(KEY);

// Two tabs convert it to the same ids.
function converted({ mode, messages, text = "" }, time) {
  const said = mode === "chat" ? messages : text ? [{ role: "user", content: text }] : [];
  const id = `old-${sum(JSON.stringify(said))}`;
  const made = said.map(({ role, content, reasoning_content, tool_calls }, at) => ({
    id: `${id}-${at}`, conversation: id, parent: at ? `${id}-${at - 1}` : null, role, content: content ?? "",
    ...(reasoning_content && { reasoning_content }), ...(tool_calls && { tool_calls }),
    state: "done", created: time + at,
  }));
  const leaf = made.at(-1)?.id ?? null;
  return { id, mode, title: titleOf(said[0]?.content), created: time, updated: time, leaf, messages: made };
}

function sum(text) {
  let found = 0;
  for (let i = 0; i < text.length; i += 1) found = (Math.imul(found, 31) + text.charCodeAt(i)) | 0;
  return (found >>> 0).toString(16);
}
