// The tokens that the cache has seen, shaded by the share of heads that keep them.

const text = document.getElementById("tokens");
const detail = document.getElementById("detail");
const hint = detail.textContent;

let kept = null; // the last report of kept tokens
let current = -1; // the position shown in the details

export function clear() {
  kept = null;
  current = -1;
  text.replaceChildren();
  detail.textContent = hint;
}

export function show(look) {
  kept = look;
  for (const piece of look.pieces) {
    const span = document.createElement("span");
    span.textContent = piece.replaceAll("\n", "↵\n");
    text.append(span);
  }
  [...text.children].forEach((span, position) => {
    span.className = role(position) + (position === current ? " current" : "");
    span.style.setProperty("--strength", (0.08 + 0.52 * look.shares[position]).toFixed(2));
  });
  describe();
}

function role(position) {
  const { sinks, recent } = kept.policy;
  if (kept.shares[position] === 0) return "evicted";
  if (position < sinks) return "sink";
  if (recent === null || position >= kept.tokens_seen - recent) return "recent";
  return "heavy";
}

function describe() {
  if (current < 0) return;
  const share = kept.shares[current];
  detail.textContent = [
    `Position ${current}`,
    JSON.stringify(text.children[current].textContent.replaceAll("↵\n", "\n")),
    role(current).replace("heavy", "heavy hitter"),
    share > 0 ? `kept by ${Math.round(100 * share)} % of the heads` : "kept by no head",
  ].join(" · ");
}

function setCurrent(position) {
  const n = text.children.length;
  if (n === 0) return;
  text.querySelector(".current")?.classList.remove("current");
  current = Math.max(0, Math.min(n - 1, position));
  text.children[current].classList.add("current");
  describe();
}

text.addEventListener("pointerover", (event) => {
  if (event.target !== text) setCurrent([...text.children].indexOf(event.target));
});
text.addEventListener("keydown", (event) => {
  const last = text.children.length - 1;
  const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  setCurrent(to);
  text.children[current].scrollIntoView({ block: "nearest" });
});
