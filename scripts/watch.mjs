// Watches a broadcast on a relay's page in headless Chromium, until the picture has moved; writes a screenshot.
//
//   node scripts/watch.mjs CHROMIUM URL PNG [FRAMES [SECONDS]]
//
// TOKEN_FILE: the HTTP listener's token, with which the page shows figures of the relay too.
// Fails if not so many frames (30) are shown within so many seconds (60). Speaks to Chromium over a pipe, so that node is enough.

import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [chromium, url, png, frames = "30", seconds = "60"] = process.argv.slice(2);

const profile = mkdtempSync(join(tmpdir(), "millrace-watch-"));
const browser = spawn(
  chromium,
  [
    "--headless",
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--window-size=1280,800",
    `--user-data-dir=${profile}`,
    // Browsers connect from pages on localhost or https; in a lab the relay is elsewhere.
    `--unsafely-treat-insecure-origin-as-secure=${new URL(url).origin}`,
  ],
  { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] },
);

/** Answers that are awaited, by the command's number. */
const awaited = new Map();
let commands = 0;
let rest = "";
browser.stdio[3].on("error", () => {});
browser.stdio[4].on("data", (bytes) => {
  const messages = (rest + bytes).split("\0");
  rest = messages.pop();
  for (const message of messages.map((text) => JSON.parse(text))) awaited.get(message.id)?.(message);
});

function send(method, params = {}, sessionId = undefined) {
  const id = ++commands;
  browser.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
  return new Promise((resolve, reject) =>
    awaited.set(id, ({ result, error }) => {
      awaited.delete(id);
      if (error) reject(new Error(`${method}: ${error.message}`));
      else resolve(result);
    }),
  );
}

/** What the page says of itself, and a sum over the picture. */
const LOOK = `(() => {
  const figure = (name) => document.querySelector('[data-figure="' + name + '"]')?.textContent ?? "";
  const canvas = document.querySelector("canvas");
  let sum = 0;
  if (canvas) {
    const small = Object.assign(document.createElement("canvas"), { width: 64, height: 36 });
    const context = small.getContext("2d");
    context.drawImage(canvas, 0, 0, 64, 36);
    for (const byte of context.getImageData(0, 0, 64, 36).data) sum = (sum * 31 + byte) >>> 0;
  }
  return { shown: Number(figure("Frames shown")), picture: figure("Picture"), message: document.querySelector("#message")?.textContent, sum };
})()`;

async function watch() {
  const page = new URL(url);
  if (process.env.TOKEN_FILE) page.searchParams.set("token", readFileSync(process.env.TOKEN_FILE, "utf8").trim());
  const { targetId } = await send("Target.createTarget", { url: page.href });
  const { sessionId } = await send("Target.attachToTarget", { targetId, flatten: true });
  const pictures = new Set();
  const deadline = Date.now() + Number(seconds) * 1000;
  let last;
  while (Date.now() < deadline) {
    const { result } = await send("Runtime.evaluate", { expression: LOOK, returnByValue: true }, sessionId);
    last = result.value ?? last;
    if (last) pictures.add(last.sum);
    if (last?.shown >= Number(frames) && pictures.size > 2) {
      const { data } = await send("Page.captureScreenshot", {}, sessionId);
      writeFileSync(png, Buffer.from(data, "base64"));
      return last;
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`${last?.shown ?? 0} frames were shown within ${seconds} s. ${last?.message ?? ""}`);
}

let code = 0;
const ended = new Promise((_, reject) => browser.on("exit", () => reject(new Error("the browser ended"))).on("error", reject));
try {
  const { shown, picture } = await Promise.race([watch(), ended]);
  console.log(`the picture moves: ${shown} frames of ${picture} shown, ${png}`);
} catch (error) {
  console.error(String(error.message ?? error));
  code = 1;
}
ended.catch(() => {});
browser.kill("SIGKILL");
setTimeout(() => {
  rmSync(profile, { recursive: true, force: true, maxRetries: 10 });
  process.exit(code);
}, 200);
