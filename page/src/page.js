// The page: what is shown, and what its controls do.

import * as api from "./api.js";
import { cost } from "./cache/budget.js";
import { Look } from "./cache/look.js";
import * as panel from "./cache/panel.js";
import * as trial from "./cache/trial.js";
import * as composer from "./composer.js";
import { $, addIcons, el } from "./dom.js";
import { Log } from "./log.js";
import * as panes from "./panes.js";
import * as replies from "./replies.js";
import * as settingsPage from "./settings_page.js";
import { draft, set, setDraft, settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { welcome } from "./welcome.js";

let served = []; // models
let shown = null; // a conversation and its messages

const log = new Log({
  canAsk: () => canAsk(),
  edit: (message, text) => replies.edit(shown, message, text),
  regenerate: (message) => canAsk() && replies.regenerate(shown, message),
  goOn: (message) => canAsk() && replies.goOn(shown, message),
  choose: (message) => {
    shown.conversation.leaf = store.leafBelow(shown.messages, message);
    store.save(shown.conversation);
    show();
  },
});
const sidebar = new Sidebar({ open: (conversation) => open(conversation).then(panes.closeSidebar), remove });

// Models

const model = () => served.find((one) => one.id === $("model").value);

async function findModels() {
  try {
    served = await api.models(settings.key);
  } catch (error) {
    settingsPage.askForKey(error.status === 401);
    const aboutKey = settings.key ? "This API key is wrong." : "This server asks for an API key.";
    return showError(error.status === 401 ? aboutKey : error.message);
  }
  settingsPage.askForKey(false);
  showError("");
  $("model").replaceChildren(...served.map((one) => new Option(one.id)));
  if (served.some((one) => one.id === settings.model)) $("model").value = settings.model;
  $("model").disabled = served.length < 2;
  showModel();
}

function showModel() {
  const { id, h2o } = model();
  settings.model = id;
  panel.showMemory(h2o);
  $("mode").querySelector('[value="chat"]').disabled = h2o?.chat === false;
  $("about").textContent = id;
  if (h2o) { // otherwise it has not been loaded yet
    $("about").textContent = `${id} · context of ${h2o.n_ctx} tokens · remembers ${remembered(h2o.policy)}`;
  }
  if (h2o?.chat === false && !shown?.conversation.leaf) setMode("continue");
  showLength();
  showCost();
}

function remembered({ sinks, heavy, recent }) {
  if (recent === null) return "everything";
  const parts = [[sinks, "first"], [heavy, "often used"], [recent, "recent"]].filter(([n]) => n);
  return `${parts.map(([n, what]) => `${n} ${what}`).join(", ")} tokens`;
}

// The limits of a model are known once it has been loaded.
async function showLimits() {
  const found = await api.models(settings.key).catch(() => []);
  served = served.map((one) => found.find(({ id, h2o }) => h2o && id === one.id) ?? one);
  showModel();
}

function showLength() {
  const limits = model()?.h2o;
  const most = limits && !limits.endless ? limits.n_ctx : Infinity;
  settings.length = Math.min(settings.chosenLength || Math.min(1024, Math.floor(most / 2)), most);
  $("max-tokens").value = settings.length;
}

function showCost() {
  const budget = settings.budget.trim();
  const keepsAll = !budget && model()?.h2o?.policy.recent === null;
  $("budget-cost").textContent = cost(budget, model()?.h2o);
  $("legend-first").hidden = Boolean(model()?.h2o) && !model().h2o.policy.sinks;
  $("lead-all").hidden = !keepsAll;
  $("lead-some").hidden = keepsAll;
}

// Conversations

async function open(conversation) {
  const messages = await store.tree(conversation);
  shown = { conversation, messages };
  composer.setText(draft(draftKey()));
  showLook();
  show();
}

// What is typed into an empty conversation stays for the next one.
const draftKey = () => (shown.conversation.leaf ? shown.conversation.id : "new");

function begin(mode = shown?.conversation.mode ?? "chat") {
  const isNoChat = model()?.h2o?.chat === false;
  shown = { conversation: store.create(isNoChat ? "continue" : mode), messages: new Map() };
  store.keep(shown);
  composer.setText(draft(draftKey()));
  showLook();
  show();
}

function setMode(mode) {
  shown.conversation.mode = mode;
  show();
}

function show() {
  const { conversation } = shown;
  const isChat = conversation.mode === "chat";
  const isRunning = replies.running.has(conversation.id);
  log.show(shown);
  sidebar.show(conversation);
  $("mode").value = conversation.mode;
  $("mode").hidden = Boolean(conversation.leaf);
  $("say").placeholder = isChat ? "Write a message" : "Write the beginning of a text";
  $("say").setAttribute("aria-label", $("say").placeholder);
  $("send").hidden = $("send").disabled = isRunning;
  $("stop").hidden = $("stop").disabled = !isRunning;
  document.title = conversation.title ? `${conversation.title} – h2o.cpp` : "h2o.cpp";
  showError(replies.errors.get(conversation.id)?.message ?? "");
}

async function showLook() {
  const { id, leaf } = shown.conversation;
  const isLong = replies.isLong(store.branch(shown.messages, leaf));
  panel.clear(isLong);
  trial.clear();
  if (isLong) return;
  if (!replies.looks.has(id) && !replies.running.has(id)) {
    const found = Look.of(await store.look(id));
    if (found && !replies.running.has(id)) replies.looks.set(id, found);
  }
  if (shown.conversation.id === id && replies.looks.has(id)) panel.show(replies.looks.get(id));
}

async function remove(conversation) {
  replies.stop(conversation);
  const removed = store.remove(conversation);
  if (isShown(conversation)) await openLast();
  else show();
  const undo = await removed;
  panes.toast(`“${conversation.title}” was deleted.`, "Undo", async () => {
    await undo();
    await open(conversation);
  });
}

async function openLast() {
  const [last] = store.list();
  if (last) await open(last);
  else begin();
}

function emptied() {
  for (const { stop } of replies.running.values()) stop.abort();
  begin();
}

// Asking

const canAsk = () => served.length > 0 && !replies.running.has(shown.conversation.id);

const sent = new Map(); // of a text that is not answered yet, what was typed, and its files

async function send() {
  if (!served.length) await findModels();
  const isChat = shown.conversation.mode === "chat";
  const typed = $("say").value;
  const files = composer.files();
  const text = composer.withFiles(typed, files);
  if (!canAsk() || (isChat ? !text.trim() : !text && !shown.conversation.leaf)) return;
  setDraft(draftKey(), "");
  composer.setText("");
  composer.setFiles([]);
  sent.set(text, { typed, files });
  replies.ask(shown, text).finally(() => sent.delete(text));
}

const isShown = (conversation) => shown.conversation.id === conversation.id;

Object.assign(replies.on, {
  began(conversation) {
    if (isShown(conversation)) {
      panel.clear(replies.isLong(store.branch(shown.messages, conversation.leaf)));
      trial.clear();
      log.follow.isOn = true;
      show();
    }
  },
  changed(conversation, reply) {
    if (isShown(conversation)) log.change(reply);
  },
  looked(conversation, look) {
    if (isShown(conversation)) panel.show(look);
  },
  ended(conversation, reply) {
    if (isShown(conversation)) {
      panel.redraw();
      show();
      if (reply.content) $("status").textContent = reply.state === "cut" ? "The reply was cut off." : "The reply is complete.";
    } else {
      sidebar.show(shown.conversation);
    }
    if (!model()?.h2o) showLimits();
  },
  returned(conversation, text) {
    const isFree = isShown(conversation) && !$("say").value;
    const { typed, files } = (isFree && sent.get(text)) || { typed: text, files: [] };
    setDraft(conversation.leaf ? conversation.id : "new", typed);
    if (!isFree) return;
    composer.setText(typed);
    if (files.length) composer.setFiles(files);
  },
});

Object.assign(store.on, {
  async changed(id) {
    if (shown?.conversation.id !== id) return sidebar.show(shown?.conversation);
    if (store.conversations.has(id)) return show();
    replies.stop({ id });
    await openLast();
  },
  failed(message) {
    $("full").textContent = message;
    $("full").hidden = !message;
  },
});

// A reply that another tab was writing is cut if nothing is heard of it.
setInterval(() => {
  if (shown && shown.messages.get(shown.conversation.leaf)?.state === "writing" && !replies.running.has(shown.conversation.id)) show();
}, 2000);

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

// Controls

addIcons();
$("welcome").replaceWith(welcome());
panes.begin({ cacheOpened: panel.redraw });
settingsPage.begin({ keyChanged: findModels, themeChanged: panel.redraw, imported: openLast, emptied });
composer.begin({ send, typed: (text) => setDraft(draftKey(), text), error: showError });
$("stop").addEventListener("click", () => replies.stop(shown.conversation));
for (const id of ["new", "new-small"]) {
  $(id).addEventListener("click", () => {
    begin();
    panes.closeSidebar();
    $("say").focus();
  });
}
$("mode").addEventListener("change", () => setMode($("mode").value));
$("model").addEventListener("change", () => {
  set("model", $("model").value);
  showModel();
});
$("max-tokens").addEventListener("input", () => {
  const n = Math.floor(Number($("max-tokens").value));
  set("chosenLength", n > 0 ? n : undefined);
  settings.length = settings.chosenLength;
});
$("max-tokens").addEventListener("change", showLength);
function setBudget(typed) {
  $("budget").value = typed;
  set("budget", typed);
  showCost();
}
trial.begin({
  current: () => ({ ...shown, limits: model()?.h2o, seen: replies.looks.get(shown.conversation.id)?.seen ?? 0 }),
  chosen: setBudget,
});
$("budget").value = settings.budget;
$("budget").addEventListener("input", () => setBudget($("budget").value));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && shown && !$("settings").open) replies.stop(shown.conversation);
});

begin("chat");
findModels();
store.load().then(() => {
  const [last] = store.list();
  if (last && !shown.conversation.leaf && !$("say").value) return open(last);
  sidebar.show(shown.conversation);
});
