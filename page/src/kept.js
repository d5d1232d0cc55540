// How much of each message the model still has, as the server told it at the end of a reply.

// What is stored of it: `messages` are those of the request, without the system prompt.
export function keptOf(reply, messages, shares = [], { archived_tokens: archived, dropped_tokens: dropped }) {
  const begin = shares.length - messages.length; // after the system prompt
  if (begin < 0) return undefined;
  return { reply: reply.id, archived: archived > 0, dropped: dropped > 0, system: begin ? shares[0] : undefined,
    shares: Object.fromEntries(messages.map(({ id }, i) => [id, shares[begin + i]])) };
}

// That of the shown branch; undefined: it is not known.
export const keptIn = ({ kept }, branch) => (kept && branch.some(({ id }) => id === kept.reply) ? kept : undefined);

// Whether nothing of a message is left. A template may leave out a message that was not dropped.
const isLost = (share, { dropped }) => share === 0 || (dropped && share === null);

// In words; "" for a message that is kept as a whole.
export function sharedWords(share, kept) {
  if (isLost(share, kept)) return share === null ? "left out" : kept.archived ? "in the archive" : "forgotten";
  return share === undefined || share === null || share === 1 ? "" : `${Math.max(1, Math.floor(100 * share))}% kept`;
}

// A warning about instructions and whole turns that are lost; "" if there are none.
export function warning(kept, branch) {
  if (!kept) return "";
  const lost = branch.filter(({ id }) => isLost(kept.shares[id], kept));
  const answered = lost.filter(({ role }) => role === "assistant").map(({ parent }) => parent);
  const turns = lost.filter(({ role, id }) => role === "user" && answered.includes(id)).length;
  const what = [
    ...(isLost(kept.system, kept) ? ["the system prompt"] : []),
    ...(turns ? [turns === 1 ? "one earlier turn" : `${turns} earlier turns`] : []),
  ];
  if (!what.length) return "";
  const how = kept.dropped ? "no longer reads" : kept.archived ? "has only in its archive" : "has forgotten";
  return `The model ${how} ${what.join(" and ")}.`;
}
