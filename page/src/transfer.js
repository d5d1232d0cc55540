// Conversations to a file, and from one.

import { el } from "./dom.js";
import * as store from "./store.js";
import { titleOf } from "./titles.js";

const FORMAT = "h2o.cpp conversations";

export async function save() {
  const all = await store.everything();
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations: all }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const day = new Date().toISOString().slice(0, 10);
  el("a", { href: url, download: `h2o-conversations-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
  return all.length;
}

// Returns how many conversations the file has. Raises Error if it is of another kind.
export async function open(file) {
  let all;
  try {
    const found = JSON.parse(await file.text());
    if (found.format !== FORMAT) throw new Error(found.format);
    all = found.conversations.map(checked);
  } catch {
    throw new Error(`${file.name} is not a file of conversations.`);
  }
  await store.add(all);
  return all.length;
}

// Only the fields that are known, with their types.
function checked(one) {
  const id = String(one.id);
  const messages = one.messages.map((message) => ({
    id: String(message.id), conversation: id, parent: message.parent === null ? null : String(message.parent),
    role: message.role === "user" ? "user" : "assistant", content: String(message.content ?? ""),
    ...(message.reasoning_content && { reasoning_content: String(message.reasoning_content) }),
    ...(Array.isArray(message.tool_calls) && { tool_calls: message.tool_calls }),
    state: message.state === "done" ? "done" : "cut", reason: message.reason && String(message.reason),
    created: Number(message.created) || 0,
  }));
  const title = String(one.title || titleOf(messages[0]?.content));
  return { id, mode: one.mode === "continue" ? "continue" : "chat", title, created: Number(one.created) || 0,
    updated: Number(one.updated) || 0, leaf: one.leaf === null ? null : String(one.leaf), messages };
}
