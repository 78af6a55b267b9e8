// The npm `eventsource` package, against both kinds of stream:
//   /events           as a browser's EventSource would read it, reconnecting included
//   /v1, by POST      with a fetch of one's own, as people do who want EventSource's interface for a completion

import { readFileSync } from "node:fs";
import { EventSource } from "eventsource";

const urls = JSON.parse(process.argv[2]);
const tag = process.argv[3];
const only = process.argv[4].split(",");
const neverEnd = { 2: -100 }; // the packaged model's end token
const PATIENCE = 20_000;

// Opens `path`, hands every event to `take`, and resolves once `take` says "end" or the source has closed itself.
function listen(server, scenario, path, seen, take, init = {}) {
  seen.statuses = [];
  return new Promise((resolve, reject) => {
    const source = new EventSource(urls[server] + path, {
      async fetch(url, given) {
        const headers = { ...given.headers, ...init.headers, "X-Request-Id": `${tag}-${scenario}` };
        const response = await fetch(url, { ...given, ...init, headers });
        seen.statuses.push(response.status);
        return response;
      },
    });
    const timer = setTimeout(() => finish(() => reject(new Error("the stream did not end"))), PATIENCE);
    function finish(then) {
      clearTimeout(timer);
      source.close();
      then();
    }
    const hear = (event) => {
      try {
        if (take(event) === "end") finish(resolve);
      } catch (error) {
        finish(() => reject(error));
      }
    };
    for (const name of ["message", "token", "tool", "done"]) source.addEventListener(name, hear);
    source.addEventListener("error", (event) => {
      if (event.data !== undefined) hear(event); // the server's own event of that name
      else if (source.readyState === EventSource.CLOSED) finish(resolve); // 204: told to stop
    });
  });
}

function chat(server, scenario, seen, fields, stopAfter = Infinity) {
  Object.assign(seen, { text: "", finish: [], roles: [], ids: [], usage: null, empty: 0 });
  let count = 0;
  const init = {
    method: "POST",
    body: JSON.stringify({ model: "m", messages: [{ role: "user", content: "hi" }], stream: true, ...fields }),
  };
  return listen(server, scenario, "/v1/chat/completions", seen, (event) => {
    if (event.data === "[DONE]") return "end";
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (!seen.ids.includes(chunk.id)) seen.ids.push(chunk.id);
    if (chunk.usage) seen.usage = chunk.usage;
    if (chunk.choices.length === 0) {
      seen.empty += 1;
      return undefined;
    }
    const [choice] = chunk.choices;
    seen.text += choice.delta.content ?? "";
    if (choice.delta.role) seen.roles.push(choice.delta.role);
    if (choice.finish_reason) seen.finish.push(choice.finish_reason);
    count += 1;
    return count === stopAfter ? "end" : undefined;
  }, init);
}

function events(server, scenario, seen, query, stopAfter = Infinity) {
  Object.assign(seen, { ids: [], names: [], texts: [], error: null });
  return listen(server, scenario, `/events?${query}`, seen, (event) => {
    seen.names.push(event.type);
    if (event.type === "error") {
      seen.error = JSON.parse(event.data).error.code;
      return undefined;
    }
    const data = JSON.parse(event.data);
    seen.ids.push([event.lastEventId, data.seq]);
    if (event.type === "token") seen.texts.push(data.text);
    return seen.ids.length === stopAfter ? "end" : undefined;
  });
}

const scenarios = {
  full: (seen) => chat("plain", "full", seen, { max_tokens: 5 }),
  heartbeat: (seen) => chat("heartbeat", "heartbeat", seen, { max_tokens: 5 }),
  usage: (seen) => chat("plain", "usage", seen, { max_tokens: 5, stream_options: { include_usage: true } }),
  close: (seen) => chat("plain", "close", seen, { max_tokens: 5000 }, 4),
  error: (seen) => chat("failing", "error", seen, { max_tokens: 50 }),
  // EventSource has no error to show for a refusal but the status: it closes itself.
  refused: (seen) => chat("plain", "refused", seen, { top_p: 7 }),
  model: (seen) => chat("model", "model", seen, { max_tokens: 16, temperature: 0 }),
  model_close: (seen) => chat("model", "model_close", seen, { max_tokens: 2000, logit_bias: neverEnd }, 4),
  events: (seen) => events("plain", "events", seen, "events=5&interval_ms=5&tool_every=3"),
  events_heartbeat: (seen) => events("heartbeat", "events_heartbeat", seen, "events=5&interval_ms=120&prefill_ms=250"),
  events_close: (seen) => events("plain", "events_close", seen, "events=5000&interval_ms=5", 4),
  events_error: (seen) => events("plain", "events_error", seen, "events=50&fail_at=3"),
};

const { version } = JSON.parse(readFileSync(new URL("node_modules/eventsource/package.json", import.meta.url)));
const result = { client: { version } };
await Promise.all(
  Object.entries(scenarios).filter(([name]) => only.includes(name)).map(async ([name, run]) => {
    const seen = {};
    try {
      await run(seen);
    } catch (raised) {
      Object.assign(seen, { raised: raised.constructor.name, message: raised.message });
    }
    result[name] = seen;
  }),
);
console.log(JSON.stringify(result));
