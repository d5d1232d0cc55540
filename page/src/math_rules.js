// Formulas in Markdown: $...$ and \(...\), and on their own $$...$$ and \[...\].

const BLOCKS = { "$$": "$$", "\\[": "\\]" };
const INLINE = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

// render: from TeX, and whether it stands on its own, to HTML.
export function mathRules(md, render) {
  md.block.ruler.before("fence", "formula", block, { alt: ["paragraph", "blockquote", "list"] });
  md.inline.ruler.before("escape", "formula", inline);
  md.renderer.rules.formula_block = (tokens, i) => render(tokens[i].content, true);
  md.renderer.rules.formula = (tokens, i) => render(tokens[i].content, tokens[i].markup);
}

// The formula ends its last line. Without an end before an empty line, it is text.
function block(state, begin, last, isTrial) {
  const line = (i) => state.src.slice(state.bMarks[i] + state.tShift[i], state.eMarks[i]).trimEnd();
  const open = line(begin).slice(0, 2);
  const close = BLOCKS[open];
  if (!close || state.sCount[begin] - state.blkIndent >= 4) return false;
  let text = line(begin).slice(2);
  let end = begin;
  while (!text.includes(close)) {
    end += 1;
    if (end >= last || !line(end) || state.sCount[end] < state.blkIndent) return false;
    text += `\n${line(end)}`;
  }
  if (text.indexOf(close) !== text.length - close.length || text === close) return false;
  if (isTrial) return true;
  const token = state.push("formula_block", "div", 0);
  token.content = text.slice(0, -close.length).trim();
  token.map = [begin, end + 1];
  state.line = end + 1;
  return true;
}

function inline(state, isSilent) {
  const found = INLINE.find(([open]) => state.src.startsWith(open, state.pos));
  if (!found) return false;
  const [open, close, isDisplay] = found;
  const begin = state.pos + open.length;
  const end = endOf(state.src, begin, close);
  const text = state.src.slice(begin, end);
  if (end < 0 || !text.trim() || (open === "$" && !isLikely(text, state.src[end + 1]))) return false;
  if (!isSilent) {
    const token = state.push("formula", "span", 0);
    token.content = text.trim();
    token.markup = isDisplay;
  }
  state.pos = end + close.length;
  return true;
}

function endOf(source, begin, close) {
  let end = source.indexOf(close, begin);
  while (close === "$" && end > 0 && source[end - 1] === "\\") end = source.indexOf(close, end + 1);
  return end;
}

// Prices are no formulas: "$5 or $6".
const isLikely = (text, next = "") => !/^\s|\s$/.test(text) && !/\d/.test(next) && text.length < 1000;
