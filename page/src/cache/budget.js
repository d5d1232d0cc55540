// What a budget means for a model.

import { bytes } from "../dom.js";

export const isBudget = (typed) => /^(0|[1-9]\d*)(\.\d+)?$/.test(typed);

// A fraction of the context, or a number of tokens.
export const tokensOf = (typed, nCtx) =>
  (typed.includes(".") ? Math.max(1, Math.floor(Number(typed) * nCtx)) : Number(typed));

// Tokens that a budget keeps at most; without one, those of the model.
export function slotsOf(typed, { n_ctx: nCtx, policy }) {
  if (typed) return Math.min(tokensOf(typed, nCtx), nCtx);
  return policy.recent === null ? nCtx : policy.sinks + policy.heavy + policy.recent;
}

// Bytes of a cache of n tokens.
export const sizeOf = (n, limits) => (n / slotsOf("", limits)) * limits.cache_bytes;

export function cost(typed, limits) {
  if (typed && !isBudget(typed)) return "A budget is a fraction of the context, such as 0.1, or a number of tokens, such as 60.";
  if (!limits) return "";
  const { n_ctx: nCtx, full_cache_bytes: full } = limits;
  const n = slotsOf(typed, limits);
  const size = bytes(sizeOf(n, limits));
  if (!typed) {
    return `A fraction of the context, such as 0.1, or a number of tokens, such as 60. Without one, the model keeps `
      + `${n} tokens in ${size}.`;
  }
  return `Remembers ${n} of at most ${nCtx} tokens, in ${size} instead of ${bytes(full)}.`;
}
