// A publisher or player of a broadcast, in Chromium on a relay's page. It publishes a fake camera, or plays, until
// SIGTERM. Each encoded or decoded frame is written to standard output as an MP4 box with its bytes. Errors of the page
// go to standard error.
//
// The only argument is JSON: `chromium`, `url` of the page, `publishes`, `web` (content that replaces /web.json),
// `certificate` (a file whose hash is added to it), `protocol`, `latencyMs`, and `limitMs` until the page can publish.

import { X509Certificate } from "node:crypto";
import { readFileSync, writeSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

import { Browser } from "./browser.mjs";

const asked = JSON.parse(process.argv[2]);
const POLL_MS = 100;
const OUTPUT = 1;
/** One that needs no device, and that nobody is asked about. */
const CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"];

const TAKE = "millraceFrames.splice(0)";
const COMPLAINTS = `[...document.querySelectorAll("#problem, #message, #publish-message")]
  .filter((line) => !line.hidden && line.textContent).map((line) => line.textContent).join(" ")`;
/** The picture alone, as small as there is. */
const PUBLISH = `(() => {
  const form = document.querySelector("#publish-form");
  if (!form || document.querySelector("#publish-begin").disabled) return false;
  form.elements.sound.checked = false;
  form.elements.lines.value = "360";
  form.requestSubmit();
  return true;
})()`;

function write(frame) {
  const data = Buffer.from(frame, "base64");
  const header = Buffer.alloc(8);
  header.writeUInt32BE(data.length + header.length);
  header.write("mdat", 4);
  writeSync(OUTPUT, Buffer.concat([header, data]));
}

async function begin(page) {
  const deadline = Date.now() + asked.limitMs;
  // The form does not exist before the page has loaded.
  while (!(await page.evaluate(PUBLISH).catch(() => false))) {
    if (Date.now() > deadline) throw new Error(`the page cannot publish within ${asked.limitMs} ms`);
    await sleep(POLL_MS);
  }
}

async function run(browser) {
  const { fingerprint256 } = new X509Certificate(readFileSync(asked.certificate));
  const web = { ...asked.web, sha256: fingerprint256.replaceAll(":", "").toLowerCase() };
  const hook = readFileSync(new URL("./frames.js", import.meta.url), "utf8");
  const values = { WEB: web, PROTOCOL: asked.protocol, LATENCY_MS: asked.latencyMs };
  const said = Object.entries(values).map(([name, value]) => `const ${name} = ${JSON.stringify(value)};`);
  const page = await browser.open(asked.url, `{ ${said.join(" ")}\n${hook} }`);
  if (asked.publishes) await begin(page);
  let last = "";
  for (;;) {
    const frames = await page.evaluate(TAKE).catch(() => []);
    frames.forEach(write);
    const complaints = await page.evaluate(COMPLAINTS).catch(() => "");
    if (complaints && complaints !== last) console.error(complaints);
    last = complaints;
    await sleep(POLL_MS);
  }
}

const browser = new Browser(asked.chromium, new URL(asked.url).origin, asked.publishes ? CAMERA : []);
let isEnding = false;
process.on("SIGTERM", async () => {
  isEnding = true;
  await browser.close();
  process.exit(0);
});
try {
  await run(browser);
} catch (error) {
  if (!isEnding) {
    console.error(String(error.message ?? error));
    await browser.close();
    process.exit(1);
  }
}
