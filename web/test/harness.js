// Helpers that the tests of the relay's page share: a relay, publishers, and the page in a real browser.
//
// Environment variables: MILLRACE is the binary, CLIP the MP4 file that is published unless a test names another, ENGINE
// the relay's engine, SHOTS the folder for screenshots. With LAB_ID, publisher, relay and browser run in their own
// network namespaces.

import assert from "node:assert/strict";
import { chmodSync, createReadStream, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before } from "node:test";

import { chromium } from "playwright-core";

import { BOUND_MS, BROWSER, settles, start, until } from "./support.js";

const { MILLRACE, CLIP, ENGINE = "user", SHOTS, CHROMIUM = "/usr/bin/chromium", LAB_ID, LAB_RELAY_V4 } = process.env;
/** Number of frames that count as a moving picture. */
const SOME = 30;

/** Options of a camera that needs neither a device nor a user's permission. */
const CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"];

export const dir = mkdtempSync(join(tmpdir(), "millrace-relay-"));
export const TOKEN = join(dir, "token");
export const host = LAB_ID ? LAB_RELAY_V4 : "127.0.0.1";
/** The relay's name in the page's address. */
const name = LAB_ID ? host : "localhost";
/** The relay's ports. In a namespace of its own every port is free; elsewhere 0 lets the kernel choose free ones. */
export const PORTS = LAB_ID ? { media: 4443, http: 9184 } : { media: 0, http: 0 };
let browser;
/** The ports of the latest relay. */
export let ports = PORTS;

/** Returns the command line that runs a command in the publisher's, the relay's or the player's network namespace. */
export function at(node, command, ...args) {
  return LAB_ID ? ["nsenter", `--net=/run/netns/${process.env[`LAB_${node}_NETNS`]}`, "--", command, ...args] : [command, ...args];
}

/** Starts a relay. With `again` it gets the ports of the previous one. `who` are the options that grant rights. */
export async function relay({ who = ["--public"], again = false } = {}) {
  let child;
  // The ports may take a while to become free again.
  await until("a relay at these ports", async () => (child = await begin(who, again ? ports : PORTS)) !== undefined);
  return child;
}

/** Starts a relay; returns undefined if its ports are taken. */
async function begin(who, { media, http }) {
  const interfaces = LAB_ID ? ["--interface", "to-pub,to-sub1"] : [];
  const options = ["--engine", ENGINE, ...interfaces, ...who, "--max-delay", "off", "--listen", `${host}:${media}`];
  const child = start(at("RELAY", MILLRACE, "relay", ...options, "--http", `${host}:${http}`, "--http-token-file", TOKEN));
  const port = (of) => child.lines.map((line) => Number(of.exec(line)?.[1])).find((port) => port > 0);
  const found = () => ({ http: port(/: HTTP serves metrics, health and status addr=\S+:(\d+)/), media: port(/: serving MoQ sessions addr=\S+:(\d+)/) });
  await settles("a relay that serves", () => [found(), child.exitCode, child.lines], ([{ media }, code]) => media !== undefined || code !== null);
  if (child.exitCode === null) {
    ports = found();
    return child;
  }
  await child.ended;
  assert.match(child.lines.join("\n"), /in use/);
  return undefined;
}

/** Publishes a clip in a loop in real time, or with `isOnce` one time and as fast as possible. */
export function publish(name = "live", { clip = CLIP, options = [], isOnce = false } = {}) {
  const child = start(at("PUB", MILLRACE, "publish", "--name", name, ...options, "--tls-disable-verify", `moqt://${host}:${ports.media}`), "pipe");
  if (isOnce) {
    createReadStream(clip).pipe(child.stdin, { end: false });
    return child;
  }
  // FLAC in MP4 is experimental in ffmpeg.
  const copied = ["-map", "0", "-c", "copy", "-strict", "-2"];
  const output = ["-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"];
  const source = start(["ffmpeg", "-v", "error", "-nostdin", "-re", "-stream_loop", "-1", "-i", clip, ...copied, ...output], "ignore", "pipe");
  source.stdout.on("error", () => {});
  source.stdout.pipe(child.stdin);
  return {
    stop: async () => {
      await source.stop("SIGKILL");
      await child.stop();
    },
  };
}

/** Opens the relay's page. `wrong` collects errors of its code; `complaints` the errors that it and the browser
    write to the console. */
export async function open({ from = browser, query = `?token=${readFileSync(TOKEN, "utf8").trim()}`, tab = "", prepare = async () => {}, ...options } = {}) {
  const context = await from.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(BOUND_MS);
  await context.addInitScript(RECORD_MESSAGES);
  const page = await context.newPage();
  const wrong = [];
  const complaints = [];
  const said = [];
  page.on("console", (message) => {
    if (message.text().startsWith("Failed to load")) return;
    said.push(message.text());
    if (message.type() === "error") complaints.push(message.text());
  });
  page.on("pageerror", (error) => wrong.push(String(error)));
  await prepare(page);
  await page.goto(`http://${name}:${ports.http}/${query}${tab}`);
  page.report = async () => [await page.locator("main").innerText(), ...said.slice(-40)].join("\n");
  return { page, wrong, complaints, close: () => context.close() };
}

/** Script that records the page's messages in order. A message may be replaced before a test reads it. */
const RECORD_MESSAGES = `
  window.told = [];
  new MutationObserver(() => {
    const place = document.querySelector("#message:not([hidden])");
    if (place?.textContent && place.textContent !== window.told.at(-1)) window.told.push(place.textContent);
  }).observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
`;

export const figure = (page, name) => page.locator(`[data-figure="${name}"]:visible`).innerText();
export const figured = (page, name, wanted) => settles(`the figure "${name}"`, () => figure(page, name), wanted, page.report);
export const shot = async (page, name) => SHOTS && page.screenshot({ path: join(SHOTS, `relay-${ENGINE}-${name}.png`), fullPage: true });

/** Returns a checksum of the picture. */
const picture = (page) =>
  page.evaluate(() => {
    const small = document.createElement("canvas");
    [small.width, small.height] = [64, 36];
    const context = small.getContext("2d");
    context.drawImage(document.querySelector("canvas"), 0, 0, 64, 36);
    return context.getImageData(0, 0, 64, 36).data.reduce((sum, byte) => (sum * 31 + byte) >>> 0, 0);
  });

/** Waits until the player has shown this number of further frames, and its picture has changed. */
export async function moves(page, frames = SOME) {
  await page.locator('[data-figure="Frames shown"]').waitFor();
  await page.locator("canvas").waitFor();
  const shown = async () => Number(await figure(page, "Frames shown"));
  const before = await shown();
  const seen = new Set();
  const look = async () => {
    seen.add(await picture(page));
    return { frames: (await shown()) - before, pictures: seen.size };
  };
  await settles(`${frames} frames that move`, look, (now) => now.frames >= frames && now.pictures > 2, page.report);
}

/** Makes the player use the catalog of this format, and returns it. */
export async function catalogBy(page, format) {
  const player = page.locator("moq-watch");
  await player.evaluate((player, format) => {
    window.before = player.catalog;
    player.catalogFormat = format;
  }, format);
  // The player keeps the catalog of the other format for a moment.
  const catalog = () => player.evaluate(({ catalog }) => (catalog && catalog !== window.before ? JSON.stringify(catalog) : undefined));
  return JSON.parse(await settles(`a catalog by ${format}`, catalog, (catalog) => catalog !== undefined, page.report));
}

before(async () => {
  if (SHOTS) mkdirSync(SHOTS, { recursive: true });
  browser = await launch();
});

export function launch(flags = []) {
  const wrapper = join(dir, "chromium");
  // A page that gets no CPU when a frame is due lowers its bit rate, as it should, so in a lab it takes precedence.
  const program = LAB_ID ? at("SUB1", "nice", "-n", "-19", CHROMIUM) : [CHROMIUM];
  writeFileSync(wrapper, `#!/bin/sh\nexec ${program.join(" ")} "$@"\n`);
  chmodSync(wrapper, 0o755);
  // Browsers allow WebTransport from pages on localhost or with https; in a lab the relay is elsewhere.
  const secure = LAB_ID ? [`--unsafely-treat-insecure-origin-as-secure=http://${name}:${ports.http}`] : [];
  return chromium.launch({ executablePath: wrapper, args: [...BROWSER, ...CAMERA, ...secure, ...flags], timeout: BOUND_MS });
}

after(async () => {
  await browser?.close();
  rmSync(dir, { recursive: true, force: true });
});
