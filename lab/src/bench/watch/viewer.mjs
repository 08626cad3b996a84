// Opens a relay's page in Chromium, and waits for a picture. Watches for some time, then prints what the page's
// script recorded.
//
// The only argument is JSON with these fields:
//
// * `chromium`, `url` of the page, and `latencyMs`;
// * `web` (content that replaces /web.json), and `certificate` (a file whose hash is added to it);
// * `limitMs` until the first picture, and `watchMs` from then on;
// * `screenshot` (a file, or null).

import { X509Certificate } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

import { Browser } from "./browser.mjs";

const asked = JSON.parse(process.argv[2]);
const POLL_MS = 100;

async function watch(browser) {
  const { fingerprint256 } = new X509Certificate(readFileSync(asked.certificate));
  const web = { ...asked.web, sha256: fingerprint256.replaceAll(":", "").toLowerCase() };
  const eye = readFileSync(new URL("./eye.js", import.meta.url), "utf8");
  const values = `const WEB = ${JSON.stringify(web)}; const LATENCY_MS = ${asked.latencyMs};`;
  const page = await browser.open(asked.url, `{ ${values}\n${eye} }`);
  const deadline = Date.now() + asked.limitMs;
  // The script's variable does not exist before the page has loaded.
  while (!(await page.evaluate("millraceEye.seen.length > 0").catch(() => false))) {
    if (Date.now() > deadline) {
      const said = await page.evaluate("document.querySelector('main')?.innerText").catch(() => "");
      if (asked.screenshot) writeFileSync(asked.screenshot, await page.screenshot());
      throw new Error(`no picture within ${asked.limitMs} ms. ${said?.replaceAll("\n", " ") ?? ""}`);
    }
    await sleep(POLL_MS);
  }
  await sleep(asked.watchMs);
  const seen = await page.evaluate("millraceEye");
  if (asked.screenshot) writeFileSync(asked.screenshot, await page.screenshot());
  return seen;
}

const browser = new Browser(asked.chromium, new URL(asked.url).origin);
let code = 0;
try {
  console.log(JSON.stringify(await watch(browser)));
} catch (error) {
  console.error(String(error.message ?? error));
  code = 1;
}
await browser.close();
process.exit(code);
