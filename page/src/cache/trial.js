// Tries smaller budgets on the last reply, as `h2o-cpp advise` does on a text: the model writes the
// same words again with less memory, and the server tells how likely it finds them.

import * as api from "../api.js";
import { $, bytes, el } from "../dom.js";
import { request } from "../replies.js";
import { settings } from "../settings.js";
import * as store from "../store.js";
import { sizeOf, slotsOf } from "./budget.js";

const LEAST = 8; // tokens; policies need some
const LOSS = 0.01; // of perplexity, as advise's default

const place = $("trial");
let running = null;
let asked = () => null; // returns the conversation, its messages, the model's limits and tokens seen
let use = () => {};

export function begin({ current, chosen }) {
  asked = current;
  use = chosen;
  clear();
}

export function clear() {
  running?.abort();
  running = null;
  place.replaceChildren(el("button", { type: "button", onclick: run }, "Try smaller budgets on the last reply"));
}

async function run() {
  const now = asked();
  const reply = now && now.messages.get(now.conversation.leaf);
  if (!reply?.content || reply.role !== "assistant" || reply.state === "writing" || reply.reasoning_content || reply.tool_calls) {
    return say("It can be tried on a reply that is complete, without reasoning and tool calls.");
  }
  const stop = new AbortController();
  running = stop;
  const rows = [];
  const budgets = candidates(now);
  try {
    for (const budget of budgets) {
      show(now, rows, `Trying ${budget} tokens …`);
      rows.push({ budget, perplexity: await perplexity(now, reply, budget, stop.signal) });
      if (running !== stop) return;
    }
    show(now, rows, advice(rows), true);
  } catch (error) {
    if (running === stop) say(error.message);
  }
  if (running === stop) running = null;
}

// What it has, and a half, a quarter, an eighth of it or of the text.
function candidates({ limits, seen }) {
  const most = slotsOf(settings.budget.trim(), limits);
  const smaller = [2, 4, 8].map((part) => Math.floor(Math.min(most, seen) / part));
  return [most, ...smaller.filter((budget) => budget >= LEAST && budget < most)];
}

async function perplexity({ conversation, messages }, reply, budget, signal) {
  const { path, body } = request(conversation, store.branch(messages, reply.parent));
  const isChat = path.endsWith("chat/completions");
  delete body.kept_every;
  delete body.return_progress;
  Object.assign(body, { guided_choice: [reply.content], temperature: 0, logprobs: isChat ? true : 0 });
  const { choices: [{ logprobs }] } = await api.complete(path, body, { hh: String(budget), key: settings.key, signal });
  const found = isChat ? logprobs.content.map(({ logprob }) => logprob) : logprobs.token_logprobs;
  return Math.exp(-found.reduce((a, b) => a + b, 0) / found.length);
}

const lossOf = (row, [first]) => row.perplexity / first.perplexity - 1;

function advice(rows) {
  const good = rows.filter((row) => lossOf(row, rows) <= LOSS).at(-1);
  return good === rows[0] ? "Less memory would make it noticeably less sure of these words."
    : `${good.budget} tokens would have been enough for this reply.`;
}

function show({ limits }, rows, text, isDone = false) {
  const cells = (row) => [
    `${row.budget} tokens`,
    bytes(sizeOf(row.budget, limits)),
    row === rows[0] ? "as sure as now" : `${Math.abs(100 * lossOf(row, rows)).toFixed(1)} % ${lossOf(row, rows) > 0 ? "less" : "more"} sure`,
  ];
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...["Remembers", "Memory", "Of its words", ""].map((name) => el("th", {}, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row).map((cell) => el("td", {}, cell)),
      el("td", {}, el("button", { type: "button", onclick: () => use(String(row.budget)) }, "Use"))))));
  place.replaceChildren(...(rows.length ? [table] : []), el("p", { className: "hint", role: "status" }, text),
    ...(isDone ? [] : [el("button", { type: "button", onclick: clear }, "Cancel")]));
}

function say(text) {
  clear();
  place.append(el("p", { className: "hint", role: "status" }, text));
}
