// The relay's page in a real browser, which plays live video: see `make web-test`.
//
// MILLRACE: the binary. CLIP: an MP4 file with H.264 and nothing else. ENGINE: the relay's. SHOTS: for screenshots. In a lab (LAB_ID)
// publisher, relay and browser are in their own namespaces.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";

import { chromium } from "playwright-core";

const { MILLRACE, CLIP, ENGINE = "user", SHOTS, CHROMIUM = "/usr/bin/chromium", LAB_ID, LAB_RELAY_V4 } = process.env;
/** How long anything may take before a test fails: long, since others may want the CPU. */
const PATIENCE_MS = 60_000;
/** Frames that make a moving picture. */
const SOME = 60;

const dir = mkdtempSync(join(tmpdir(), "millrace-watch-"));
const TOKEN = join(dir, "token");
const host = LAB_ID ? LAB_RELAY_V4 : "127.0.0.1";
/** As it is in the page's address. */
const name = LAB_ID ? host : "localhost";
let browser;
let ports;

/** A command where the publisher, the relay or the player is. */
function at(node, command, ...args) {
  return LAB_ID ? ["nsenter", `--net=/run/netns/${process.env[`LAB_${node}_NETNS`]}`, "--", command, ...args] : [command, ...args];
}

function start(node, ...command) {
  const [program, ...args] = at(node, ...command);
  const child = spawn(program, args, { stdio: ["pipe", "ignore", "pipe"] });
  child.lines = [];
  createInterface(child.stderr).on("line", (line) => child.lines.push(line));
  child.stdin.on("error", () => {});
  child.stop = async (signal = "SIGTERM") => {
    child.kill(signal);
    if (child.exitCode === null && child.signalCode === null) await once(child, "exit");
  };
  return child;
}

/** `what` and `report` are for the failure. */
async function until(what, holds, report = async () => "") {
  const deadline = Date.now() + PATIENCE_MS;
  while (Date.now() < deadline) {
    if (await holds()) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail(`not within a minute: ${what} ${await report()}`);
}

async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  return port;
}

/** A relay, always at the same ports. */
async function relay() {
  const interfaces = LAB_ID ? ["--interface", "to-pub,to-sub1"] : [];
  const http = `${host}:${ports.http}`;
  const files = ["--http-token-file", TOKEN];
  const options = ["--engine", ENGINE, ...interfaces, "--public", "--max-delay", "off", "--listen", `${host}:${ports.media}`];
  const child = start("RELAY", MILLRACE, "relay", ...options, "--http", http, ...files);
  await until("the relay is there", async () => {
    assert.equal(child.exitCode, null, child.lines.join("\n"));
    const status = start("RELAY", MILLRACE, "status", "--http", http, ...files);
    const [code] = await once(status, "exit");
    return code === 0;
  });
  return child;
}

/** Publishes the clip over and over, in real time. */
function publish(name = "live") {
  const output = ["-c", "copy", "-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"];
  const source = spawn("ffmpeg", ["-v", "error", "-nostdin", "-re", "-stream_loop", "-1", "-i", CLIP, ...output], { stdio: ["ignore", "pipe", "ignore"] });
  const child = start("PUB", MILLRACE, "publish", "--name", name, "--tls-disable-verify", `moqt://${host}:${ports.media}`);
  source.stdout.on("error", () => {});
  source.stdout.pipe(child.stdin);
  return {
    stop: async () => {
      source.kill("SIGKILL");
      await child.stop();
    },
  };
}

/** The relay's page; errors of its code are failures. */
async function open({ query = `?token=${readFileSync(TOKEN, "utf8").trim()}`, prepare = async () => {}, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(PATIENCE_MS);
  const page = await context.newPage();
  const wrong = [];
  const said = [];
  page.on("console", (message) => message.text().startsWith("Failed to load") || said.push(message.text()));
  page.on("pageerror", (error) => wrong.push(String(error)));
  await prepare(page);
  await page.goto(`http://${name}:${ports.http}/${query}`);
  page.report = async () => [await page.locator("main").innerText(), ...said.slice(-40)].join("\n");
  return { page, wrong, close: () => context.close() };
}

const figure = (page, name) => page.locator(`[data-figure="${name}"]`).innerText();
const message = (page, text) => page.locator("#message:not([hidden])", { hasText: text }).waitFor();
const shot = async (page, name) => SHOTS && page.screenshot({ path: join(SHOTS, `watch-${ENGINE}-${name}.png`), fullPage: true });

/** A sum over the picture. */
const picture = (page) =>
  page.evaluate(() => {
    const small = document.createElement("canvas");
    [small.width, small.height] = [64, 36];
    const context = small.getContext("2d");
    context.drawImage(document.querySelector("canvas"), 0, 0, 64, 36);
    return context.getImageData(0, 0, 64, 36).data.reduce((sum, byte) => (sum * 31 + byte) >>> 0, 0);
  });

/** Until that many more frames were shown, and the picture was more than one. */
async function moves(page, frames = SOME) {
  await page.locator('[data-figure="Frames shown"]').waitFor();
  await page.locator("canvas").waitFor();
  const shown = async () => Number(await figure(page, "Frames shown"));
  const before = await shown();
  const seen = new Set();
  await until(`${frames} frames are shown`, async () => {
    seen.add(await picture(page));
    const now = await shown();
    return now - before >= frames && seen.size > 2;
  }, page.report);
}

before(async () => {
  if (SHOTS) mkdirSync(SHOTS, { recursive: true });
  ports = { media: await freePort(), http: await freePort() };
  const wrapper = join(dir, "chromium");
  writeFileSync(wrapper, `#!/bin/sh\nexec ${at("SUB1", CHROMIUM).join(" ")} "$@"\n`);
  chmodSync(wrapper, 0o755);
  // Browsers connect from pages on localhost, or by https; in a lab the relay is elsewhere.
  const secure = LAB_ID ? [`--unsafely-treat-insecure-origin-as-secure=http://${name}:${ports.http}`] : [];
  browser = await chromium.launch({ executablePath: wrapper, args: ["--no-sandbox", ...secure] });
});

after(async () => {
  await browser?.close();
  rmSync(dir, { recursive: true, force: true });
});

test("what is live is listed and plays, for late viewers too, and goes on after a restart of the relay", async () => {
  let server = await relay();
  let publisher;
  const first = await open();
  try {
    await first.page.locator("#none:not([hidden])").waitFor();
    publisher = publish();
    await first.page.locator("#broadcasts button[aria-current=true]", { hasText: "live" }).waitFor();
    await moves(first.page);
    assert.equal(await figure(first.page, "State"), "live");
    assert.equal(await figure(first.page, "Engine"), ENGINE);
    const sender = ENGINE === "kernel" ? "Packets by the kernel" : "Packets by userspace";
    await until(`${sender}: some`, async () => (await figure(first.page, sender)) !== "0");
    await shot(first.page, "plays");

    // Both catalogs say the same.
    const isFrom = async (format) => {
      await first.page.locator("moq-watch").evaluate((player, format) => (player.catalogFormat = format), format);
      await moves(first.page, 10);
      return first.page.locator("moq-watch").evaluate((player) => JSON.stringify(player.catalog.video));
    };
    assert.equal(await isFrom("hang"), await isFrom("msf"));

    // The catalog was written once, long before; and those without the token see the picture, not the relay's figures.
    const late = await open({ query: "", viewport: { width: 390, height: 844 }, colorScheme: "dark" });
    await moves(late.page);
    await late.page.locator("#relay", { hasText: "need the link with the token" }).waitFor();
    assert.equal(await late.page.evaluate(() => document.documentElement.scrollWidth > window.innerWidth), false);
    await shot(late.page, "phone");
    assert.deepEqual(late.wrong, []);
    await late.close();

    const stopping = server.stop();
    await message(first.page, /The connection to the relay has ended|The relay is being stopped/);
    await shot(first.page, "gone");
    await stopping;
    await message(first.page, "The relay does not answer any more");
    await publisher.stop();
    server = await relay();
    publisher = publish();
    await first.page.locator("#message[hidden]").waitFor({ state: "attached" });
    await moves(first.page);
    assert.deepEqual(first.wrong, []);
  } finally {
    await first.close();
    await publisher?.stop();
    await server.stop();
  }
});

test("two broadcasts, chosen by keyboard", async () => {
  const server = await relay();
  const publishers = [publish("one"), publish("two")];
  const { page, wrong, close } = await open();
  try {
    await page.locator("#broadcasts button").nth(1).waitFor();
    assert.deepEqual(await page.locator("#broadcasts button").allInnerTexts(), ["one", "two"]);
    for (const name of ["two", "one"]) {
      await page.locator("#broadcasts button", { hasText: name }).focus();
      await page.keyboard.press("Enter");
      await page.locator("#broadcasts button[aria-current=true]", { hasText: name }).waitFor();
      await moves(page, 5);
      assert.equal(await page.title(), `${name} - millrace relay`);
    }
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await Promise.all(publishers.map((publisher) => publisher.stop()));
    await server.stop();
  }
});

test("what hinders is said in words", async () => {
  const server = await relay();
  const without = (name) => (page) => page.addInitScript((name) => delete window[name], name);
  const routed = (web) => (page) => page.route("**/web.json", (route) => route.fulfill({ json: web }));
  const elsewhere = await freePort();
  const table = [
    [without("WebTransport"), "no WebTransport"],
    [without("VideoDecoder"), "cannot decode video"],
    [routed({ port: null, local: null, sha256: null }), "configured not to serve browsers"],
    [routed({ port: ports.media, local: host, sha256: "ab".repeat(32) }), "which no authority has signed"],
    [routed({ port: elsewhere, local: host, sha256: null }), `no connection to its UDP port ${elsewhere}`],
  ];
  try {
    for (const [prepare, words] of table) {
      const { page, wrong, close } = await open({ prepare });
      await message(page, words);
      assert.deepEqual(wrong, [], words);
      await close();
    }
  } finally {
    await server.stop();
  }
});
