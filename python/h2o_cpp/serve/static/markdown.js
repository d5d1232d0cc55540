// Renders Markdown as elements. All text goes into text nodes; links are http or https only.

const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;

export function render(source) {
  const result = document.createDocumentFragment();
  const lines = source.split("\n");
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const fence = line.match(/^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/);
    if (fence) {
      const end = lines.findIndex((one, j) => j > i && one.trim().startsWith(fence[1]));
      const stop = end < 0 ? lines.length : end;
      result.append(code(lines.slice(i + 1, stop).join("\n"), fence[2]));
      i = stop + 1;
    } else if (!line.trim()) {
      i += 1;
    } else if (/^#{1,6} /.test(line)) {
      result.append(block(`h${Math.min(6, line.indexOf(" ") + 2)}`, line.replace(/^#+ +/, "")));
      i += 1;
    } else if (ITEM.test(line)) {
      const list = element(line.match(ITEM)[1] ? "ol" : "ul");
      if (list.tagName === "OL") list.start = Number(line.match(ITEM)[1]);
      for (; i < lines.length && ITEM.test(lines[i]); i += 1) list.append(block("li", lines[i].match(ITEM)[2]));
      result.append(list);
    } else if (line.startsWith(">")) {
      const quoted = [];
      for (; i < lines.length && lines[i].startsWith(">"); i += 1) quoted.push(lines[i].replace(/^> ?/, ""));
      result.append(block("blockquote", quoted.join("\n")));
    } else {
      const text = [];
      for (; i < lines.length && lines[i].trim() && !/^(#{1,6} |>|\s*(```|~~~))/.test(lines[i])
        && !(text.length && ITEM.test(lines[i])); i += 1) text.push(lines[i]);
      result.append(block("p", text.join("\n")));
    }
  }
  return result;
}

function code(text, language) {
  const pre = element("pre");
  const inside = element("code", text);
  if (language) inside.dataset.language = language;
  pre.append(inside);
  return pre;
}

function block(name, text) {
  const target = element(name);
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , span, strong, em, label, url] = found;
    target.append(text.slice(at, found.index));
    if (span !== undefined) target.append(element("code", span));
    else if (strong !== undefined) target.append(element("strong", strong));
    else if (em !== undefined) target.append(element("em", em));
    else {
      const link = element("a", label);
      link.href = url;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      target.append(link);
    }
    at = found.index + whole.length;
  }
  target.append(text.slice(at));
  return target;
}

export function element(name, text = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  return made;
}
