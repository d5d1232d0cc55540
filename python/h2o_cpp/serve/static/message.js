// A displayed message: reasoning and tool calls are collapsed, content is rendered as Markdown.

import { element, render } from "./markdown.js";

export class Message {
  constructor(said) {
    this.said = said;
    this.target = element("div");
    this.target.className = `message ${said.role}`;
    this.content = element("div");
    this.content.className = "content";
    this.target.append(this.content);
    this.update();
  }

  // Updates once per frame, however many changes there are.
  change() {
    this.waiting ??= requestAnimationFrame(() => this.update());
  }

  update() {
    cancelAnimationFrame(this.waiting);
    this.waiting = undefined;
    const { role, content, reasoning_content: reasoning, tool_calls: calls = [] } = this.said;
    if (reasoning) this.fold("thinking", "Thinking", reasoning);
    calls.forEach((call, i) => this.fold(`call-${i}`, `Calls ${call.function.name}`, call.function.arguments));
    if (role === "assistant") this.content.replaceChildren(render(content ?? ""));
    else this.content.textContent = content;
  }

  fold(name, title, text) {
    let details = this.target.querySelector(`.${name}`);
    if (!details) {
      details = element("details");
      details.className = name;
      details.append(element("summary", title), element("pre"));
      if (name === "thinking") this.target.prepend(details);
      else this.target.append(details);
    }
    details.lastChild.textContent = text;
  }
}
