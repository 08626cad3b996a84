// Tests of the relay's page in a real browser, which plays live video, publishes a camera, and shows the relay's status.
// `make web-test` runs them.
//
// The environment variables are those of `harness.js`, MOQ_SUB (Cloudflare's player, if installed) and FILMED (the
// camera's picture in a lab, as MJPEG). CLIP must have H.264 only.

import assert from "node:assert/strict";
import { createSocket } from "node:dgram";
import { once } from "node:events";
import { existsSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";

import { PORTS, TOKEN, at, catalogBy, dir, figure, figured, host, launch, moves, open, ports, publish, relay, shot } from "./harness.js";
import { settles, start, test, until } from "./support.js";

const { MILLRACE, FILMED, ENGINE = "user", MOQ_SUB, LAB_ID } = process.env;
/** Clocks that differ by less than this count as the same. */
const SAME_CLOCK_MS = 60_000;

const told = (page) => page.evaluate(() => window.told);
const message = (page, text) => page.locator("#message:not([hidden])", { hasText: text }).waitFor();

async function fits(page) {
  const widths = () => page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
  await settles("a page that is no wider than its window", widths, ([page, window]) => page <= window);
}

/** Returns the relay's status, independent of the page. */
async function status() {
  const asking = at("SUB1", MILLRACE, "status", "--json", "--http", `${host}:${ports.http}`, "--http-token-file", TOKEN);
  const child = start(asking, "ignore", "pipe");
  let json = "";
  child.stdout.on("data", (bytes) => (json += bytes));
  await once(child, "close");
  return JSON.parse(json);
}

test("a live broadcast is listed and plays, also for late viewers and after a restart of the relay", async () => {
  let server = await relay();
  let publisher;
  const first = await open();
  try {
    await first.page.locator("#none:not([hidden])").waitFor();
    publisher = publish();
    await first.page.locator("#broadcasts button[aria-current=true]", { hasText: "live" }).waitFor();
    await moves(first.page);
    await figured(first.page, "State", "live");
    await figured(first.page, "Engine", ENGINE);
    await figured(first.page, ENGINE === "kernel" ? "Packets by the kernel" : "Packets by userspace", (packets) => packets !== "0");
    await shot(first.page, "plays");

    // Both catalogs must be equal, except for `description`: hang's catalog repeats a part of the init segment there.
    const said = (key, value) => (key === "description" ? undefined : value);
    const isFrom = async (format) => {
      const { video } = await catalogBy(first.page, format);
      await moves(first.page, 10);
      return JSON.stringify(video, said);
    };
    const msf = await isFrom("msf");
    const hang = await isFrom("hang");
    assert.equal(hang, msf);

    // A late viewer needs the catalog, which was published once, long before. A page without the token shows the picture,
    // but not the relay's figures.
    const late = await open({ query: "", viewport: { width: 390, height: 844 }, colorScheme: "dark" });
    await moves(late.page);
    await late.page.locator("#relay", { hasText: "need the link with the token" }).waitFor();
    await fits(late.page);
    await shot(late.page, "phone");
    assert.deepEqual(late.wrong, []);
    await late.close();

    const stopping = server.stop();
    const isGone = (told) => told.some((message) => /The connection to the relay has ended|The relay is shutting down/.test(message));
    await settles("word that the relay is gone", () => told(first.page), isGone);
    await shot(first.page, "gone");
    await stopping;
    await message(first.page, "The relay no longer answers");
    await publisher.stop();
    server = await relay({ again: true });
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

test("two broadcasts are chosen by keyboard and play", async () => {
  const server = await relay();
  const publishers = [publish("one"), publish("two")];
  const { page, wrong, close } = await open();
  try {
    await settles("two broadcasts", () => page.locator("#broadcasts button").allInnerTexts(), ["one", "two"]);
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

/** Returns a UDP port that refuses packets and that no other program can take: its socket is connected to another port,
    so the kernel refuses all other senders. */
async function refusing(socket) {
  socket.bind(0, "127.0.0.1");
  await once(socket, "listening");
  socket.connect(9, "127.0.0.1");
  await once(socket, "connect");
  return socket.address().port;
}

test("a page that cannot play says why", async () => {
  const server = await relay();
  const without = (name) => (page) => page.addInitScript((name) => delete window[name], name);
  const routed = (web) => (page) => page.route("**/web.json", (route) => route.fulfill({ json: web }));
  const nobody = createSocket("udp4");
  const elsewhere = LAB_ID ? PORTS.media + 1 : await refusing(nobody);
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
    nobody.close();
    await server.stop();
  }
});

/** Returns the chosen tab and the visible panels. */
const tabs = (page) =>
  page.evaluate(() => ({
    chosen: document.querySelector('[role=tab][aria-selected=true]')?.textContent,
    focus: document.activeElement?.textContent,
    stops: [...document.querySelectorAll("[role=tab]")].filter((tab) => tab.tabIndex === 0).length,
    panels: [...document.querySelectorAll("[role=tabpanel]")].filter((panel) => !panel.hidden).map((panel) => panel.id),
    address: location.hash,
  }));

/** Waits until the contents of the tab have been loaded. */
const titled = (page, what) => page.waitForFunction((title) => document.title === title, `${what} - millrace relay`);

test("tabs are chosen by keyboard and by address, also on a phone", async () => {
  const server = await relay();
  const publisher = publish("relay");
  const { page, wrong, close } = await open({ tab: "#relay" });
  const shows = async (title, id, address) => {
    const shown = async () => {
      const { focus: _, ...shown } = await tabs(page);
      return shown;
    };
    await settles(`${title} at ${address}`, shown, { chosen: title, stops: 1, panels: [`panel-${id}`], address }, page.report);
  };
  const focuses = (title) => settles(`the focus on ${title}`, async () => (await tabs(page)).focus, title);
  try {
    await shows("Relay", "relay", "#relay");
    await titled(page, "Relay");
    await page.locator("[role=tab][aria-selected=true]").focus();
    await page.keyboard.press("Home");
    await page.locator("#broadcasts button[aria-current=true]", { hasText: "relay" }).waitFor();
    await shows("Watch", "watch", "#watch/relay");
    await focuses("Watch");
    await page.keyboard.press("ArrowRight");
    await shows("Publish", "publish", "#publish");
    await page.keyboard.press("End");
    await shows("Relay", "relay", "#relay");
    await page.keyboard.press("ArrowRight");
    await shows("Watch", "watch", "#watch/relay");
    await page.keyboard.press("ArrowLeft");
    await shows("Relay", "relay", "#relay");
    await focuses("Relay");
    // A broadcast with the name of a tab is found, and old links work.
    for (const address of ["#watch/relay", "#one%2Ftwo", "#watch/%"]) {
      await page.evaluate((address) => (location.hash = address), address);
      await shows("Watch", "watch", address);
    }
    await titled(page, "%");
    await page.evaluate(() => (location.hash = "#publish/studio%2Fone"));
    await shows("Publish", "publish", "#publish/studio%2Fone");
    await settles("the name in the form", () => page.locator("input[name=name]").inputValue(), "studio/one");
    assert.deepEqual(wrong, []);

    for (const colorScheme of ["light", "dark"]) {
      const phone = await open({ tab: "#relay", viewport: { width: 390, height: 844 }, colorScheme, hasTouch: true, isMobile: true });
      try {
        for (const id of ["relay", "publish", "watch"]) {
          await phone.page.locator(`#tab-${id}`).tap();
          await phone.page.locator(`#panel-${id}:not([hidden])`).waitFor();
          await titled(phone.page, { relay: "Relay", publish: "Publish", watch: "relay" }[id]);
          const tables = () => phone.page.locator("#panel-relay").innerText();
          if (id === "relay") await settles("the publisher's track", tables, /relay\/1\.m4s/, phone.page.report);
          await fits(phone.page);
          await shot(phone.page, `phone-${colorScheme}-${id}`);
        }
        assert.deepEqual(phone.wrong, []);
      } finally {
        await phone.close();
      }
    }
  } finally {
    await close();
    await publisher.stop();
    await server.stop();
  }
});

test("a page whose request for the status gets no answer asks again", async () => {
  const server = await relay();
  const { page, wrong, close } = await open({ tab: "#relay" });
  try {
    let first;
    const keepFirst = (route) => {
      if (first) return route.continue();
      first = route.request();
    };
    await page.route("**/events", keepFirst);
    await page.reload();
    await page.locator("#tables", { hasText: "There are no sessions." }).waitFor();
    // exact: the page has given up the first request before it sent the one that brought the status
    assert.ok(first.failure());
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("the relay's sessions and tracks update over one channel, which is open only while a tab needs it", async () => {
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
    await figured(page, "Media in", /bit\/s$/);
    await settles("media to the viewer", () => row("watches").innerText(), /bit\/s/, page.report);
    await figured(page, "State", "serves");
    await page.locator("#tables button", { hasText: "Round trip" }).click();
    await page.locator("th[aria-sort=descending]", { hasText: "Round trip" }).waitFor();
    for (const theme of ["light", "dark"]) {
      await page.locator("#theme").click();
      await settles("the theme", () => page.evaluate(() => document.documentElement.dataset.theme), theme);
      await shot(page, `relay-${theme}`);
    }
    const listeners = async () => (await status()).events.listeners; // exact: only settles reads it
    await settles("one channel, which tabs share", listeners, 1);
    await page.locator("#tab-publish").click();
    await settles("the channel to be closed", listeners, 0);
    await page.locator("#tab-relay").click();
    await settles("the channel to be open again", listeners, 1);

    await server.stop();
    await page.locator("#relay-figures", { hasText: "unavailable at the moment" }).waitFor();
    server = await relay({ again: true });
    await page.locator("#tables tr", { hasText: "publishes" }).waitFor();

    // A page without the token has no figures, and says why.
    const other = await open({ query: "", tab: "#relay" });
    await other.page.locator("#relay-figures", { hasText: "need the link with the token" }).waitFor();
    await other.page.locator("#tables").waitFor({ state: "hidden" });
    await other.close();
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await publisher?.stop();
    await server.stop();
  }
});

/** Chooses a source and starts, and waits until it is connected. */
async function broadcast(page, source = "camera", [lines, size] = ["360", "640 × 360"]) {
  await page.locator(`input[value=${source}]`).check();
  await page.locator("select[name=lines]").selectOption(lines);
  await page.locator("#publish-begin").click();
  await page.locator("#publish-connection[data-state=live]").waitFor();
  await page.locator('#sent [data-figure="Picture"]', { hasText: size }).waitFor();
}

/** Runs a player until ffmpeg has found this number of frames of a stream in its output. */
async function plays(stream, frames, ...command) {
  for (let tries = 1; !(await playsOnce(stream, frames, command)); tries++) {
    assert.ok(tries < 10, `${command[0]} has ended ${tries} times because a stream was reset`);
  }
}

/** Runs a player once. Returns false if it ended its session because a stream was reset, as moq-sub does: a page that
 * gets too little CPU leaves groups unfinished.
 */
async function playsOnce(stream, frames, command) {
  const player = start(at("PUB", ...command), "ignore", "pipe");
  const decoder = start(["ffmpeg", "-v", "error", "-i", "-", "-map", `0:${stream}`, `-frames:${stream}`, String(frames), "-f", "framemd5", "-"], "pipe", "pipe");
  const found = [];
  createInterface(decoder.stdout).on("line", (line) => line.startsWith("#") || found.push(line.split(",").at(-1)));
  player.stdout.pipe(decoder.stdin);
  try {
    const isReset = () => player.exitCode !== null && player.lines.some((line) => line.includes("invalid RESET_STREAM"));
    await settles(`${frames} frames by ${command[0]}`, () => found.length, (count) => count >= frames || isReset());
    if (found.length < frames) return false;
    assert.ok(new Set(found).size > 2, "the frames are all the same");
    // The decoder ends with the last frame.
    await until("the decoder to end", () => decoder.exitCode !== null);
    await decoder.ended;
    assert.deepEqual(decoder.lines, []);
    return true;
  } finally {
    await player.stop("SIGKILL");
    await decoder.stop("SIGKILL");
  }
}

test("a camera is published to players and to another page, also after a restart of the relay", async () => {
  let server = await relay();
  const url = `moqt://${host}:${ports.media}`;
  const first = await open({ tab: "#publish/cam" });
  let other;
  try {
    await broadcast(first.page);
    await first.page.locator('#sent [data-figure="Sound"]', { hasText: "Opus" }).waitFor();
    await first.page.locator('#sent [data-figure="State"]', { hasText: "no viewers yet" }).waitFor();
    other = await open();
    await moves(other.page);
    await first.page.locator('#sent [data-figure="State"]', { hasText: "sent to the relay" }).waitFor();
    await first.page.locator('#sent [data-figure="Viewers"]', { hasText: "1" }).waitFor();
    // Publisher and viewer run on the same machine, so the latency is no difference of clocks.
    await figured(other.page, "Latency", (late) => Math.abs(parseFloat(late)) < SAME_CLOCK_MS);
    await shot(first.page, "publishes");

    await plays("v", 30, MILLRACE, "subscribe", "--name", "cam", "--tls-disable-verify", url);
    await plays("a", 100, MILLRACE, "subscribe", "--name", "cam", "--tls-disable-verify", url);
    // The player supports only AAC sound, which not every browser encodes.
    if (existsSync(MOQ_SUB ?? "")) {
      await plays("v", 30, MOQ_SUB, "--name", "cam", "--tls-disable-verify", url);
      await plays("v", 30, MOQ_SUB, "--catalog", "--name", "cam", "--tls-disable-verify", url);
    }
    if (ENGINE === "kernel") await figured(other.page, "Packets by the kernel", (packets) => packets !== "0");

    await server.stop();
    server = await relay({ again: true });
    await moves(other.page);
    await plays("v", 30, MILLRACE, "subscribe", "--name", "cam", "--tls-disable-verify", url);

    await first.page.locator("#publish-end").click();
    await other.page.locator("#none:not([hidden])").waitFor();
    await settles("the focus on the button", () => first.page.evaluate(() => document.activeElement.id), "publish-begin");
    await first.page.locator("#preview").waitFor({ state: "hidden" });
    await first.page.locator("#publish-message").waitFor({ state: "hidden" });
    assert.deepEqual([...first.wrong, ...other.wrong], []);
  } finally {
    await first.close();
    await other?.close();
    await server.stop();
  }
});

/** Sets the properties of the path from the browser to the relay. */
async function uplink(...settings) {
  const end = await once(start([`${MILLRACE}-lab`, "lab", "set", "relay-sub1", "--direction", "backward", ...settings]), "exit");
  assert.deepEqual(end, [0, null]);
}

/** Returns a figure in bits per second. */
async function bits(page, name) {
  const [number, unit] = (await figure(page, name)).split(" ");
  return Number(number) * { "kbit/s": 1e3, "Mbit/s": 1e6 }[unit];
}

/** Upper bound of a viewer's latency while the picture counts as live. */
const LATE_MS = 3000;
/** Bit rate of a picture of 1280 x 720 at 0.08 bits per pixel and 30 frames per second, as the page rounds it. */
const CHOSEN = 2.2e6;

test("a camera stays live on a path that loses packets, and on a path with too little capacity", { skip: !LAB_ID && "needs a lab" }, async () => {
  const server = await relay();
  // A file replaces Chromium's own fake camera, whose picture needs almost no bits.
  const filming = await launch([`--use-file-for-fake-video-capture=${FILMED}`]);
  const first = await open({ from: filming, tab: "#publish/cam" });
  const other = await open();
  const aim = () => bits(first.page, "Bit rate of the picture, at most");
  // If the bit rate stayed as chosen, the latency would grow without limit.
  const isLive = async (frames) => {
    await moves(other.page, frames);
    await figured(other.page, "Latency", (late) => Math.abs(parseFloat(late)) < LATE_MS);
  };
  try {
    await broadcast(first.page, "camera", ["720", "1280 × 720"]);
    await moves(other.page);
    await settles("the chosen bit rate", aim, CHOSEN);
    await uplink("loss=1%", "delay=20ms");
    await isLive(300);

    await uplink("loss=0%", "rate=1mbit", "queue-bytes=64000");
    await settles("a lower bit rate", aim, (bits) => bits < 1e6);
    await isLive(150);
    await shot(first.page, "narrow");

    await uplink("rate=none");
    await settles("the chosen bit rate again", aim, CHOSEN);
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

test("a screen is published without sound", async () => {
  const server = await relay();
  const { page, wrong, close } = await open({ tab: "#publish/screen", colorScheme: "dark" });
  try {
    await page.locator("input[name=sound]").uncheck();
    await broadcast(page, "screen");
    await figured(page, "Sound", "none");
    await shot(page, "screen");
    await page.locator("#publish-where a").click();
    await moves(page, 2);
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

const playsBy = (page, format) => settles("the catalog's format", () => page.locator("moq-watch").evaluate((player) => player.catalogFormat), format);

test("a broadcast whose hang catalog is unreadable plays by its MSF catalog", async () => {
  const server = await relay();
  // Adds a value to hang's catalog that the player refuses: a jitter that is no whole number.
  const prepare = (page) =>
    page.addInitScript(() => {
      const stringify = JSON.stringify;
      JSON.stringify = (value, ...rest) => {
        for (const rendition of Object.values(value?.video?.renditions ?? {})) rendition.jitter = 33.388981;
        return stringify(value, ...rest);
      };
    });
  const { page, close } = await open({ tab: "#publish/odd", prepare });
  const viewer = await open({ tab: "#watch/odd" });
  try {
    await broadcast(page);
    await moves(viewer.page, 10);
    await playsBy(viewer.page, "msf");
    assert.deepEqual(viewer.wrong, []);
  } finally {
    await viewer.close();
    await close();
    await server.stop();
  }
});

test("a broadcast of LOC plays", async () => {
  const server = await relay();
  const publisher = publish("live", { options: ["--packaging", "loc"] });
  const { page, wrong, close } = await open({ tab: "#watch/live" });
  try {
    await moves(page);
    await figured(page, "Rendition", "1.loc");
    await playsBy(page, "hang");
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await publisher.stop();
    await server.stop();
  }
});

test("a page that cannot publish says why", async () => {
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
      // exact: one of the two is visible, and the message does not appear after the button by itself
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

test("a page without the right to publish says what is missing, and publishes with a token", async () => {
  const [secret, config] = [join(dir, "secret"), join(dir, "relay.toml")];
  writeFileSync(secret, "s".repeat(32));
  writeFileSync(config, `token-secrets = ["${secret}"]\n[[allow]]\nnamespace = "room/**"\npublish = ["token"]\nsubscribe = ["anyone"]\n`);
  const server = await relay({ who: ["--config", config] });
  const making = start([MILLRACE, "token", "make", "--secret", secret, "--root", "room", "--put", "alice", "--get", ""], "ignore", "pipe");
  let token = "";
  making.stdout.on("data", (bytes) => (token += bytes));
  await once(making, "close");
  try {
    for (const [query, name, words] of [
      ["", "room/alice", "add ?jwt=TOKEN to the address"],
      [`?jwt=${token.trim()}`, "room/bob", "does not allow it"],
    ]) {
      const { page, close } = await open({ query, tab: `#publish/${encodeURIComponent(name)}` });
      await page.locator("#publish-begin").click();
      await page.locator("#publish-message:not([hidden])", { hasText: words }).waitFor();
      await page.locator('#sent [data-figure="State"]', { hasText: "refused by the relay" }).waitFor();
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
