// Every token in the order of the text, shaded by the share of heads that keep it.

import { $, el } from "../dom.js";

const NAMES = { sink: "first", heavy: "heavy hitter", recent: "recent" };

export class Tokens {
  target = $("tokens");
  detail = $("detail");
  hint = $("detail").textContent;
  spans = [];
  look = null;
  current = -1;
  evicted = "forgotten"; // what became of a token that no head keeps

  constructor() {
    this.target.addEventListener("pointerover", ({ target }) => {
      if (target.position !== undefined) this.setCurrent(target.position);
    });
    this.target.addEventListener("keydown", (event) => this.move(event));
  }

  clear() {
    this.look = null;
    this.spans = [];
    this.current = -1;
    this.target.replaceChildren();
    this.detail.textContent = this.hint;
  }

  show(look, moment) {
    if (look !== this.look) this.clear();
    this.look = look;
    this.moment = moment;
    const atEnd = this.target.scrollHeight - this.target.scrollTop - this.target.clientHeight < 40;
    const before = this.spans.length;
    this.append(look.pieces);
    this.spans.forEach((span, position) => {
      const name = this.name(position);
      if (span.name !== name) {
        span.name = name;
        span.className = name + (position === this.current ? " current" : "");
      }
    });
    if (atEnd && this.spans.length > before) this.target.scrollTop = this.target.scrollHeight;
    this.describe();
  }

  // Each line is a block, so that the browser lays out the last one alone.
  append(pieces) {
    let line = this.target.lastChild;
    for (let position = this.spans.length; position < pieces.length; position += 1) {
      if (!line || pieces[position - 1]?.includes("\n")) {
        line = el("div");
        this.target.append(line);
      }
      const span = el("span", { textContent: pieces[position].replaceAll("\n", "↵"), position });
      this.spans.push(span);
      line.append(span);
    }
  }

  name(position) {
    const { look, moment } = this;
    if (position >= moment.seen) return "later";
    const role = look.role(position, moment);
    return role in NAMES ? `${role} s${Math.ceil(moment.shares[position] / 64)}` : role;
  }

  describe() {
    if (this.current < 0) return;
    const role = this.name(this.current).split(" ")[0];
    const share = this.moment.shares[this.current] ?? 0;
    this.detail.textContent = [
      `Position ${this.current}`,
      JSON.stringify(this.look.pieces[this.current]),
      ...this.state(role, share),
    ].join(" · ");
  }

  state(role, share) {
    if (role === "later") return ["not read yet"];
    if (role === "evicted") return [this.evicted, "kept by no head"];
    if (role === "recalled") {
      const heads = Math.ceil(this.moment.recalls[this.current] / 2.55);
      return [`read again from the archive by ${heads} % of the heads`, "kept by no head"];
    }
    return [NAMES[role], `kept by ${Math.round(share / 2.55)} % of the heads`];
  }

  setCurrent(position) {
    if (!this.spans.length) return;
    this.spans[this.current]?.classList.remove("current");
    this.current = Math.max(0, Math.min(this.spans.length - 1, position));
    this.spans[this.current].classList.add("current");
    this.describe();
  }

  move(event) {
    const last = this.spans.length - 1;
    const to = { ArrowLeft: this.current - 1, ArrowRight: this.current + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.setCurrent(to);
    this.spans[this.current].scrollIntoView({ block: "nearest" });
  }
}
