// The cache beside the conversation: numbers, tokens, timeline and budget.

import { $, bytes, el } from "../dom.js";
import { Timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";

const EVERY = 150; // ms between pictures

const tokens = new Tokens();
const timeline = new Timeline();
const slider = $("moment");
const bar = $("kept-bar");
let shown = null;
let chosen = null; // a moment of the past
let waiting = 0;
let drawn = 0;

const segments = Object.fromEntries(["sink", "heavy", "recent", "forgotten"].map((role) =>
  [role, el("span", { className: role })]));
bar.append(...Object.values(segments));

slider.addEventListener("input", () => {
  const i = Number(slider.value);
  chosen = i < shown.moments.length - 1 ? shown.moments[i] : null;
  draw();
});

// isLong: what comes is too long to be shown word by word.
export function clear(isLong = false) {
  shown = chosen = null;
  cancelAnimationFrame(waiting);
  waiting = 0;
  $("cache").classList.add("empty");
  $("cache").classList.toggle("long", isLong);
  tokens.clear();
  timeline.clear();
  for (const id of ["kept", "evicted", "speed"]) $(id).textContent = "–";
  slider.disabled = true;
  slider.max = slider.value = 0;
  for (const segment of Object.values(segments)) segment.style.flexGrow = 0;
  bar.setAttribute("aria-label", "Nothing is in the memory yet");
}

export function show(look) {
  if (look !== shown) clear();
  shown = look;
  waiting ||= requestAnimationFrame(later);
}

function later(time) {
  if (time - drawn < EVERY) {
    waiting = requestAnimationFrame(later);
    return;
  }
  waiting = 0;
  drawn = time;
  if (shown?.last) draw();
}

function draw() {
  const look = shown;
  if (chosen && !look.moments.includes(chosen)) chosen = null;
  const moment = chosen ?? look.last;
  showNumbers(look);
  $("cache").classList.remove("empty");
  if (!$("cache").checkVisibility()) return;
  tokens.show(look, moment);
  timeline.show(look, moment);
  slider.disabled = look.moments.length < 2;
  slider.max = look.moments.length - 1;
  slider.value = chosen ? look.moments.indexOf(chosen) : slider.max;
  slider.setAttribute("aria-valuetext", `after ${moment.seen} tokens`);
}

function showNumbers(look) {
  const { seen, kept, speed } = look;
  $("kept").textContent = `${kept} of ${seen}`;
  const recalled = look.recalled();
  $("evicted").textContent = recalled ? `${seen - kept}, of them read again: ${recalled}` : seen - kept;
  if (speed) $("speed").textContent = `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;
  const counts = { ...look.counts(), forgotten: seen - kept };
  for (const [role, segment] of Object.entries(segments)) segment.style.flexGrow = counts[role];
  bar.setAttribute("aria-label", `${kept} of ${seen} tokens are remembered`);
}

// At once: when a reply ends, the panel is opened, or the appearance changes.
export function redraw() {
  cancelAnimationFrame(waiting);
  waiting = 0;
  if (shown?.last) draw();
}

export function showMemory(limits) {
  const evicted = limits?.has_archive ? "in the archive" : "forgotten";
  $("legend-evicted").textContent = evicted;
  $("legend-recalled").hidden = !limits?.has_archive;
  $("evicted-name").textContent = evicted[0].toUpperCase() + evicted.slice(1);
  tokens.evicted = limits?.has_archive ? "in the archive, read again where it matters" : "forgotten";
  $("memory").textContent = limits ? `${bytes(limits.cache_bytes)} of ${bytes(limits.full_cache_bytes)}` : "–";
}
