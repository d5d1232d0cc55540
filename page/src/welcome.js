// What an empty conversation shows.

import { el } from "./dom.js";

const WORDS = [["Once ", "sink s4"], ["upon ", "sink s4"], ["a time ", "evicted"], ["an ", "evicted"], ["old ", "evicted"],
  ["captain ", "heavy s4"], ["went ", "evicted"], ["down ", "evicted"], ["to ", "evicted"], ["the ", "evicted"],
  ["sea", "heavy s3"], [" and ", "evicted"], ["looked ", "evicted"], ["for ", "recent s4"], ["his ", "recent s4"],
  ["ship", "recent s4"]];

export const welcome = () => el("div", { id: "welcome", className: "welcome" },
  el("h2", {}, "What would you like to know?"),
  el("p", {}, "A model that remembers what matters and forgets the rest, so that long conversations stay fast. "
    + "Beside the conversation you see what it remembers:"),
  el("p", { className: "example", "aria-label": "Example: first, often used and recent words are colored; others are gray" },
    ...WORDS.map(([word, className]) => el("span", { className }, word))),
  el("p", { className: "hint" }, "Conversations stay in this browser."));
