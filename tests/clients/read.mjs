// Reads one stream with a client library from npm and prints what it gave, as one line of JSON.
//
//     node read.mjs CLIENT URL [BODY]
//
// For EventSource the end is the one that the server tells by 204: no more reconnection.

import { createOpenAI } from "@ai-sdk/openai";
import Anthropic from "@anthropic-ai/sdk";
import { stepCountIs, streamText, tool } from "ai";
import { EventSource } from "eventsource";
import { createParser } from "eventsource-parser";
import OpenAI from "openai";
import { z } from "zod";

const [client, url, body] = process.argv.slice(2);

const clients = {
  eventsource: () =>
    new Promise((resolve) => {
      const out = { data: [], ids: [], opens: 0, errors: [] };
      const source = new EventSource(url);
      source.onopen = () => out.opens++;
      source.onmessage = (event) => {
        out.data.push(event.data);
        out.ids.push(event.lastEventId);
      };
      source.onerror = (error) => {
        out.errors.push(error.code ?? null);
        if (source.readyState === EventSource.CLOSED) resolve(out);
      };
    }),

  "eventsource-parser": async () => {
    const out = { data: [], ids: [], comments: [], retries: [], errors: [] };
    const parser = createParser({
      onEvent: (event) => {
        out.data.push(event.data);
        out.ids.push(event.id);
      },
      onComment: (comment) => out.comments.push(comment),
      onRetry: (retry) => out.retries.push(retry),
      onError: (error) => out.errors.push(String(error)),
    });
    const response = await fetch(url);
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    for await (const chunk of response.body) {
      // One byte at a time: wherever the network may cut.
      for (const byte of chunk) parser.feed(decoder.decode(Uint8Array.of(byte), { stream: true }));
    }
    return out;
  },

  anthropic: async () => {
    const sdk = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const request = JSON.parse(body);
    const out = { text: "", kinds: [], error: null };
    try {
      const stream = sdk.messages.stream(request);
      stream.on("text", (text) => (out.text += text));
      stream.on("streamEvent", (event) => out.kinds.push(event.type));
      out.streamed = await stream.finalMessage();
    } catch (error) {
      out.error = { message: String(error.message), kind: error.constructor.name };
      return out;
    }
    out.whole = await sdk.messages.create(request);
    out.count = (await sdk.messages.countTokens({ model: request.model, messages: request.messages })).input_tokens;
    return out;
  },

  openai: async () => {
    const sdk = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const request = JSON.parse(body);
    const out = { text: "", reasons: [], error: null };
    try {
      const stream = await sdk.chat.completions.create({ ...request, stream: true });
      for await (const chunk of stream) {
        out.text += chunk.choices[0]?.delta?.content ?? "";
        if (chunk.choices[0]?.finish_reason) out.reasons.push(chunk.choices[0].finish_reason);
        if (chunk.usage) out.usage = chunk.usage;
      }
    } catch (error) {
      out.error = String(error.message);
      return out;
    }
    const whole = await sdk.chat.completions.create({ ...request, stream_options: undefined, stream: false });
    out.whole = whole.choices[0].message.content;
    return out;
  },

  responses: async () => {
    const sdk = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const request = JSON.parse(body);
    const out = { text: "", events: [] };
    const stream = await sdk.responses.create({ ...request, stream: true });
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") out.text += event.delta;
      out.events.push([event.type, event.sequence_number]);
      if (event.response) out.last = event.response;
    }
    out.retrieved = await sdk.responses.retrieve(out.last.id);
    out.rest = [];
    for await (const event of await sdk.responses.retrieve(out.last.id, { stream: true, starting_after: 2 })) {
      out.rest.push([event.type, event.sequence_number]);
    }
    return out;
  },

  // Vercel's AI SDK, by the API that the body names: it calls the tool, and goes on with what the tool says.
  "ai-sdk": async () => {
    const { api, model, prompt } = JSON.parse(body);
    const provider = createOpenAI({ baseURL: url, apiKey: "none" });
    const out = { called: [], errors: [] };
    const weather = tool({
      description: "The weather of a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async (input) => {
        out.called.push(input);
        return "21 degrees";
      },
    });
    const result = streamText({
      model: provider[api](model),
      prompt,
      tools: { get_weather: weather },
      stopWhen: stepCountIs(2),
      maxRetries: 0,
      onError: ({ error }) => out.errors.push(String(error.message ?? error)),
    });
    out.deltas = [];
    for await (const part of result.fullStream) if (part.type === "text-delta") out.deltas.push(part.text);
    out.steps = (await result.steps).map((step) => step.finishReason);
    return out;
  },
};

console.log(JSON.stringify(await clients[client]()));
