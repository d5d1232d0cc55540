// Requests to the server, and its streams.

export class Refused extends Error {
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
  throw new Refused(response.status, message || `the server answered with status ${response.status}`);
}

async function request(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error instanceof TypeError) throw new Refused(0, "The server cannot be reached.");
    throw error;
  }
}

export async function models(key) {
  const response = await request("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

// JSON.stringify writes 1.0 as 1, which means one token, so hh is inserted as typed.
function withBudget(body, hh) {
  const text = JSON.stringify(body);
  return hh ? `${text.slice(0, -1)},"hh":${hh}}` : text;
}

export async function complete(path, body, { hh, key, signal }) {
  const response = await request(path, { method: "POST", headers: headers(key), body: withBudget(body, hh), signal });
  return response.json();
}

// Yields the first choice of each chunk; before them { progress }, and at the end { usage, memory }.
export async function* stream(path, body, { hh, key, signal }) {
  const text = withBudget({ ...body, stream: true, stream_options: { include_usage: true } }, hh);
  const response = await request(path, { method: "POST", headers: headers(key), body: text, signal });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(503, chunk.error.message);
      yield chunk.choices[0] ?? { usage: chunk.usage, memory: chunk.message_memory, progress: chunk.prompt_progress };
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Refused(0, "The connection to the server was lost.");
    throw error;
  }
  throw new Refused(0, "The server closed the stream.");
}

// The data of server-sent events; comments and other fields are left out.
async function* events(body) {
  let rest = "";
  for await (const part of decoded(body)) {
    const found = (rest + part).replaceAll("\r\n", "\n").split("\n\n");
    rest = found.pop();
    for (const event of found) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
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
