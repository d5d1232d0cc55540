// Conversations in IndexedDB. A conversation has a tree of messages, whose branches are the versions
// of a message; `leaf` is the last message of the shown branch.
//
// Every message is a record of its own, so tabs do not overwrite each other's. A record that cannot
// be written stays in memory, is announced, and is tried again with the next change.

import { openDB } from "idb";
import * as old from "./old_conversations.js";

export const conversations = new Map(); // by id
const trees = new Map(); // messages by id, of the conversations that were opened
const waiting = new Map(); // records that are not written yet, by store and id
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("h2o.conversations") : null;

// Set by the page: what happens when another tab changed a conversation, and when storage fails.
export const on = { changed: () => {}, failed: () => {}, isLocal: () => false };

let db = null;
let flushing = null;
let problem = "";

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)),
  (byte) => byte.toString(16).padStart(2, "0")).join("");

export const tab = newId();
export const tabBefore = reloaded(); // what it was writing is cut

function reloaded() {
  const TAB = "h2o.tab";
  try {
    const before = sessionStorage.getItem(TAB); // a duplicate of a tab has it too
    sessionStorage.setItem(TAB, tab);
    return performance.getEntriesByType("navigation")[0].type === "reload" ? before : null;
  } catch { // no storage
    return null;
  }
}

async function connect() {
  db = await openDB("h2o", 1, {
    upgrade(made) {
      made.createObjectStore("conversations", { keyPath: "id" });
      made.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      made.createObjectStore("looks", { keyPath: "id" });
    },
    blocking: () => db.close(), // a newer version of the page waits
    terminated: () => { db = null; },
  });
}

export async function load() {
  try {
    await connect();
    await recover();
    for (const one of await db.getAll("conversations")) conversations.set(one.id, one);
  } catch {
    fail("This browser does not let the page store conversations: they last until it is closed.");
  }
  const found = old.read();
  if (found.length) {
    await add(found);
    if (!waiting.size) old.remove();
  }
  navigator.storage?.persist?.().catch(() => {});
}

// The newest first.
export const list = () => [...conversations.values()].sort((a, b) => b.updated - a.updated);

export function create(mode) {
  const now = Date.now();
  return { id: newId(), mode, title: "", created: now, updated: now, leaf: null };
}

// Of a new conversation, which is stored with its first message.
export function keep({ conversation, messages }) {
  messages.isLoaded = true;
  trees.set(conversation.id, messages);
}

export async function tree(conversation) {
  const { id } = conversation;
  if (!trees.has(id)) trees.set(id, new Map());
  const messages = trees.get(id);
  if (!messages.isLoaded) {
    messages.isLoaded = true;
    for (const one of await stored(id)) if (!messages.has(one.id)) messages.set(one.id, one);
  }
  return messages;
}

async function stored(id) {
  try {
    return db ? await db.getAllFromIndex("messages", "conversation", id) : [];
  } catch {
    return [];
  }
}

// From the first message to `leaf`.
export function branch(messages, leaf) {
  const found = [];
  const seen = new Set(); // a file of conversations may have a circle
  for (let one = messages.get(leaf); one && !seen.has(one); one = messages.get(one.parent)) {
    seen.add(one);
    found.push(one);
  }
  return found.reverse();
}

export const versions = (messages, message) => [...messages.values()]
  .filter((one) => one.parent === message.parent && one.role === message.role)
  .sort((a, b) => a.created - b.created);

// The newest leaf below a message.
export function leafBelow(messages, message, seen = new Set()) {
  seen.add(message);
  const below = [...messages.values()].filter((one) => one.parent === message.id && !seen.has(one));
  if (!below.length) return message.id;
  return leafBelow(messages, below.reduce((a, b) => (b.created > a.created ? b : a)), seen);
}

export function save(conversation, ...messages) {
  conversations.set(conversation.id, conversation);
  put("conversations", conversation);
  for (const one of messages) {
    trees.get(conversation.id)?.set(one.id, one);
    put("messages", one);
  }
  return flush();
}

export function saveLook(id, look) {
  if (conversations.has(id)) put("looks", { id, ...look });
  return flush();
}

export async function look(id) {
  try {
    return waiting.get(`looks ${id}`)?.record ?? await db?.get("looks", id);
  } catch {
    return undefined;
  }
}

function put(store, record) {
  waiting.set(`${store} ${record.id}`, { store, record });
}

function drop(store, id) {
  waiting.set(`${store} ${id}`, { store, record: { id }, isDropped: true });
}

// A page that is closed may not wait for IndexedDB; localStorage is written at once, and read when the
// page is opened again.
const LAST = "h2o.last";

export function flushAtEnd() {
  const records = [...waiting].filter(([, { store }]) => store !== "looks");
  try {
    if (records.length) localStorage.setItem(LAST, JSON.stringify(records));
  } catch { // full or forbidden
  }
  flush();
}

async function recover() {
  try {
    for (const [key, one] of JSON.parse(localStorage.getItem(LAST)) ?? []) waiting.set(key, one);
  } catch { // not JSON
  }
  await flush();
}

export function flush() {
  flushing ??= write().finally(() => { flushing = null; });
  return flushing;
}

async function write() {
  while (waiting.size) {
    const some = new Map(waiting);
    try {
      if (!db) await connect();
      const transaction = db.transaction(["conversations", "messages", "looks"], "readwrite");
      transaction.done.catch(() => {}); // it is awaited below, unless a put fails at once
      for (const { store, record, isDropped } of some.values()) {
        const stored = transaction.objectStore(store);
        (isDropped ? stored.delete(record.id) : stored.put(record)).catch(() => {});
      }
      await transaction.done;
    } catch (error) {
      if (error?.name === "InvalidStateError") db = null; // the connection was closed
      const why = error?.name === "QuotaExceededError" ? "The browser's storage is full"
        : "The browser's storage does not work or is full";
      return fail(`${why}: what is new is not stored, and will be lost when this page is closed. `
        + "Export conversations in Settings, and delete some.");
    }
    for (const [key, one] of some) if (waiting.get(key) === one) waiting.delete(key);
    fail("");
    const ids = new Set([...some.values()].map(({ store, record }) =>
      (store === "messages" ? record.conversation : record.id)));
    channel?.postMessage([...ids].filter(Boolean));
  }
  localStorage.removeItem(LAST);
}

function fail(message) {
  problem = message;
  on.failed(message);
}

addEventListener("beforeunload", (event) => {
  if (problem && waiting.size) event.preventDefault();
});

channel?.addEventListener("message", async ({ data: ids }) => {
  for (const id of ids) {
    const head = await db?.get("conversations", id).catch(() => undefined);
    const known = conversations.get(id);
    if (!head) {
      conversations.delete(id);
      trees.delete(id);
    } else if (known) { // each tab shows its own branch
      const { leaf } = known;
      Object.assign(known, head, { leaf: on.isLocal(id) ? leaf : head.leaf });
    } else {
      conversations.set(id, head);
    }
    const messages = trees.get(id);
    if (head && messages) {
      for (const one of await stored(id)) {
        if (messages.has(one.id) && on.isLocal(id, one.id)) continue;
        if (messages.has(one.id)) Object.assign(messages.get(one.id), one);
        else messages.set(one.id, one);
      }
    }
    on.changed(id);
  }
});

// Returns a function that puts it back.
export async function remove(conversation) {
  conversations.delete(conversation.id);
  const messages = [...(await tree(conversation)).values()];
  const seen = await look(conversation.id);
  trees.delete(conversation.id);
  drop("conversations", conversation.id);
  drop("looks", conversation.id);
  for (const one of messages) drop("messages", one.id);
  flush();
  return async () => {
    await tree(conversation);
    save(conversation, ...messages);
    if (seen) saveLook(conversation.id, seen);
  };
}

// Removes messages that were not answered.
export function forget(conversation, ...messages) {
  for (const { id } of messages) {
    trees.get(conversation.id)?.delete(id);
    drop("messages", id);
  }
  if (conversation.leaf === null) {
    conversations.delete(conversation.id);
    drop("conversations", conversation.id);
    return flush();
  }
  return save(conversation);
}

// The ids of conversations with a text in their title or messages.
export async function search(text) {
  const wanted = text.toLowerCase();
  const has = (one) => one?.toLowerCase().includes(wanted);
  const found = new Set();
  for (const { id, title } of conversations.values()) if (has(title)) found.add(id);
  const messages = (await db?.getAll("messages").catch(() => [])) ?? [];
  for (const messagesOf of trees.values()) messages.push(...messagesOf.values());
  for (const { conversation, content } of messages) if (has(content)) found.add(conversation);
  return found;
}

// All conversations, each with its messages.
export async function everything() {
  const all = [];
  for (const conversation of list()) {
    all.push({ ...conversation, messages: [...(await tree(conversation)).values()] });
  }
  return all;
}

// Adds conversations in the form that everything() returns, and merges those that exist already.
export async function add(all) {
  for (const { messages, ...conversation } of all) {
    const known = conversations.get(conversation.id) ?? conversation;
    const there = await tree(known);
    save(known, ...messages.filter((one) => !there.has(one.id))
      .map((one) => ({ ...one, conversation: known.id })));
  }
  await flush();
}
