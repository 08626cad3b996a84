// Watches a broadcast on a relay's page in headless Chromium, until the picture has moved; writes a screenshot.
//
//   node scripts/watch.mjs CHROMIUM URL PNG [FRAMES [SECONDS]]
//
// TOKEN_FILE: the HTTP listener's token, with which the page shows figures of the relay too.
// Fails if not so many frames (30) are shown within so many seconds (120).

import { readFileSync, writeFileSync } from "node:fs";

import { Browser } from "./browser.mjs";

const [chromium, url, png, frames = "30", seconds = "120"] = process.argv.slice(2);

/** Evaluates the state that the page shows, and a sum over the picture. */
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

async function watch(browser) {
  const address = new URL(url);
  if (process.env.TOKEN_FILE) address.searchParams.set("token", readFileSync(process.env.TOKEN_FILE, "utf8").trim());
  const page = await browser.open(address.href);
  const pictures = new Set();
  const deadline = Date.now() + Number(seconds) * 1000;
  let last;
  while (Date.now() < deadline) {
    // A page that is loading cannot be evaluated.
    last = (await page.evaluate(LOOK).catch(() => undefined)) ?? last;
    if (last) pictures.add(last.sum);
    if (last?.shown >= Number(frames) && pictures.size > 2) {
      writeFileSync(png, await page.screenshot());
      return last;
    }
    await new Promise((resolve) => setTimeout(resolve, 100)); // exact: the gap between two looks
  }
  throw new Error(`${last?.shown ?? 0} frames were shown within ${seconds} s. ${last?.message ?? ""}`);
}

const browser = new Browser(chromium, new URL(url).origin);
let code = 0;
try {
  const { shown, picture } = await watch(browser);
  console.log(`the picture moves: ${shown} frames of ${picture} shown, ${png}`);
} catch (error) {
  console.error(String(error.message ?? error));
  code = 1;
}
await browser.close();
process.exit(code);
