// Replies while they are written: asked for, stored as they grow, stopped and continued.

import * as api from "./api.js";
import { isBudget } from "./cache/budget.js";
import { Clock, Look } from "./cache/look.js";
import { keptOf } from "./kept.js";
import { settings } from "./settings.js";
import * as store from "./store.js";
import { titleOf } from "./titles.js";

const KEPT_EVERY = 8; // tokens
const MOST_LOOKED_AT = 200_000; // characters of a text of which every token is shown
const SAVE_EVERY = 250; // ms
const SIGN_OF_LIFE = 1000; // ms; other tabs take a reply to be cut if none came for much longer
const DEAD_AFTER = 4000; // ms

export const running = new Map(); // by conversation: the reply and what stops it
export const looks = new Map(); // by conversation
export const errors = new Map(); // by conversation

// Set by the page. returned: a question that got no answer.
export const on = { began: () => {}, changed: () => {}, looked: () => {}, ended: () => {}, returned: () => {} };

store.on.isLocal = (id, message) =>
  running.has(id) && (message === undefined || running.get(id).reply.id === message);

export const isWriting = (message) => message.state === "writing" && !isCut(message);

// How much of the prompt of a reply was read, until it begins.
export const progressOf = ({ id, conversation }) => {
  const one = running.get(conversation);
  return one?.reply.id === id ? one.progress : undefined;
};

export function isCut(message) {
  if (message.state !== "writing") return message.state === "cut";
  if (running.get(message.conversation)?.reply === message) return false;
  return message.writer === store.tabBefore || Date.now() - message.saved > DEAD_AFTER;
}

function made(conversation, parent, role, content = "") {
  return { id: store.newId(), conversation: conversation.id, parent, role, content, state: "done", created: Date.now() };
}

// place: a conversation and its messages. An empty `text` adds no message if the model continues a
// text.
export function ask(place, text, parent = place.conversation.leaf) {
  const { conversation } = place;
  const question = text || conversation.mode === "chat" ? made(conversation, parent, "user", text) : null;
  const reply = made(conversation, question?.id ?? parent, "assistant");
  reply.created += 1;
  conversation.title ||= titleOf(text);
  return run(place, reply, question ? [question, reply] : [reply], text);
}

export function regenerate(place, { parent }) {
  const reply = made(place.conversation, parent, "assistant");
  return run(place, reply, [reply]);
}

export const edit = (place, message, text) => ask(place, text, message.parent);

export const goOn = (place, message) => run(place, message, []);

export const stop = (conversation) => running.get(conversation.id)?.stop.abort();

async function run({ conversation, messages }, reply, added, text = "") {
  const stop = new AbortController();
  const before = { leaf: conversation.leaf, state: reply.state, reason: reply.reason };
  const isContinued = !added.length;
  let isSaved = false;
  const save = (...some) => {
    if (!store.conversations.has(conversation.id)) return; // it was deleted
    reply.saved = Date.now();
    isSaved = true;
    store.save(conversation, ...some);
  };
  Object.assign(reply, { state: "writing", writer: store.tab, saved: Date.now() });
  for (const one of added) messages.set(one.id, one);
  Object.assign(conversation, { leaf: reply.id, updated: Date.now() });
  running.set(conversation.id, { reply, stop, save: () => save(reply) });
  errors.delete(conversation.id);
  looks.delete(conversation.id);
  store.save(conversation, reply, ...added);
  on.began(conversation);
  const saving = setInterval(() => {
    if (!isSaved || Date.now() - reply.saved >= SIGN_OF_LIFE) save(reply);
  }, SAVE_EVERY);
  let hasChanged = false;
  let reason = "stop";
  try {
    const history = store.branch(messages, isContinued ? reply.id : reply.parent);
    const asked = history.filter(isSaid);
    for await (const choice of choices(conversation, history, stop.signal)) {
      running.get(conversation.id).progress = choice.progress;
      if (choice.progress) {
        on.changed(conversation, reply);
        continue;
      }
      if (choice.usage) {
        conversation.kept = keptOf(reply, asked, choice.memory, choice.usage.prompt_memory);
        continue;
      }
      hasChanged = take(reply, choice.delta ?? { content: choice.text }) || hasChanged;
      reason = choice.finish_reason ?? reason;
      isSaved = false;
      on.changed(conversation, reply);
      if (Date.now() - reply.saved >= SAVE_EVERY) save(reply);
    }
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : isLeaving ? "closed" : "lost";
    if (reason === "lost") errors.set(conversation.id, error);
  } finally {
    clearInterval(saving);
    running.delete(conversation.id);
  }
  const isDeleted = !store.conversations.has(conversation.id);
  const isCutNow = ["length", "stopped", "lost", "closed"].includes(reason);
  delete reply.writer;
  if (hasChanged || (isContinued && !isCutNow) || (!isCutNow && added.length)) {
    Object.assign(reply, { state: isCutNow ? "cut" : "done", reason });
    save(reply);
  } else if (isContinued) {
    Object.assign(reply, { state: before.state, reason: before.reason });
    save(reply);
  } else { // forget the question too
    for (const { id } of added) messages.delete(id);
    conversation.leaf = before.leaf;
    if (!isDeleted) {
      store.forget(conversation, ...added);
      if (text) on.returned(conversation, text);
    }
  }
  const look = looks.get(conversation.id);
  if (look) store.saveLook(conversation.id, look.record());
  on.ended(conversation, reply);
}

// Adds a delta to a reply; whether it says anything.
function take(reply, delta) {
  if (delta.content) reply.content += delta.content;
  if (delta.reasoning_content) reply.reasoning_content = (reply.reasoning_content ?? "") + delta.reasoning_content;
  for (const { index, ...call } of delta.tool_calls ?? []) {
    const calls = (reply.tool_calls ??= []);
    if (index in calls) calls[index].function.arguments += call.function.arguments;
    else calls[index] = call;
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

async function* choices(conversation, history, signal) {
  const { hh, path, body } = request(conversation, history);
  const look = new Look();
  const clock = new Clock();
  for await (const choice of api.stream(path, body, { hh, key: settings.key, signal })) {
    if (choice.kept) {
      look.add(choice.kept, clock.perSecond(choice.kept.tokens_seen));
      looks.set(conversation.id, look);
      on.looked(conversation, look);
    }
    yield choice;
  }
}

// Whether it is too long to be shown word by word.
export const isLong = (history) => history.reduce((n, { content }) => n + content.length, 0) > MOST_LOOKED_AT;

export function request({ mode }, history) {
  const hh = settings.budget.trim();
  if (hh && !isBudget(hh)) throw new Error("Budget: expected a fraction or a number of tokens.");
  const body = {
    model: settings.model,
    ...(settings.length && { max_tokens: settings.length }),
    temperature: settings.temperature,
    ...(!isLong(history) && { kept_every: KEPT_EVERY }),
    return_progress: true,
  };
  if (mode === "continue") {
    return { hh, path: "v1/completions", body: { ...body, prompt: history.map(({ content }) => content).join("") } };
  }
  const system = settings.system.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...said(history)];
  return { hh, path: "v1/chat/completions", body: { ...body, messages, ...tools() } };
}

// Replies that were cut before they said anything are left out.
const isSaid = ({ role, content, tool_calls: calls }) => role === "user" || content || calls;

export const said = (history) => history.filter(isSaid)
  .map(({ role, content, reasoning_content: reasoning, tool_calls: calls }) => ({
    role, content, ...(reasoning && { reasoning_content: reasoning }), ...(calls && { tool_calls: calls }),
  }));

function tools() {
  const text = settings.tools.trim();
  if (!text) return {};
  try {
    return { tools: JSON.parse(text) };
  } catch {
    throw new Error("Tools: expected a JSON list. See Settings.");
  }
}

// A page that is left loses its connections first.
let isLeaving = false;
addEventListener("beforeunload", () => {
  isLeaving = true;
  setTimeout(() => { isLeaving = false; }, 3000); // the user may stay
});

// A phone may close the page without another chance.
function saveAll() {
  for (const one of running.values()) one.save();
  store.flushAtEnd();
}
addEventListener("pagehide", saveAll);
document.addEventListener("visibilitychange", () => document.hidden && saveAll());
