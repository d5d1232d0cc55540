import * as api from "./api.js";
import * as conversations from "./conversations.js";
import { Message } from "./message.js";
import * as tokens from "./tokens.js";

const KEPT_EVERY = 8; // tokens
const MOST_ATTACHED = 2 ** 18; // bytes

const element = (id) => document.getElementById(id);
const [form, say, log, mode, models] = ["form", "say", "log", "mode", "model"].map(element);

let served = []; // models
let shown = null; // the conversation
let attached = null; // a file: its name and text
const running = new Map(); // by conversation: the answer being written, its element and what aborts it
const looks = new Map(); // by conversation: what the cache keeps

async function findModels() {
  showError("");
  try {
    served = await api.models(element("key").value);
  } catch (error) {
    if (error.status === 401) element("key-label").hidden = false;
    showError(error.message);
    return;
  }
  models.replaceChildren(...served.map((one) => new Option(one.id)));
  element("model-label").hidden = served.length < 2;
  showModel();
  open(shown ?? conversations.list()[0] ?? conversations.create(mode.value));
}

const model = () => served.find((one) => one.id === models.value);

function showModel() {
  const { id, h2o } = model();
  element("about").textContent = id;
  mode.querySelector('[value="chat"]').disabled = h2o?.chat === false;
  element("memory").textContent = "–";
  element("memory-bar").value = 0;
  if (!h2o) return; // it has not been loaded yet
  const { n_ctx, chat, policy, cache_bytes, full_cache_bytes } = h2o;
  const cache = policy.recent === null ? "full cache"
    : `cache of ${policy.sinks} sinks, ${policy.heavy} heavy hitters, ${policy.recent} recent tokens`;
  element("about").textContent = `${id} · context of ${n_ctx} tokens · ${cache}`;
  if (!chat) mode.value = "continue";
  element("memory").textContent = `${bytes(cache_bytes)} of ${bytes(full_cache_bytes)}`;
  element("memory-bar").value = cache_bytes / full_cache_bytes;
}

// The limits of a model are known once it has been loaded.
async function showLimits() {
  const found = await api.models(element("key").value).catch(() => []);
  served = served.map((one) => found.find(({ id, h2o }) => h2o && id === one.id) ?? one);
  showModel();
  mode.value = shown.mode;
}

function open(conversation) {
  shown = conversation;
  const chat = conversation.mode === "chat";
  mode.value = conversation.mode;
  log.replaceChildren();
  if (chat) conversation.messages.forEach((said) => add(new Message(said).target));
  else if (conversation.text) add(span("", conversation.text));
  if (running.has(conversation)) add(running.get(conversation).target);
  showError("");
  say.required = chat;
  element("say-label").textContent = chat ? "Message" : "Text to go on from";
  showCache();
  showRunning();
  showList();
}

function showList() {
  element("conversations").replaceChildren(...conversations.list().map((one) => {
    const [item, button, remove] = ["li", "button", "button"].map((name) => document.createElement(name));
    button.type = remove.type = "button";
    button.textContent = conversations.title(one);
    if (one === shown) button.setAttribute("aria-current", "true");
    if (running.has(one)) button.classList.add("running");
    button.addEventListener("click", () => open(one));
    remove.textContent = "×";
    remove.className = "remove";
    remove.setAttribute("aria-label", `Remove ${conversations.title(one)}`);
    remove.addEventListener("click", () => {
      running.get(one)?.stop.abort();
      conversations.remove(one);
      open(shown === one ? conversations.list()[0] ?? conversations.create(mode.value) : shown);
    });
    item.append(button, remove);
    return item;
  }));
}

async function send() {
  const conversation = shown;
  const chat = conversation.mode === "chat";
  const typed = say.value;
  const said = attached ? `${typed}\n\n${attached.name}:\n\`\`\`\n${attached.text}\n\`\`\`` : typed;
  if (running.has(conversation) || !served.length) return;
  if (chat ? !said.trim() : !(conversation.text + said)) return;
  const stop = new AbortController();
  const before = { messages: [...conversation.messages], text: conversation.text };
  const file = attached;
  looks.delete(conversation);
  say.value = "";
  attach(null);
  showError("");
  const answer = { role: "assistant", content: "" };
  const view = chat ? new Message(answer) : null;
  const target = chat ? view.target : span("", "");
  running.set(conversation, { stop, target });
  if (chat) {
    conversation.messages.push({ role: "user", content: said });
    add(new Message(conversation.messages.at(-1)).target, target);
  } else {
    conversation.text += said;
    add(span("prompt", said), target);
  }
  showCache();
  showRunning();
  showList();
  let changed = false;
  try {
    for await (const delta of deltas(conversation, stop.signal)) {
      changed = take(answer, delta) || changed;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (chat) view.change();
      else target.append(delta.content ?? "");
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError" && shown === conversation) showError(error.message);
    if (!changed) { // as if it had not been said
      Object.assign(conversation, before);
      if (shown === conversation && !say.value) {
        say.value = typed;
        attach(file);
      }
    }
  } finally {
    running.delete(conversation);
    if (changed && chat) conversation.messages.push(answer);
    if (!chat) conversation.text += answer.content;
    if (chat && changed) view.update();
    conversations.save();
    if (shown === conversation) {
      if (!changed) {
        const message = element("error").textContent;
        open(conversation);
        showError(message);
      }
      showRunning();
    }
    showList();
    if (!model().h2o) showLimits();
  }
}

// Adds a delta to an answer; whether it says anything.
function take(answer, delta) {
  if (delta.content) answer.content += delta.content;
  if (delta.reasoning_content) answer.reasoning_content = (answer.reasoning_content ?? "") + delta.reasoning_content;
  for (const { index, ...call } of delta.tool_calls ?? []) {
    const calls = (answer.tool_calls ??= []);
    if (index in calls) calls[index].function.arguments += call.function.arguments;
    else calls[index] = call;
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

async function* deltas(conversation, signal) {
  const chat = conversation.mode === "chat";
  const tools = element("tools").value.trim();
  const body = {
    model: models.value,
    max_tokens: Number(element("max-tokens").value),
    temperature: Number(element("temperature").value),
    kept_every: KEPT_EVERY,
    ...(chat ? { messages: conversation.messages } : { prompt: conversation.text }),
    ...(chat && tools && { tools: JSON.parse(tools) }),
  };
  const hh = element("budget").value.trim();
  if (hh && !/^(0|[1-9]\d*)(\.\d+)?$/.test(hh)) throw new Error("Budget: a fraction or a number of tokens");
  const path = chat ? "v1/chat/completions" : "v1/completions";
  const clock = new Clock();
  for await (const choice of api.stream(path, body, { hh, key: element("key").value, signal })) {
    if (choice.kept) look(conversation, choice.kept, clock);
    yield chat ? choice.delta : { content: choice.text };
  }
}

// Tokens per second between looks at the cache, from the first one on; while there is one alone, or
// all came at once, since the request.
class Clock {
  begin = { nTokens: 0, time: performance.now() };
  perSecond(nTokens) {
    const time = performance.now();
    this.first ??= { nTokens, time };
    const since = time > this.first.time ? this.first : this.begin;
    return ((nTokens - since.nTokens) / (time - since.time)) * 1000;
  }
}

function look(conversation, kept, clock) {
  const pieces = [...(looks.get(conversation)?.kept.pieces ?? []), ...kept.pieces];
  looks.set(conversation, { kept: { ...kept, pieces }, speed: clock.perSecond(kept.tokens_seen) });
  if (shown !== conversation) return;
  tokens.show(kept);
  showNumbers(looks.get(conversation));
}

function showCache() {
  const last = looks.get(shown);
  tokens.clear();
  for (const id of ["kept", "evicted", "speed"]) element(id).textContent = "–";
  element("kept-bar").value = 0;
  if (!last) return;
  tokens.show(last.kept);
  showNumbers(last);
}

function showNumbers({ kept: { tokens_seen, tokens_kept }, speed }) {
  element("kept").textContent = `${tokens_kept} of ${tokens_seen}`;
  element("kept-bar").value = tokens_kept / tokens_seen;
  element("evicted").textContent = tokens_seen - tokens_kept;
  if (speed) element("speed").textContent = `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;
}

function span(className, content) {
  const target = document.createElement("span");
  target.className = className;
  target.textContent = content;
  return target;
}

function add(...targets) {
  log.append(...targets);
  log.scrollTop = log.scrollHeight;
}

function showRunning() {
  const is = running.has(shown);
  element("send").disabled = mode.disabled = is;
  element("stop").disabled = !is;
  log.setAttribute("aria-busy", is);
}

function showError(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
}

function attach(file) {
  attached = file;
  element("attached").textContent = file ? `${file.name}, ${bytes(file.text.length)}` : "";
}

async function readFile([file]) {
  element("file").value = "";
  if (!file) return;
  showError("");
  if (file.size > MOST_ATTACHED) return showError(`${file.name} has more than ${bytes(MOST_ATTACHED)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    attach({ name: file.name, text });
  } catch {
    showError(`${file.name} is not text`);
  }
}

function begin() {
  open(conversations.create(mode.value));
}

const bytes = (n) => (n < 2 ** 20 ? `${(n / 2 ** 10).toFixed(0)} KiB` : `${(n / 2 ** 20).toFixed(1)} MiB`);

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
say.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running.get(shown)?.stop.abort();
});
element("stop").addEventListener("click", () => running.get(shown)?.stop.abort());
element("reset").addEventListener("click", begin);
element("file").addEventListener("change", (event) => readFile(event.target.files));
mode.addEventListener("change", begin);
models.addEventListener("change", showModel);
element("key").addEventListener("change", findModels);
findModels();
