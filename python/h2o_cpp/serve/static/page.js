import * as api from "./api.js";
import * as tokens from "./tokens.js";

const KEPT_EVERY = 8; // tokens

const element = (id) => document.getElementById(id);
const [form, say, log, mode] = ["form", "say", "log", "mode"].map(element);

let served = null; // the model
let messages = []; // of a chat
let text = ""; // that is continued
let running = null; // what aborts the answer that is being written

async function findModel() {
  showError("");
  try {
    served = await api.model(element("key").value);
  } catch (error) {
    if (error.status === 401) element("key-label").hidden = false;
    showError(error.message);
    return;
  }
  const { n_ctx, chat, policy, cache_bytes, full_cache_bytes } = served.h2o;
  const cache = policy.recent === null ? "full cache"
    : `cache of ${policy.sinks} sinks, ${policy.heavy} heavy hitters, ${policy.recent} recent tokens`;
  element("about").textContent = `${served.id} · context of ${n_ctx} tokens · ${cache}`;
  mode.value = chat ? "chat" : "continue";
  mode.querySelector('[value="chat"]').disabled = !chat;
  element("memory").textContent = `${bytes(cache_bytes)} of ${bytes(full_cache_bytes)}`;
  element("memory-bar").value = cache_bytes / full_cache_bytes;
  reset();
}

function reset() {
  running?.abort();
  running = null;
  setRunning(false);
  messages = [];
  text = "";
  log.replaceChildren();
  showError("");
  forget();
  say.required = mode.value === "chat";
  element("say-label").textContent = mode.value === "chat" ? "Message" : "Text to go on from";
}

function forget() {
  tokens.clear();
  for (const id of ["kept", "evicted", "speed"]) element(id).textContent = "–";
  element("kept-bar").value = 0;
}

async function send() {
  const said = say.value;
  if (running || !served || (mode.value === "chat" ? !said.trim() : !(text + said))) return;
  const stop = running = new AbortController();
  const chat = mode.value === "chat";
  say.value = "";
  setRunning(true);
  showError("");
  forget();
  const before = { messages: [...messages], text };
  const shown = [];
  let answer = "";
  try {
    if (chat) {
      messages.push({ role: "user", content: said });
      shown.push(add("message user", said));
    } else {
      text += said;
      shown.push(add("prompt", said));
    }
    const target = add(chat ? "message assistant" : "", "");
    shown.push(target);
    for await (const piece of pieces(chat, stop.signal)) {
      answer += piece;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      target.append(piece);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
    if (!answer && running === stop) { // as if it had not been said
      ({ messages, text } = before);
      shown.forEach((one) => one.remove());
      say.value = said;
    }
  } finally {
    if (running === stop) {
      running = null;
      if (answer && chat) messages.push({ role: "assistant", content: answer });
      if (!chat) text += answer;
      setRunning(false);
    }
  }
}

async function* pieces(chat, signal) {
  const body = {
    max_tokens: Number(element("max-tokens").value),
    temperature: Number(element("temperature").value),
    kept_every: KEPT_EVERY,
    ...(chat ? { messages } : { prompt: text }),
  };
  const hh = element("budget").value.trim();
  if (hh && !/^(0|[1-9]\d*)(\.\d+)?$/.test(hh)) throw new Error("Budget: a fraction or a number of tokens");
  const path = chat ? "v1/chat/completions" : "v1/completions";
  const clock = new Clock();
  for await (const choice of api.stream(path, body, { hh, key: element("key").value, signal })) {
    if (choice.kept) showKept(choice.kept, clock);
    yield chat ? choice.delta.content ?? "" : choice.text;
  }
}

// Tokens per second between looks at the cache, from the first one on.
class Clock {
  perSecond(nTokens) {
    this.first ??= { nTokens, time: performance.now() };
    const seconds = (performance.now() - this.first.time) / 1000;
    return seconds > 0 ? (nTokens - this.first.nTokens) / seconds : 0;
  }
}

function showKept(kept, clock) {
  const { tokens_seen, tokens_kept } = kept;
  tokens.show(kept);
  element("kept").textContent = `${tokens_kept} of ${tokens_seen}`;
  element("kept-bar").value = tokens_kept / tokens_seen;
  element("evicted").textContent = tokens_seen - tokens_kept;
  const speed = clock.perSecond(tokens_seen);
  if (speed) element("speed").textContent = `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;
}

function add(className, content) {
  const target = document.createElement(className.startsWith("message") ? "div" : "span");
  target.className = className;
  target.textContent = content;
  log.append(target);
  log.scrollTop = log.scrollHeight;
  return target;
}

function setRunning(is) {
  element("send").disabled = mode.disabled = is;
  element("stop").disabled = !is;
  log.setAttribute("aria-busy", is);
}

function showError(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
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
  if (event.key === "Escape") running?.abort();
});
element("stop").addEventListener("click", () => running?.abort());
element("reset").addEventListener("click", reset);
mode.addEventListener("change", reset);
element("key").addEventListener("change", findModel);
findModel();
