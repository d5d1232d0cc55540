// Requests to the server, and its streams.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* not an error response of this server */ }
  throw new Refused(response.status, message);
}

export async function models(key) {
  const response = await checked(await fetch("v1/models", { headers: headers(key) }));
  return (await response.json()).data;
}

// Yields the first choice of each chunk. JSON.stringify writes 1.0 as 1, which means one token, so
// hh is inserted into the body as typed.
export async function* stream(path, body, { hh, key, signal }) {
  let text = JSON.stringify({ ...body, stream: true });
  if (hh) text = `${text.slice(0, -1)},"hh":${hh}}`;
  const request = { method: "POST", headers: headers(key), body: text, signal };
  const response = await checked(await fetch(path, request));
  let rest = "";
  for await (const part of decoded(response.body)) {
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(503, chunk.error.message);
      if (chunk.choices.length) yield chunk.choices[0];
    }
  }
  throw new Refused(0, "the server closed the stream");
}

// Not every browser supports async iteration over streams.
async function* decoded(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
