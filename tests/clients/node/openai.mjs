// openai-node: `node openai.mjs URLS TAG SCENARIOS` prints what each scenario saw, as JSON. URLS is a JSON object: server's name → base URL.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const urls = JSON.parse(process.argv[2]);
const tag = process.argv[3];
const only = process.argv[4].split(",");
const neverEnd = { 2: -100 }; // the packaged model's end token

function client(server, scenario, timeout = 20_000) {
  return new OpenAI({
    baseURL: `${urls[server]}/v1`,
    apiKey: "k",
    maxRetries: 0,
    timeout,
    defaultHeaders: { "X-Request-Id": `${tag}-${scenario}` },
  });
}

const body = (fields) => ({ model: "m", messages: [{ role: "user", content: "hi" }], ...fields });

// Whatever ends the stream, `seen` has what came before it.
async function read(stream, seen, stopAfter = Infinity) {
  Object.assign(seen, { text: "", finish: [], roles: [], ids: [], usage: null, empty: 0 });
  let count = 0;
  for await (const chunk of stream) {
    if (!seen.ids.includes(chunk.id)) seen.ids.push(chunk.id);
    if (chunk.usage) seen.usage = chunk.usage;
    if (chunk.choices.length === 0) {
      seen.empty += 1;
      continue;
    }
    const choice = chunk.choices[0];
    seen.text += (choice.delta ? choice.delta.content : choice.text) ?? "";
    if (choice.delta?.role) seen.roles.push(choice.delta.role);
    if (choice.finish_reason) seen.finish.push(choice.finish_reason);
    count += 1;
    if (count === stopAfter) break; // leaving the loop closes the connection
  }
}

async function chat(server, scenario, seen, fields, stopAfter) {
  await read(await client(server, scenario).chat.completions.create(body({ stream: true, ...fields })), seen, stopAfter);
}

const scenarios = {
  full: (seen) => chat("plain", "full", seen, { max_tokens: 5 }),
  heartbeat: (seen) => chat("heartbeat", "heartbeat", seen, { max_tokens: 5 }),
  usage: (seen) => chat("plain", "usage", seen, { max_tokens: 5, stream_options: { include_usage: true } }),
  async document(seen) {
    const whole = await client("plain", "document").chat.completions.create(body({ max_tokens: 5 }));
    const [choice] = whole.choices;
    Object.assign(seen, { text: choice.message.content, finish: [choice.finish_reason], usage: whole.usage });
  },
  async completion(seen) {
    const fields = { model: "m", prompt: "hi", stream: true, max_tokens: 5 };
    await read(await client("plain", "completion").completions.create(fields), seen);
  },
  async models(seen) {
    seen.models = [];
    for await (const one of client("plain", "models").models.list()) seen.models.push(one.id);
  },
  close: (seen) => chat("plain", "close", seen, { max_tokens: 5000 }, 4),
  async cancel(seen) {
    const stream = await client("plain", "cancel").chat.completions.create(body({ stream: true, max_tokens: 5000 }));
    setTimeout(() => stream.controller.abort(), 200);
    await read(stream, seen);
    seen.cancelled = stream.controller.signal.aborted;
  },
  error: (seen) => chat("failing", "error", seen, { max_tokens: 50 }),
  // This client's timeout ends with the response's head, so it is one document that is waited for.
  async timeout(seen) {
    await client("silent", "timeout", 700).chat.completions.create(body({ max_tokens: 50 }));
  },
  refused: (seen) => chat("plain", "refused", seen, { top_p: 7 }),
  model: (seen) => chat("model", "model", seen, { max_tokens: 16, temperature: 0 }),
  model_close: (seen) => chat("model", "model_close", seen, { max_tokens: 2000, logit_bias: neverEnd }, 4),
};

const { version } = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
const result = { client: { version } };
for (const [name, run] of Object.entries(scenarios).filter(([name]) => only.includes(name))) {
  const seen = {};
  try {
    await run(seen);
  } catch (raised) {
    const { message, status = null, param = null } = raised;
    Object.assign(seen, { raised: raised.constructor.name, message, status, param });
  }
  result[name] = seen;
}
console.log(JSON.stringify(result));
