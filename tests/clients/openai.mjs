// The `openai` package of npm: openai.mjs URL KEY. Prints what it got, as one line of JSON.
import OpenAI from "openai";

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 120_000 });
const model = "demo";
const messages = [
  { role: "system", content: "Be short." },
  { role: "user", content: "Where is the Eiffel tower?" },
];
const place = {
  type: "object",
  properties: { city: { enum: ["Paris", "London"] }, far: { type: "boolean" } },
  required: ["city", "far"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "look", parameters: place } }];
const response_format = { type: "json_schema", json_schema: { name: "place", schema: place } };
const greedy = { model, temperature: 0 };
const short = { ...greedy, messages, max_tokens: 8 };
const long = { ...greedy, messages, max_tokens: 60 };

function firstCall(answer) {
  const { name, arguments: text } = answer.choices[0].message.tool_calls[0].function;
  return { name, arguments: JSON.parse(text) };
}

const completion = await client.completions.create({
  ...greedy,
  prompt: "The capital of France is",
  max_tokens: 5,
  logprobs: 2,
});
const chat = await client.chat.completions.create(short);
let streamed = "";
let usage = null;
const stream_options = { include_usage: true };
for await (const chunk of await client.chat.completions.create({
  ...short,
  stream: true,
  stream_options,
})) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
const tool_choice = { type: "function", function: { name: "look" } };
const named = await client.chat.completions.create({ ...long, tools, tool_choice });
const forced = await client.chat.completions
  .stream({ ...long, tools, tool_choice: "required", parallel_tool_calls: false })
  .finalChatCompletion();
const formed = await client.chat.completions.parse({ ...long, response_format });
const refusal = await client.responses.create({ model, input: "a" }).catch((error) => error);

console.log(
  JSON.stringify({
    text: completion.choices[0].text,
    num_logprobs: completion.choices[0].logprobs.tokens.length,
    chat: chat.choices[0].message.content,
    streamed,
    completion_tokens: usage.completion_tokens,
    named: firstCall(named),
    forced: firstCall(forced),
    by_schema: formed.choices[0].message.parsed,
    refusal: { status: refusal.status, message: refusal.message },
  }),
);
