// A shown message, with what can be done with it.

import { copyButton, el, iconButton } from "./dom.js";
import { sharedWords } from "./kept.js";
import { Markdown } from "./markdown.js";
import { isCut, isWriting, progressOf } from "./replies.js";

const LEAST = 25; // ms between updates
const MOST_SHOWN = 20_000; // characters of a message of the user

const CUT = {
  length: "Cut off at the length limit.",
  stopped: "Cut off: it was stopped.",
  lost: "Cut off: the connection was lost.",
  closed: "Cut off: the page was closed.",
};

const duration = (seconds) =>
  (seconds < 100 ? `${seconds} s` : seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

export class Message {
  // act: what the buttons do.
  constructor(message, act) {
    this.message = message;
    this.act = act;
    const isUser = message.role === "user";
    this.content = el("div", { className: "content", dir: "auto" });
    this.bubble = el("div", { className: `message ${message.role}` }, this.content);
    this.notice = isUser ? "" : el("p", { className: "cut", hidden: true });
    this.tools = el("div", { className: "actions" });
    this.reading = isUser ? "" : el("p", { className: "reading hint", hidden: true });
    this.kept = el("p", { className: "kept hint", hidden: true });
    this.target = el("article", { className: `turn ${message.role}`, "aria-label": isUser ? "You" : "Reply" },
      this.bubble, this.notice, this.reading, this.kept, this.tools);
    if (!isUser) this.markdown = new Markdown(this.content);
    this.cost = this.last = 0;
  }

  // Updates at most every second frame, however many changes there are, and less often if it takes long.
  change(then) {
    if (this.waiting) return;
    this.waiting = true;
    const begin = () => requestAnimationFrame(() => {
      this.waiting = false;
      this.update();
      then();
    });
    const wait = this.last + Math.max(LEAST, 4 * this.cost) - performance.now();
    if (wait > 0) setTimeout(begin, wait);
    else begin();
  }

  update() {
    const begin = performance.now();
    const { role, content, reasoning_content: reasoning, tool_calls: calls = [] } = this.message;
    if (reasoning) this.fold("thinking", "Thinking", reasoning);
    calls.forEach((call, i) => this.fold(`call-${i}`, `Calls ${call.function.name}`, call.function.arguments));
    if (role === "user") this.showText(content);
    else this.markdown.update(content);
    this.showState();
    if (this.reading) this.showReading();
    // It only grows while it is written: what shrinks for a moment, such as the marks of a list to
    // come, would make the end jump.
    this.bubble.style.minHeight = isWriting(this.message) ? `${this.bubble.offsetHeight}px` : "";
    this.last = performance.now();
    this.cost = this.last - begin;
  }

  // Of a whole book, its beginning: laying it out would take seconds.
  showText(content) {
    const shown = content.length <= MOST_SHOWN ? content
      : `${content.slice(0, MOST_SHOWN)}… and ${(content.length - MOST_SHOWN).toLocaleString("en")} more characters`;
    if (this.content.textContent !== shown) this.content.textContent = shown;
  }

  fold(name, title, text) {
    let details = this.bubble.querySelector(`.${name}`);
    if (!details) {
      details = el("details", { className: name }, el("summary", {}, title), el("pre", { dir: "auto" }));
      if (name === "thinking") this.bubble.prepend(details);
      else this.bubble.append(details);
    }
    if (details.lastChild.textContent !== text) details.lastChild.textContent = text;
  }

  showState() {
    const { message } = this;
    const versions = this.act.versions(message);
    const state = [isWriting(message), isCut(message), message.reason, versions.length, versions.indexOf(message),
      Boolean(message.content)].join();
    if (state === this.state) return;
    this.state = state;
    this.target.classList.toggle("writing", isWriting(message));
    if (this.notice) this.showCut();
    this.tools.replaceChildren(...(isWriting(message) ? [] : this.buttons(versions)));
  }

  // How much of a long prompt was read, and when the rest will be.
  showReading() {
    const progress = progressOf(this.message);
    this.reading.hidden = !progress;
    if (!progress) return;
    const { total, processed, cache, time_ms: ms } = progress;
    const left = Math.ceil((ms / 1000) * ((total - processed) / (processed - cache)));
    const text = ` Read ${processed.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`
      + (Number.isFinite(left) ? `, about ${duration(left)} left` : "");
    this.reading.replaceChildren(el("progress", { max: total, value: processed, "aria-label": "Reading" }), text);
  }

  // kept: from keptIn().
  showKept(kept) {
    const share = kept?.shares[this.message.id];
    const words = kept ? sharedWords(share, kept) : "";
    this.kept.textContent = words;
    this.kept.hidden = !words;
    this.target.classList.toggle("faded", Boolean(words));
    this.target.style.setProperty("--kept", share ?? 0);
  }

  showCut() {
    const { message, notice } = this;
    notice.hidden = isWriting(message) || !(isCut(message) || this.isEmpty());
    if (notice.hidden) return;
    const text = !isCut(message) ? "The model said nothing."
      : CUT[message.reason] ?? CUT.closed;
    const canContinue = message.content && !message.tool_calls;
    notice.replaceChildren(text, " ", canContinue
      ? iconButton("play", "Continue", () => this.act.goOn(message), "Continue")
      : iconButton("again", "Try again", () => this.act.regenerate(message), "Try again"));
  }

  isEmpty() {
    const { content, reasoning_content: reasoning, tool_calls: calls } = this.message;
    return !content && !reasoning && !calls;
  }

  buttons(versions) {
    const { message, act } = this;
    const copy = copyButton(() => message.content);
    const own = message.role === "user"
      ? [iconButton("edit", "Edit", () => this.edit()), copy]
      : [copy, iconButton("again", "Regenerate", () => act.regenerate(message))];
    if (versions.length < 2) return own;
    const at = versions.indexOf(message);
    const go = (icon, name, to) => {
      const button = iconButton(icon, name, () => act.choose(versions[to]));
      button.disabled = !versions[to];
      return button;
    };
    return [...own, el("span", { className: "versions" }, go("left", "Previous version", at - 1),
      el("span", { "aria-label": `Version ${at + 1} of ${versions.length}`, role: "img" }, `${at + 1}/${versions.length}`),
      go("right", "Next version", at + 1))];
  }

  edit() {
    if (this.target.querySelector("form")) return;
    const box = el("textarea", { "aria-label": "Edit message", value: this.message.content, dir: "auto",
      rows: Math.min(12, this.message.content.split("\n").length + 1) });
    const end = () => {
      form.remove();
      this.bubble.hidden = this.tools.hidden = false;
      this.tools.querySelector("button")?.focus();
    };
    const form = el("form", {
      className: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        if (!box.value.trim() || !this.act.canAsk()) return;
        end();
        this.act.edit(this.message, box.value);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          end();
        } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    }, box, el("div", { className: "tools" }, el("button", { type: "submit", className: "main" }, "Save"),
      el("button", { type: "button", onclick: end }, "Cancel")));
    this.bubble.hidden = this.tools.hidden = true;
    this.target.append(form);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

// One piece of a text that the model continues.
export class Piece {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.target = el("span", { className: message.role === "user" ? "prompt" : "" });
  }

  change(then) {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = undefined;
      this.update();
      then();
    });
  }

  update() {
    const { content } = this.message;
    const there = this.target.textContent;
    if (content === there) return;
    if (content.startsWith(there)) this.target.append(content.slice(there.length));
    else this.target.textContent = content;
  }
}
