// Highlights code.

import hljs from "highlight.js/lib/common";

const MOST = 50_000; // characters

export function highlight(target, language) {
  const text = target.textContent;
  if (text.length > MOST || !hljs.getLanguage(language)) return;
  target.innerHTML = hljs.highlight(text, { language, ignoreIllegals: true }).value; // it escapes the text
}
