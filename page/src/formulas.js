// Shows TeX. KaTeX sets styles by properties, which the page's policy allows.

import katex from "katex";
import { el } from "./dom.js";

document.head.append(el("link", { rel: "stylesheet", href: "static/formulas.css" }));

const LIMITS = { maxSize: 20, maxExpand: 200, strict: false, trust: false };

export function show(target) {
  const source = target.textContent;
  try {
    katex.render(source, target, { displayMode: target.classList.contains("display"), ...LIMITS });
  } catch { // not TeX, or more than KaTeX knows
    target.textContent = source;
    target.classList.add("unknown");
  }
}
