// The status page: asks /stats each second, and generates. Text of models goes into textContent only.
"use strict";

const INTERVAL_MS = 1000;
const HISTORY = 120;
const KEY = "lockstep-api-key";
const STEP_PARTS = ["schedule", "encode", "wire", "forward", "sample", "publish"];

const byId = (id) => document.getElementById(id);
const engines = new Map(); // views by address
let model = null;
let isConnected = false;
let timer = null;
let generation = null; // the AbortController of the one that runs

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

function say(id, text, isBad = false) {
  byId(id).textContent = text;
  byId(id).classList.toggle("bad", isBad);
}

async function reasonOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status}: ${text.slice(0, 200)}`;
  }
}

function sentence(error) {
  // fetch tells of a lost connection by a TypeError.
  return error instanceof TypeError ? "The server doesn't answer." : error.message;
}

// Status

async function poll() {
  clearTimeout(timer);
  if (!isConnected || document.hidden) return;
  try {
    const response = await fetch("/stats", { headers: headers(), cache: "no-store" });
    if (response.ok) {
      show(await response.json());
    } else {
      say("status", await reasonOf(response), true);
      if (response.status === 401) isConnected = false;
    }
  } catch (error) {
    say("status", `${sentence(error)} Trying again.`, true);
  }
  clearTimeout(timer);
  if (isConnected) timer = setTimeout(poll, INTERVAL_MS);
}

function show(answer) {
  model = answer.model;
  say("model", `${model.name} · ${model.architecture} · ${model.max_model_len} tokens`);
  const addresses = Object.keys(answer.engines);
  say("status", addresses.length ? `Live, ${addresses.length} engine(s)` : "No engine answers.",
    addresses.length === 0);
  for (const [address, view] of engines) {
    if (!(address in answer.engines)) {
      view.root.remove();
      engines.delete(address);
    }
  }
  for (const address of addresses) {
    if (!engines.has(address)) engines.set(address, makeView(address));
    showEngine(engines.get(address), answer.engines[address]);
  }
}

function makeView(address) {
  const root = byId("engine").content.cloneNode(true).firstElementChild;
  root.querySelector('[data-name="address"]').textContent = `Engine ${address}`;
  byId("engines").append(root);
  return { root, last: null, lastMs: 0, rates: [] };
}

function showEngine(view, stats) {
  const now = performance.now();
  // A restarted engine counts from zero again.
  const isSame = view.last !== null && stats.num_steps >= view.last.num_steps;
  const last = isSame ? view.last : null;
  const rate = last === null ? 0
    : (stats.num_output_tokens - last.num_output_tokens) * 1000 / (now - view.lastMs);
  view.rates = [...view.rates, rate].slice(-HISTORY);
  view.last = stats;
  view.lastMs = now;
  showNumbers(view.root.querySelector(".numbers"), numbersOf(stats, rate));
  const top = Math.max(1, ...view.rates);
  view.root.querySelector("polyline").setAttribute("points",
    view.rates.map((each, x) => `${x},${29 - 28 * each / top}`).join(" "));
  const used = stats.num_blocks - stats.num_free_blocks;
  const cached = Math.min(stats.num_cached_blocks, stats.num_free_blocks);
  showBar(view.root, "blocks", [["used", used], ["cached", cached],
    ["free", stats.num_free_blocks - cached]], String);
  showBar(view.root, "steps", STEP_PARTS.map((part) =>
    [part, meanSince(stats.step_s[part], last && last.step_s[part])]), seconds);
  showRanks(view.root.querySelector("tbody"), stats.ranks);
}

function numbersOf(stats, rate) {
  const step = stats.last_step;
  const hits = stats.num_prompt_tokens ? stats.num_cached_tokens / stats.num_prompt_tokens : 0;
  return {
    Running: `${stats.num_running} of ${stats.max_num_seqs}`,
    Waiting: stats.num_waiting,
    Steps: stats.num_steps,
    "Output tokens": stats.num_output_tokens,
    "Output tokens/s": rate.toFixed(1),
    "Prefix hits": `${(100 * hits).toFixed(1)}% of prompt tokens`,
    "First token p50 / p99": quantiles(stats.ttft_s),
    "Token gap p50 / p99": quantiles(stats.itl_s),
    "Last step, decode": step ? `${step.num_decode_sequences} sequences` : "none",
    "Last step, prefill": step
      ? `${step.num_prefill_sequences} sequences, ${step.num_prefill_tokens} tokens` : "none",
    Preemptions: stats.num_preemptions,
    "Refused / timed out": `${stats.num_refused} / ${stats.num_timed_out}`,
    "Invalid logits": stats.num_invalid_logits,
    "Worker restarts": Math.max(0, stats.epoch - 1),
  };
}

function showNumbers(list, numbers) {
  list.replaceChildren(...Object.entries(numbers).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(withText("dt", name), withText("dd", value));
    pair.dataset.number = name;
    return pair;
  }));
}

function showBar(root, name, parts, write) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  root.querySelector(`[data-name="${name}"]`).replaceChildren(...parts.map(([part, value]) => {
    const piece = document.createElement("span");
    piece.style.width = `${total ? 100 * value / total : 0}%`;
    piece.title = part;
    return piece;
  }));
  root.querySelector(`[data-name="${name}-text"]`).textContent =
    parts.map(([part, value]) => `${part} ${write(value)}`).join(" · ");
}

function showRanks(body, ranks) {
  body.replaceChildren(...ranks.map((each) => {
    const row = document.createElement("tr");
    const times = [each.prepare_s, each.forward_s, each.sample_s];
    row.append(withText("td", each.rank), ...times.map((time) => withText("td", seconds(time))));
    return row;
  }));
}

function withText(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

function meanSince(histogram, last) {
  const count = (each) => each.counts.reduce((sum, value) => sum + value, 0);
  const number = count(histogram) - (last ? count(last) : 0);
  return number > 0 ? Math.max(0, histogram.sum - (last ? last.sum : 0)) / number : 0;
}

function quantiles(histogram) {
  const total = histogram.counts.reduce((sum, value) => sum + value, 0);
  if (total === 0) return "none yet";
  return [0.5, 0.99].map((share) => {
    let seen = 0;
    const index = histogram.counts.findIndex((count) => (seen += count) >= share * total);
    const isLast = index === histogram.bounds.length;
    return `${isLast ? ">" : "≤"} ${seconds(histogram.bounds[isLast ? index - 1 : index])}`;
  }).join(" / ");
}

function seconds(value) {
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.001) return `${(value * 1e3).toFixed(1)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

// Playground

function question() {
  const isChat = byId("endpoint").value === "chat";
  const prompt = byId("prompt").value;
  const body = { model: model.name, stream: true, max_tokens: Number(byId("max-tokens").value) };
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  if (byId("seed").value !== "") body.seed = Number(byId("seed").value);
  if (isChat) return ["/v1/chat/completions",
    { ...body, messages: [{ role: "user", content: prompt }] }];
  return ["/v1/completions", { ...body, prompt }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

async function generate(signal) {
  const [path, body] = question();
  const response = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: headers({ "content-type": "application/json" }),
  });
  if (!response.ok) throw new Error(await reasonOf(response));
  let reason = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) {
      const delta = choice.delta ?? {};
      const text = choice.text ?? (delta.reasoning_content ?? "") + (delta.content ?? "");
      if (text) byId("output").append(document.createTextNode(text));
      reason = choice.finish_reason ?? reason;
    }
  }
  throw new Error("The stream ended too early.");
}

async function run(event) {
  event.preventDefault();
  if (generation !== null) return;
  if (model === null) return say("outcome", "Connect first.", true);
  const mine = generation = new AbortController();
  byId("output").textContent = "";
  byId("run").disabled = true;
  byId("stop").disabled = false;
  say("outcome", "Generating");
  try {
    say("outcome", `Finished: ${await generate(mine.signal)}`);
  } catch (error) {
    if (mine.signal.aborted) say("outcome", "Stopped.");
    else say("outcome", sentence(error), true);
  } finally {
    generation = null;
    byId("run").disabled = false;
    byId("stop").disabled = true;
  }
}

function connect() {
  isConnected = true;
  say("status", "Connecting");
  poll();
}

byId("connect").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  connect();
});
byId("playground").addEventListener("submit", run);
byId("stop").addEventListener("click", () => generation?.abort());
document.addEventListener("visibilitychange", poll);
const stored = sessionStorage.getItem(KEY);
if (stored !== null) {
  byId("key").value = stored;
  connect();
}
