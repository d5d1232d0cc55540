// The shown conversation.

import { $, copyButton, el, iconButton } from "./dom.js";
import { Follow } from "./follow.js";
import { keptIn, warning } from "./kept.js";
import { Message, Piece } from "./message.js";
import { running } from "./replies.js";
import * as store from "./store.js";

const AT_ONCE = 12; // messages; what is above them in a long conversation is shown a little later

function update(view) {
  view.update();
  view.isShown = true;
}

export class Log {
  target = $("log");
  follow = new Follow($("log"), $("to-end"));
  views = new Map(); // by message id
  place = null; // the conversation and its messages

  // act: what the buttons of messages do.
  constructor(act) {
    this.act = { ...act, versions: (message) => store.versions(this.place.messages, message) };
    this.content = el("div", { className: "column" });
    this.target.append(this.content);
    this.follow.watch(this.content);
  }

  show(place) {
    const isOther = place.conversation !== this.place?.conversation;
    if (isOther) this.views.clear();
    this.place = place;
    const { conversation, messages } = place;
    const isText = conversation.mode === "continue";
    const branch = store.branch(messages, conversation.leaf);
    const shown = branch.map((message) => this.view(message, isText));
    const kept = keptIn(conversation, branch);
    if (!isText) for (const view of shown) view.showKept(kept);
    $("forgot").textContent = isText ? "" : warning(kept, branch);
    $("forgot").hidden = !$("forgot").textContent;
    const late = shown.slice(0, -AT_ONCE).filter((view) => !view.isShown);
    for (const view of shown) if (!late.includes(view)) update(view);
    this.updateLater(late);
    this.target.setAttribute("aria-busy", running.has(conversation.id));
    const targets = shown.map(({ target }) => target);
    $("welcome").hidden = targets.length > 0;
    if (isText) this.content.replaceChildren(el("div", { className: "prose", dir: "auto" }, ...targets), this.textActions());
    else this.reconcile(targets);
    if (isOther) this.follow.isOn = true;
    this.follow.toEnd();
  }

  // The messages above, from the end on, without moving the reader.
  updateLater(late) {
    clearTimeout(this.waiting);
    if (!late.length) return;
    this.waiting = setTimeout(() => {
      const before = this.target.scrollHeight;
      const begin = performance.now();
      while (late.length && performance.now() - begin < 8) update(late.pop());
      if (!this.follow.isOn) this.target.scrollTop += this.target.scrollHeight - before;
      this.follow.toEnd();
      this.updateLater(late);
    });
  }

  // Elements that stay are not moved, so that they keep their focus and selection.
  reconcile(targets) {
    targets.forEach((target, i) => {
      if (this.content.children[i] !== target) this.content.insertBefore(target, this.content.children[i] ?? null);
    });
    while (this.content.children.length > targets.length) this.content.lastChild.remove();
  }

  view(message, isText) {
    let view = this.views.get(message.id);
    if (view?.message !== message) {
      view = new (isText ? Piece : Message)(message, this.act);
      this.views.set(message.id, view);
    }
    return view;
  }

  change(message) {
    this.views.get(message.id)?.change(() => this.follow.toEnd());
  }

  textActions() {
    const { conversation, messages } = this.place;
    const last = messages.get(conversation.leaf);
    if (!last || running.has(conversation.id)) return "";
    const whole = () => store.branch(messages, conversation.leaf).map(({ content }) => content).join("");
    const versions = this.act.versions(last);
    const at = versions.indexOf(last);
    const others = versions.length < 2 ? [] : [
      iconButton("left", "Previous version", () => this.act.choose(versions[(at || versions.length) - 1])),
      iconButton("right", "Next version", () => this.act.choose(versions[(at + 1) % versions.length])),
    ];
    return el("div", { className: "actions" }, copyButton(whole),
      ...(last.role === "user" ? [] : [iconButton("again", "Regenerate", () => this.act.regenerate(last))]), ...others);
  }
}
