// A line for each token, from when it was read to when the last head forgot it.

import { $ } from "../dom.js";

export class Timeline {
  canvas = $("timeline");
  text = $("timeline-text");
  hint = $("timeline-text").textContent;

  clear() {
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.canvas.setAttribute("aria-label", "No evictions yet");
    this.text.textContent = this.hint;
  }

  show(look, chosen) {
    const { width, height } = this.canvas;
    const colors = this.colors();
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const n = look.seen;
    let at = 0;
    for (let x = 0; x < width; x += 1) {
      const time = ((x + 1) / width) * n;
      while (at < look.moments.length - 1 && look.moments[at].seen < time) at += 1;
      const moment = look.moments[at];
      const dimmed = chosen !== look.last && moment.seen > chosen.seen;
      for (let y = 0; y < height; y += 1) {
        const begin = Math.floor((y / height) * n);
        if (begin >= time) break;
        const end = Math.max(begin + 1, Math.floor(((y + 1) / height) * n));
        let best = begin; // of the tokens of this row, what most heads keep
        for (let i = begin + 1; i < end; i += 1) if (moment.shares[i] > moment.shares[best]) best = i;
        const alpha = moment.shares[best] ? 90 + 0.64 * moment.shares[best] : 0;
        if (alpha) pixels[y * width + x] = ((dimmed ? alpha / 3 : alpha) << 24) | colors[look.role(best, moment)];
      }
    }
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    this.describe(look);
  }

  describe(look) {
    const forgotten = look.seen - look.kept;
    const first = look.moments.find(({ seen, kept }) => kept < seen);
    const text = look.policy.recent === null ? "Nothing is forgotten: this memory has no limit. Set a budget below."
      : first ? `It began to forget after ${first.seen} tokens. By now each of its heads has forgotten ${forgotten} of ${look.seen}.`
        : "Nothing has been forgotten yet.";
    this.text.textContent = `${text} ${this.hint}`;
    this.canvas.setAttribute("aria-label", text);
  }

  // As little-endian pixels without alpha. The page's colors change with its appearance.
  colors() {
    const found = {};
    for (const role of ["sink", "heavy", "recent"]) {
      const [r, g, b] = getComputedStyle($("cache")).getPropertyValue(`--${role}-rgb`).trim().split(" ").map(Number);
      found[role] = (b << 16) | (g << 8) | r;
    }
    return found;
  }
}
