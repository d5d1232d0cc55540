// Renders Markdown that grows: only the blocks that changed are made again, so that nothing above
// the end of a reply moves or loses a selection.

import { tasklist } from "@mdit/plugin-tasklist";
import DOMPurify from "dompurify";
import MarkdownIt from "markdown-it";
import { copyButton, el } from "./dom.js";
import { mathRules } from "./math_rules.js";

const md = new MarkdownIt({ html: false, linkify: true, breaks: true });
const escape = md.utils.escapeHtml;
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.use(tasklist, { label: false });
md.use(mathRules, formula);
Object.assign(md.renderer.rules, {
  fence: (tokens, i) => fence(tokens[i].content, tokens[i].info.trim().split(/\s/)[0]),
  code_block: (tokens, i) => code(tokens[i].content, ""),
  // Pictures of other servers are not loaded; a link says where they are.
  image: (tokens, i) => `<a href="${escape(tokens[i].attrGet("src"))}">${escape(tokens[i].content || "picture")}</a>`,
});
for (const name of ["th_open", "td_open"]) {
  md.renderer.rules[name] = (tokens, i, options, _, self) => { // the page's policy forbids styles
    const side = tokens[i].attrGet("style")?.replace("text-align:", "");
    tokens[i].attrs = side ? [["class", side]] : null;
    return self.renderToken(tokens, i, options);
  };
}
for (const name of ["heading_open", "heading_close"]) {
  md.renderer.rules[name] = (tokens, i, options, _, self) => { // the page has h1 and h2
    tokens[i].tag = `h${Math.min(6, Number(tokens[i].tag[1]) + 2)}`;
    return self.renderToken(tokens, i, options);
  };
}

function formula(source, isDisplay) {
  return `<span class="formula${isDisplay ? " display" : ""}">${escape(source)}</span>`;
}

function fence(text, language) {
  return language === "math" ? formula(text.trim(), true) : code(text, language);
}

function code(text, language) {
  const name = language ? ` class="language-${escape(language)}"` : "";
  return `<pre><code${name}>${escape(text)}</code></pre>`;
}

const CLEAN = { USE_PROFILES: { html: true }, FORBID_TAGS: ["style", "form", "img"], FORBID_ATTR: ["style", "id", "name"],
  RETURN_DOM_FRAGMENT: true };
const PARAGRAPHS = "p, li, ul, ol, h3, h4, h5, h6, blockquote, td, th";

const libraries = {}; // loaded when a reply first needs them

function whenLoaded(name, load, use) {
  const there = libraries[name];
  if (there?.use) return there.use(use);
  libraries[name] ??= { loading: load() };
  libraries[name].loading.then((module) => {
    libraries[name].use = (next) => next(module);
    use(module);
  }, () => {}); // the text stays as it is
}

const DEFINES_LINK = /^ {0,3}\[[^\]]+\]:/m; // which may be used above

export class Markdown {
  constructor(target) {
    this.target = target;
    this.source = "";
    this.blocks = []; // the source of each, its first line, and its element
  }

  // What is appended changes the last block, and blocks after it.
  update(source) {
    if (source === this.source) return;
    const isMore = source.startsWith(this.source) && !DEFINES_LINK.test(source);
    let n = isMore ? Math.max(0, this.blocks.length - 1) : 0;
    const first = n ? this.blocks[n].line : 0;
    this.source = source;
    const lines = source.split("\n").slice(first);
    const environment = {};
    const tokens = md.parse(lines.join("\n"), environment);
    const links = Object.keys(environment.references ?? {}).length;
    for (let i = 0, begin = 0, depth = 0; i < tokens.length; i += 1) {
      depth += tokens[i].nesting;
      if (depth) continue;
      const block = tokens.slice(begin, i + 1);
      const [from, to] = block[0].map;
      const key = `${links} ${block[0].type} ${lines.slice(from, to).join("\n")}`;
      if (this.blocks[n]?.key !== key) this.set(n, key, md.renderer.render(block, md.options, environment));
      this.blocks[n].line = first + from;
      n += 1;
      begin = i + 1;
    }
    for (const { element } of this.blocks.splice(n)) element.remove();
  }

  set(n, key, html) {
    const element = el("div", { className: "block" });
    element.append(DOMPurify.sanitize(html, CLEAN));
    enhance(element);
    if (this.blocks[n]) this.blocks[n].element.replaceWith(element);
    else this.target.append(element);
    this.blocks[n] = { key, element };
  }
}

function enhance(block) {
  for (const one of block.querySelectorAll(PARAGRAPHS)) one.dir = "auto";
  for (const link of block.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const box of block.querySelectorAll("input")) box.setAttribute("aria-label", "done");
  for (const table of block.querySelectorAll("table")) {
    const place = el("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(place);
    place.append(table);
  }
  for (const inner of block.querySelectorAll("pre > code")) {
    const language = inner.className.replace("language-", "");
    const place = el("div", { className: "code" });
    inner.parentNode.replaceWith(place);
    const bar = el("div", { className: "bar" }, el("span", {}, language), copyButton(() => inner.textContent));
    const pre = el("pre", { dir: "ltr", tabIndex: 0 }, inner);
    place.append(bar, pre);
    if (language) whenLoaded("code", () => import("./code.js"), ({ highlight }) => highlight(inner, language));
  }
  for (const formula of block.querySelectorAll(".formula")) {
    whenLoaded("formulas", () => import("./formulas.js"), ({ show }) => show(formula));
  }
}
