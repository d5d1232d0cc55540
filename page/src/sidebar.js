// The list of conversations.

import { $, el, iconButton } from "./dom.js";
import { running } from "./replies.js";
import * as store from "./store.js";

let found = null; // ids, while something is searched for
const items = new Map(); // by conversation

export class Sidebar {
  // open, remove: called with a conversation.
  constructor({ open, remove }) {
    this.open = open;
    this.remove = remove;
    $("search").addEventListener("input", () => this.search());
    $("conversations").addEventListener("keydown", (event) => this.move(event));
  }

  async search() {
    const text = $("search").value.trim();
    const ids = text ? await store.search(text) : null;
    if ($("search").value.trim() !== text) return; // typed on since
    found = ids;
    this.show(this.current);
  }

  show(current) {
    this.current = current;
    const shown = store.list().filter(({ id }) => !found || found.has(id));
    const list = $("conversations");
    for (const one of items.keys()) if (!store.conversations.has(one)) items.delete(one);
    shown.forEach((one, i) => { // what stays in its place keeps the focus
      const item = this.item(one);
      if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
    });
    while (list.children.length > shown.length) list.lastChild.remove();
    $("no-conversations").textContent = found ? "Nothing was found." : "Your conversations will be here.";
    $("no-conversations").hidden = shown.length > 0;
  }

  item({ id, title }) {
    if (!items.has(id)) items.set(id, this.made(id, title));
    const item = items.get(id);
    const [button] = item.children;
    if (id === this.current?.id) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
    button.classList.toggle("running", running.has(id));
    return item;
  }

  made(id, title) {
    const act = (what) => () => what(store.conversations.get(id));
    const button = el("button", { type: "button", className: "open", textContent: title, dir: "auto", onclick: act(this.open) });
    const remove = iconButton("trash", `Delete ${title}`, act(this.remove));
    remove.classList.add("remove");
    return el("li", {}, button, remove);
  }

  move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const buttons = [...$("conversations").querySelectorAll(".open")];
    const next = buttons[buttons.indexOf(document.activeElement.closest("li")?.firstChild) + step];
    if (!step || !next) return;
    event.preventDefault();
    next.focus();
  }
}
