// The relay's page in a real browser, which plays live video, publishes a camera, and shows what the relay does: see `make web-test`.
//
// MILLRACE: the binary. CLIP: an MP4 file with H.264 and nothing else. ENGINE: the relay's. SHOTS: for screenshots. MOQ_SUB: Cloudflare's
// player, if it is there. In a lab (LAB_ID) publisher, relay and browser are in their own namespaces; FILMED: what a camera films there, MJPEG.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";

import { chromium } from "playwright-core";

const { MILLRACE, CLIP, FILMED, ENGINE = "user", SHOTS, MOQ_SUB, CHROMIUM = "/usr/bin/chromium", LAB_ID, LAB_RELAY_V4 } = process.env;
/** How long anything may take before a test fails: long, since others may want the CPU. */
const PATIENCE_MS = 60_000;
/** Frames that make a moving picture. */
const SOME = 60;

/** One that needs no device, and that nobody is asked about. */
const CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"];

const dir = mkdtempSync(join(tmpdir(), "millrace-relay-"));
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
  return started(at(node, ...command), "ignore");
}

function started([program, ...args], output) {
  const child = spawn(program, args, { stdio: ["pipe", output, "pipe"] });
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

/** A relay, always at the same ports; `who` says who may do what. */
async function relay(who = ["--public"]) {
  const interfaces = LAB_ID ? ["--interface", "to-pub,to-sub1"] : [];
  const http = `${host}:${ports.http}`;
  const files = ["--http-token-file", TOKEN];
  const options = ["--engine", ENGINE, ...interfaces, ...who, "--max-delay", "off", "--listen", `${host}:${ports.media}`];
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
function publish(name = "live", ...more) {
  const output = ["-c", "copy", "-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"];
  const source = spawn("ffmpeg", ["-v", "error", "-nostdin", "-re", "-stream_loop", "-1", "-i", CLIP, ...output], { stdio: ["ignore", "pipe", "ignore"] });
  const child = start("PUB", MILLRACE, "publish", "--name", name, ...more, "--tls-disable-verify", `moqt://${host}:${ports.media}`);
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
async function open({ from = browser, query = `?token=${readFileSync(TOKEN, "utf8").trim()}`, tab = "", prepare = async () => {}, ...options } = {}) {
  const context = await from.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(PATIENCE_MS);
  const page = await context.newPage();
  const wrong = [];
  const said = [];
  page.on("console", (message) => message.text().startsWith("Failed to load") || said.push(message.text()));
  page.on("pageerror", (error) => wrong.push(String(error)));
  await prepare(page);
  await page.goto(`http://${name}:${ports.http}/${query}${tab}`);
  page.report = async () => [await page.locator("main").innerText(), ...said.slice(-40)].join("\n");
  return { page, wrong, close: () => context.close() };
}

const figure = (page, name) => page.locator(`[data-figure="${name}"]:visible`).innerText();
const message = (page, text) => page.locator("#message:not([hidden])", { hasText: text }).waitFor();
const shot = async (page, name) => SHOTS && page.screenshot({ path: join(SHOTS, `relay-${ENGINE}-${name}.png`), fullPage: true });

async function assertFits(page) {
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth > window.innerWidth), false, "the page is wider than its window");
}

/** The relay's status, as others than the page have it. */
async function status() {
  const asking = at("SUB1", MILLRACE, "status", "--json", "--http", `${host}:${ports.http}`, "--http-token-file", TOKEN);
  const child = started(asking, "pipe");
  let json = "";
  child.stdout.on("data", (bytes) => (json += bytes));
  await once(child, "close");
  return JSON.parse(json);
}

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
  browser = await launch();
});

function launch(flags = []) {
  const wrapper = join(dir, "chromium");
  writeFileSync(wrapper, `#!/bin/sh\nexec ${at("SUB1", CHROMIUM).join(" ")} "$@"\n`);
  chmodSync(wrapper, 0o755);
  // Browsers connect from pages on localhost, or by https; in a lab the relay is elsewhere.
  const secure = LAB_ID ? [`--unsafely-treat-insecure-origin-as-secure=http://${name}:${ports.http}`] : [];
  return chromium.launch({ executablePath: wrapper, args: ["--no-sandbox", ...CAMERA, ...secure, ...flags] });
}

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

    // Both catalogs say the same; hang's has what is in the init segment a second time, for who needs that.
    const said = (key, value) => (key === "description" ? undefined : value);
    const isFrom = async (format) => {
      await first.page.locator("moq-watch").evaluate((player, format) => (player.catalogFormat = format), format);
      await moves(first.page, 10);
      const video = await first.page.locator("moq-watch").evaluate((player) => JSON.stringify(player.catalog.video));
      return JSON.stringify(JSON.parse(video), said);
    };
    assert.equal(await isFrom("hang"), await isFrom("msf"));

    // The catalog was written once, long before; and those without the token see the picture, not the relay's figures.
    const late = await open({ query: "", viewport: { width: 390, height: 844 }, colorScheme: "dark" });
    await moves(late.page);
    await late.page.locator("#relay", { hasText: "need the link with the token" }).waitFor();
    await assertFits(late.page);
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
      await titled(page, name);
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

/** The tab that is chosen, and the panels that are there. */
const tabs = (page) =>
  page.evaluate(() => ({
    chosen: document.querySelector('[role=tab][aria-selected=true]')?.textContent,
    focus: document.activeElement?.textContent,
    stops: [...document.querySelectorAll("[role=tab]")].filter((tab) => tab.tabIndex === 0).length,
    panels: [...document.querySelectorAll("[role=tabpanel]")].filter((panel) => !panel.hidden).map((panel) => panel.id),
    address: location.hash,
  }));

/** Once what the tab shows has been loaded. */
const titled = (page, what) => page.waitForFunction((title) => document.title === title, `${what} - millrace relay`);

test("tabs by keyboard and by address, on a phone too", async () => {
  const server = await relay();
  const publisher = publish("relay");
  const { page, wrong, close } = await open({ tab: "#relay" });
  const shows = async (title, id, address) => {
    await page.locator(`#panel-${id}:not([hidden])`).waitFor();
    const { chosen, stops, panels, address: at } = await tabs(page);
    assert.deepEqual({ chosen, stops, panels, at }, { chosen: title, stops: 1, panels: [`panel-${id}`], at: address });
  };
  try {
    await shows("Relay", "relay", "#relay");
    await titled(page, "Relay");
    await page.locator("[role=tab][aria-selected=true]").focus();
    await page.keyboard.press("Home");
    await page.locator("#broadcasts button[aria-current=true]", { hasText: "relay" }).waitFor();
    await shows("Watch", "watch", "#watch/relay");
    assert.equal((await tabs(page)).focus, "Watch");
    await page.keyboard.press("ArrowRight");
    await shows("Publish", "publish", "#publish");
    await page.keyboard.press("End");
    await shows("Relay", "relay", "#relay");
    await page.keyboard.press("ArrowRight");
    await page.waitForFunction(() => location.hash === "#watch/relay");
    await shows("Watch", "watch", "#watch/relay");
    await page.keyboard.press("ArrowLeft");
    await shows("Relay", "relay", "#relay");
    assert.equal((await tabs(page)).focus, "Relay");
    // What has the name of a tab is found all the same; and links of before are good.
    for (const address of ["#watch/relay", "#one%2Ftwo", "#watch/%"]) {
      await page.evaluate((address) => (location.hash = address), address);
      await shows("Watch", "watch", address);
    }
    await titled(page, "%");
    await page.evaluate(() => (location.hash = "#publish/studio%2Fone"));
    await shows("Publish", "publish", "#publish/studio%2Fone");
    assert.equal(await page.locator("input[name=name]").inputValue(), "studio/one");
    assert.deepEqual(wrong, []);

    for (const colorScheme of ["light", "dark"]) {
      const phone = await open({ tab: "#relay", viewport: { width: 390, height: 844 }, colorScheme, hasTouch: true, isMobile: true });
      for (const id of ["relay", "publish", "watch"]) {
        await phone.page.locator(`#tab-${id}`).tap();
        await phone.page.locator(`#panel-${id}:not([hidden])`).waitFor();
        if (id === "relay") await phone.page.locator("#tables td", { hasText: "relay/1.m4s" }).waitFor();
        await assertFits(phone.page);
        await shot(phone.page, `phone-${colorScheme}-${id}`);
      }
      assert.deepEqual(phone.wrong, []);
      await phone.close();
    }
  } finally {
    await close();
    await publisher.stop();
    await server.stop();
  }
});

test("the relay's sessions and tracks are live, over one channel that is open while it is needed", async () => {
  let server = await relay();
  const { page, wrong, close } = await open({ tab: "#relay" });
  let publisher;
  try {
    await page.locator("#tables", { hasText: "There are no sessions." }).waitFor();
    publisher = publish();
    const row = (text) => page.locator("#tables tr", { hasText: text });
    await row("publishes").waitFor();
    await page.locator("#tab-watch").click();
    await moves(page, 5);
    await page.locator("#tab-relay").click();
    await row("watches").waitFor();
    await row("live/1.m4s").waitFor();
    await until("media is counted", async () => (await figure(page, "Media in")).endsWith("bit/s") && (await row("watches").innerText()).includes("bit/s"));
    assert.equal(await figure(page, "State"), "serves");
    await page.locator("#tables button", { hasText: "Round trip" }).click();
    await page.locator("th[aria-sort=descending]", { hasText: "Round trip" }).waitFor();
    for (const theme of ["light", "dark"]) {
      await page.locator("#theme").click();
      assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), theme);
      await shot(page, `relay-${theme}`);
    }
    assert.equal((await status()).events.listeners, 1, "tabs share a channel");
    await page.locator("#tab-publish").click();
    await until("the channel is closed", async () => (await status()).events.listeners === 0);
    await page.locator("#tab-relay").click();
    await until("and opened again", async () => (await status()).events.listeners === 1);

    await server.stop();
    await page.locator("#relay-figures", { hasText: "not to be had at the moment" }).waitFor();
    server = await relay();
    await page.locator("#tables tr", { hasText: "publishes" }).waitFor();

    // Without the token there are no figures, and it is said why.
    const other = await open({ query: "", tab: "#relay" });
    await other.page.locator("#relay-figures", { hasText: "need the link with the token" }).waitFor();
    assert.equal(await other.page.locator("#tables").isHidden(), true);
    await other.close();
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await publisher?.stop();
    await server.stop();
  }
});

/** Chooses and begins, and waits until it is connected. */
async function broadcast(page, source = "camera", [lines, size] = ["360", "640 × 360"]) {
  await page.locator(`input[value=${source}]`).check();
  await page.locator("select[name=lines]").selectOption(lines);
  await page.locator("#publish-begin").click();
  await page.locator("#publish-connection[data-state=live]").waitFor();
  await page.locator('#sent [data-figure="Picture"]', { hasText: size }).waitFor();
}

/** Has a player write media until ffmpeg finds so many frames of a stream in it. */
async function plays(stream, frames, ...command) {
  const player = started(at("PUB", ...command), "pipe");
  const decoder = spawn("ffmpeg", ["-v", "error", "-i", "-", "-map", `0:${stream}`, `-frames:${stream}`, frames, "-f", "framemd5", "-"], { stdio: ["pipe", "pipe", "pipe"] });
  const [found, said] = [[], []];
  decoder.stdin.on("error", () => {});
  createInterface(decoder.stderr).on("line", (line) => said.push(line));
  createInterface(decoder.stdout).on("line", (line) => line.startsWith("#") || found.push(line.split(",").at(-1)));
  player.stdout.pipe(decoder.stdin);
  try {
    await until(`${command[0]} has ${frames} frames`, () => found.length >= frames, () => [...said, ...player.lines.slice(-5)].join("\n"));
    assert.ok(new Set(found).size > 2, "it is not always the same");
    assert.deepEqual(said, []);
  } finally {
    await player.stop("SIGKILL");
    decoder.kill("SIGKILL");
  }
}

test("a camera is published, to players and to another page, and again after a restart of the relay", async () => {
  let server = await relay();
  const url = `moqt://${host}:${ports.media}`;
  const first = await open({ tab: "#publish/cam" });
  let other;
  try {
    await broadcast(first.page);
    await first.page.locator('#sent [data-figure="Sound"]', { hasText: "Opus" }).waitFor();
    await first.page.locator('#sent [data-figure="State"]', { hasText: "nobody watches" }).waitFor();
    other = await open();
    await moves(other.page);
    await first.page.locator('#sent [data-figure="State"]', { hasText: "sent to the relay" }).waitFor();
    await first.page.locator('#sent [data-figure="Viewers"]', { hasText: "1" }).waitFor();
    // The clock of both is the same.
    const late = parseFloat(await figure(other.page, "Latency"));
    assert.ok(Math.abs(late) < PATIENCE_MS, `${late} ms late`);
    await shot(first.page, "publishes");

    await plays("v", 30, MILLRACE, "subscribe", "--name", "cam", "--tls-disable-verify", url);
    await plays("a", 100, MILLRACE, "subscribe", "--name", "cam", "--tls-disable-verify", url);
    // It takes sound as AAC alone, which not every browser encodes.
    if (existsSync(MOQ_SUB ?? "")) {
      await plays("v", 30, MOQ_SUB, "--name", "cam", "--tls-disable-verify", url);
      await plays("v", 30, MOQ_SUB, "--catalog", "--name", "cam", "--tls-disable-verify", url);
    }
    if (ENGINE === "kernel") await until("the kernel forwards it", async () => (await figure(other.page, "Packets by the kernel")) !== "0");

    await server.stop();
    server = await relay();
    await moves(other.page);
    await plays("v", 30, MILLRACE, "subscribe", "--name", "cam", "--tls-disable-verify", url);

    await first.page.locator("#publish-end").click();
    await other.page.locator("#none:not([hidden])").waitFor();
    assert.equal(await first.page.evaluate(() => document.activeElement.id), "publish-begin");
    assert.equal(await first.page.locator("#preview").isHidden(), true);
    assert.equal(await first.page.locator("#publish-message").isHidden(), true);
    assert.deepEqual([...first.wrong, ...other.wrong], []);
  } finally {
    await first.close();
    await other?.close();
    await server.stop();
  }
});

/** What the way from the browser to the relay is like from now on. */
async function uplink(...settings) {
  const child = spawn(MILLRACE, ["lab", "set", "relay-sub1", "--direction", "backward", ...settings], { stdio: "inherit" });
  assert.deepEqual(await once(child, "exit"), [0, null]);
}

/** Of a figure in bits a second. */
async function bits(page, name) {
  const [number, unit] = (await figure(page, name)).split(" ");
  return Number(number) * { "kbit/s": 1e3, "Mbit/s": 1e6 }[unit];
}

/** Longer than a viewer who is there sees the picture late. */
const LATE_MS = 3000;

test("a camera stays live on a way that loses packets, and on one with too little room", { skip: !LAB_ID && "needs a lab" }, async () => {
  const server = await relay();
  // What Chromium's own fake camera films takes next to nothing.
  const filming = await launch([`--use-file-for-fake-video-capture=${FILMED}`]);
  const first = await open({ from: filming, tab: "#publish/cam" });
  const other = await open();
  const aim = () => bits(first.page, "Bit rate of the picture, at most");
  // With its bit rate as it was chosen it would be later all the time.
  const isLive = async (frames) => {
    await moves(other.page, frames);
    await until("the picture is live", async () => Math.abs(parseFloat(await figure(other.page, "Latency"))) < LATE_MS, other.page.report);
  };
  try {
    await broadcast(first.page, "camera", ["720", "1280 × 720"]);
    await moves(other.page);
    const most = await aim();
    await uplink("loss=1%", "delay=20ms");
    await isLive(300);

    await uplink("loss=0%", "rate=1mbit", "queue-bytes=64000");
    await until("it is less", async () => (await aim()) < 1e6);
    await isLive(150);
    await shot(first.page, "narrow");

    await uplink("rate=none");
    await until("it is what was chosen again", async () => (await aim()) === most);
    await isLive(30);
    assert.deepEqual([...first.wrong, ...other.wrong], []);
  } finally {
    await uplink("rate=none", "loss=0%", "delay=0ms");
    await first.close();
    await other.close();
    await filming.close();
    await server.stop();
  }
});

test("a screen is published, without sound", async () => {
  const server = await relay();
  const { page, wrong, close } = await open({ tab: "#publish/screen", colorScheme: "dark" });
  try {
    await page.locator("input[name=sound]").uncheck();
    await broadcast(page, "screen");
    assert.equal(await figure(page, "Sound"), "none");
    await shot(page, "screen");
    await page.locator("#publish-where a").click();
    await moves(page, 2);
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("a broadcast plays by the catalog that the player takes", async () => {
  const server = await relay();
  // As moq-cli writes MSF: the player wants whole numbers.
  const prepare = (page) =>
    page.addInitScript(() => {
      const stringify = JSON.stringify;
      JSON.stringify = (value, ...rest) => {
        if (value?.version === "draft-01") for (const track of value.tracks) track.jitter = 33.388981;
        return stringify(value, ...rest);
      };
    });
  const { page, close } = await open({ tab: "#publish/odd", prepare });
  const viewer = await open({ tab: "#watch/odd" });
  try {
    await broadcast(page);
    await moves(viewer.page, 10);
    assert.equal(await viewer.page.locator("moq-watch").evaluate((player) => player.catalogFormat), "hang");
    assert.deepEqual(viewer.wrong, []);
  } finally {
    await viewer.close();
    await close();
    await server.stop();
  }
});

test("a broadcast of LOC plays", async () => {
  const server = await relay();
  const publisher = publish("live", "--packaging", "loc");
  const { page, wrong, close } = await open({ tab: "#watch/live" });
  try {
    await moves(page);
    assert.equal(await figure(page, "Rendition"), "1.loc");
    assert.equal(await page.locator("moq-watch").evaluate((player) => player.catalogFormat), "hang");
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await publisher.stop();
    await server.stop();
  }
});

test("what hinders publishing is said in words", async () => {
  const server = await relay();
  const without = (name) => (page) => page.addInitScript((name) => delete window[name], name);
  const fails = (name, forSound = false) => (page) =>
    page.addInitScript(
      ({ name, forSound }) => {
        const real = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = (wanted) => (forSound && !wanted.audio ? real(wanted) : Promise.reject(new DOMException("", name)));
      },
      { name, forSound },
    );
  const table = [
    [without("WebTransport"), "no WebTransport"],
    [without("VideoEncoder"), "cannot encode video"],
    [fails("NotAllowedError"), "does not let this page have camera and microphone"],
    [fails("NotFoundError"), "There is no camera here"],
    [fails("NotReadableError"), "another program may be using it"],
    [async () => {}, "needs a name", ""],
  ];
  try {
    for (const [prepare, words, name = "cam"] of table) {
      const { page, wrong, close } = await open({ tab: "#publish", prepare });
      const message = page.locator("#publish-message:not([hidden])", { hasText: words });
      const begin = page.locator("#publish-begin");
      await message.or(page.locator("#publish-begin:enabled")).first().waitFor();
      if (!(await message.isVisible())) {
        await page.locator("input[name=name]").fill(name);
        await begin.click();
      }
      await message.waitFor();
      assert.deepEqual(wrong, [], words);
      await close();
    }
    const { page, close } = await open({ tab: "#publish/quiet", prepare: fails("NotFoundError", true) });
    await broadcast(page);
    await page.locator("#publish-note", { hasText: "There is no microphone" }).waitFor();
    await close();
  } finally {
    await server.stop();
  }
});

test("who may not publish is told what is missing, and may with a token", async () => {
  const [secret, config] = [join(dir, "secret"), join(dir, "relay.toml")];
  writeFileSync(secret, "s".repeat(32));
  writeFileSync(config, `token-keys = ["${secret}"]\n[[allow]]\nnamespace = "room/**"\npublish = ["token"]\nsubscribe = ["anyone"]\n`);
  const server = await relay(["--config", config]);
  const making = started([MILLRACE, "token", "make", "--key", secret, "--root", "room", "--put", "alice", "--get", ""], "pipe");
  let token = "";
  making.stdout.on("data", (bytes) => (token += bytes));
  await once(making, "close");
  try {
    for (const [query, name, words] of [
      ["", "room/alice", "?jwt=TOKEN behind the address"],
      [`?jwt=${token.trim()}`, "room/bob", "does not allow it"],
    ]) {
      const { page, close } = await open({ query, tab: `#publish/${encodeURIComponent(name)}` });
      await page.locator("#publish-begin").click();
      await page.locator("#publish-message:not([hidden])", { hasText: words }).waitFor();
      await page.locator('#sent [data-figure="State"]', { hasText: "not taken by the relay" }).waitFor();
      await shot(page, "may-not");
      await close();
    }
    const alice = await open({ query: `?jwt=${token.trim()}`, tab: "#publish/room%2Falice" });
    const viewer = await open({ query: "", tab: "#watch/room%2Falice" });
    await broadcast(alice.page);
    await moves(viewer.page, 5);
    await alice.close();
    await viewer.close();
  } finally {
    await server.stop();
  }
});
