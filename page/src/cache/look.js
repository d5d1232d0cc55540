// What the cache kept of one text, from moment to moment, as the server reported it.

const MOST = 96; // moments; then only half as many are kept of what follows
const MOST_STORED = 32; // in the browser's storage

export class Look {
  pieces = [];
  moments = []; // tokens seen and kept; of each, from 0 to 255, the share of heads that keep it, and of those
  // with an archive that recalled it since the server's last report
  policy = null;
  seen = 0;
  kept = 0;
  speed = 0;
  stride = 0; // tokens between moments, at least

  static of(stored) {
    return stored && Object.assign(new Look(), stored);
  }

  add({ pieces, shares, recalls = [], policy, tokens_seen: seen, tokens_kept: kept }, speed) {
    this.pieces.push(...pieces);
    Object.assign(this, { policy, seen, kept, speed });
    const { moments } = this;
    if (moments.length > 1 && moments.at(-1).seen - moments.at(-2).seen < this.stride) moments.pop();
    moments.push({ seen, kept, shares: bytesOf(shares), recalls: bytesOf(recalls) });
    if (moments.length > MOST) {
      this.moments = moments.filter((_, i) => i % 2 === 0 || i === moments.length - 1);
      this.stride = Math.max(2 * this.stride, this.moments[2].seen - this.moments[1].seen);
    }
  }

  // What is stored of it.
  record() {
    const step = Math.ceil(this.moments.length / MOST_STORED);
    const moments = this.moments.filter((one, i) => i % step === 0 || one === this.last);
    return { ...this, moments };
  }

  get last() {
    return this.moments.at(-1);
  }

  role(position, { seen, shares, recalls }) {
    const { sinks, recent } = this.policy;
    if (!shares[position]) return recalls?.[position] ? "recalled" : "evicted";
    if (position < sinks) return "sink";
    if (recent === null || position >= seen - recent) return "recent";
    return "heavy";
  }

  // Tokens per head, by role.
  counts(moment = this.last) {
    const found = { sink: 0, heavy: 0, recent: 0 };
    moment.shares.forEach((share, position) => {
      if (share) found[this.role(position, moment)] += share / 255;
    });
    return found;
  }

  // Tokens that no head keeps, but some head recalled.
  recalled(moment = this.last) {
    return moment.shares.reduce((n, _, position) => n + (this.role(position, moment) === "recalled"), 0);
  }
}

// Any share but zero is shown.
const bytesOf = (shares) => Uint8Array.from(shares, (share) => Math.ceil(share * 255));

const SHORT = 50; // ms; reports that come at once say nothing of the speed

// Tokens per second between reports, from the first one on, or since the request if it was just now.
export class Clock {
  begin = { seen: 0, time: performance.now() };

  perSecond(seen) {
    const time = performance.now();
    this.first ??= { seen, time };
    const since = time - this.first.time > SHORT ? this.first : this.begin;
    return ((seen - since.seen) / (time - since.time)) * 1000;
  }
}
