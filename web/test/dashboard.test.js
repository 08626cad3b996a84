// The dashboard in a real browser, on reports that were really made: see `make web-test`.
//
// REPORTS: lines of JSON as `millrace cost --json --stacks` prints them. MILLRACE: the binary. SHOTS: for screenshots.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createConnection } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";

import { chromium } from "playwright-core";

const { MILLRACE, REPORTS, SHOTS, CHROMIUM = "/usr/bin/chromium" } = process.env;
/** Of a replay: reports go on for a minute at least, since the browser may be slow. */
const PACE = 4;
/** How long anything may take before a test fails: long, since others may want the CPU. */
const PATIENCE_MS = 60_000;

let browser;
const dir = mkdtempSync(join(tmpdir(), "millrace-web-"));
const TOKEN = join(dir, "token");
const reports = readFileSync(REPORTS, "utf8").trim().split("\n").map((line) => JSON.parse(line));

/** The same reports again and again, for as many CPUs: each has the figures of a real one, scaled by its own factor. */
function log(name, cpus, length) {
  const of = (at) => {
    const report = structuredClone(reports[at % reports.length]);
    const real = report.cpus;
    report.sequence = at;
    report.time_unix_ms = 1_700_000_000_000 + Math.round((at + 1) * report.period_ns / 1e6);
    report.cpus = Array.from({ length: cpus }, (_, cpu) => {
      const copy = structuredClone(real[cpu % real.length]);
      const factor = cpus === real.length ? 1 : 0.15 + 1.5 * Math.abs(Math.sin(cpu * 1.7));
      copy.cpu = cpu;
      copy.networking_share = 0;
      for (const event of copy.events) {
        event.ns = Math.round(event.ns * factor);
        event.share *= factor;
        copy.networking_share += event.share;
      }
      return copy;
    });
    return report;
  };
  const path = join(dir, name);
  writeFileSync(path, Array.from({ length }, (_, at) => `${JSON.stringify(of(at))}\n`).join(""));
  return path;
}

/** `millrace cost replay`, serving on a free port, or on `port`; `stop` ends it. */
async function serve(path, { port = 0, pace } = {}) {
  const paced = pace ? ["--pace", String(pace)] : [];
  const child = spawn(MILLRACE, ["cost", "replay", path, "--http", `127.0.0.1:${port}`, "--http-token-file", TOKEN, ...paced], { stdio: ["ignore", "ignore", "pipe"] });
  const said = createInterface(child.stderr);
  const url = await new Promise((resolve, reject) => {
    said.on("line", (line) => {
      const [, found] = /(http:\/\/\S+)/.exec(line) ?? [];
      if (found) resolve(found);
    });
    child.on("exit", () => reject(new Error("the server ended")));
  });
  const token = readFileSync(TOKEN, "utf8").trim();
  return {
    // As `millrace cost` prints it on a terminal.
    url: `${url}?token=${token}`,
    token,
    port: Number(new URL(url).port),
    signal: (signal) => child.kill(signal),
    stop: async () => {
      child.kill("SIGTERM");
      if (child.exitCode === null) await once(child, "exit");
    },
  };
}

/** A page whose errors, refused resources and requests to elsewhere are failures. */
async function page(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(PATIENCE_MS);
  const opened = await context.newPage();
  const wrong = [];
  opened.on("pageerror", (error) => wrong.push(String(error)));
  opened.on("console", (message) => {
    // A server that is away is what one of the tests is about.
    if (message.type() === "error" && !message.text().includes("ERR_")) wrong.push(message.text());
  });
  opened.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(url).origin) wrong.push(`asked for ${request.url()}`);
  });
  await opened.goto(url);
  return { page: opened, wrong, close: () => context.close() };
}

const shot = async (page, name) => SHOTS && page.screenshot({ path: join(SHOTS, `${name}.png`), fullPage: true });
const state = (page, wanted) => page.locator(`#connection[data-state=${wanted}]`).waitFor();
const text = (page, selector) => page.locator(selector).first().innerText();

/** Until what `read` reads is another than `before`. */
async function changes(read, before) {
  const deadline = Date.now() + PATIENCE_MS;
  while (Date.now() < deadline) {
    const now = await read();
    if (now !== before) return now;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail(`it stays at ${before}`);
}

before(async () => {
  if (SHOTS) mkdirSync(SHOTS, { recursive: true });
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
});

after(async () => {
  await browser?.close();
  rmSync(dir, { recursive: true, force: true });
});

test("two CPUs: every view opens, updates, and is kept to itself", async () => {
  const server = await serve(log("two", 2, 400), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    await tab.locator(".cpu").nth(1).waitFor();
    assert.equal(await tab.locator(".cpu").count(), 2);
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    // Some history, so that the picture shows one.
    await tab.waitForFunction(() => document.querySelectorAll(".u-legend .u-series").length === 6);
    await new Promise((resolve) => setTimeout(resolve, 4000));
    for (const view of ["cpus", "parts", "flame", "processes", "cgroups", "programs", "about"]) {
      await tab.locator(`#tab-${view}`).click();
      assert.equal(await tab.locator(`#tab-${view}`).getAttribute("aria-selected"), "true");
      if (view === "flame") await tab.locator("#view tbody tr").first().waitFor();
      await shot(tab, `two-${view}`);
    }
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("128 CPUs are readable, in the light and in the dark", async () => {
  const server = await serve(log("many", 128, 200), { pace: PACE });
  try {
    for (const colorScheme of ["light", "dark"]) {
      const { page: tab, wrong, close } = await page(server.url, { colorScheme });
      await state(tab, "live");
      await tab.locator(".cpu").nth(127).waitFor();
      assert.equal(await tab.locator(".cpus.compact .cpu").count(), 128);
      const width = await tab.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(width <= 1280, `nothing is off the page: ${width}`);
      const bars = await tab.locator(".cpus").boundingBox();
      assert.ok(bars.y + bars.height < 1000, `all bars are on one screen or little more: ${bars.y} ${bars.height}`);
      await new Promise((resolve) => setTimeout(resolve, 3000));
      await shot(tab, `many-${colorScheme}`);
      if (colorScheme === "dark") {
        await tab.locator("#tab-flame").click();
        await tab.locator("#view tbody tr").first().waitFor();
        await shot(tab, "many-dark-flame");
      }
      assert.deepEqual(wrong, []);
      await close();
    }
  } finally {
    await server.stop();
  }
});

test("the flame graph is searched, zoomed, and used without a mouse", async () => {
  const server = await serve(log("flame", 2, 60));
  const { page: tab, wrong, close } = await page(`${server.url}#flame`);
  try {
    await state(tab, "log");
    await tab.locator("#view tbody tr").first().waitFor();
    await tab.locator("#flame-search").fill("udp_sendmsg");
    await tab.locator("text=% matches").waitFor();
    await shot(tab, "flame-search");
    await tab.locator("#flame-search").fill("(");
    assert.equal(await tab.locator("#flame-search:invalid").count(), 1);
    await tab.locator("#flame-search").fill("");
    const reset = tab.getByRole("button", { name: "Zoom out" });
    assert.ok(await reset.isDisabled());
    const canvas = tab.locator(".flame canvas");
    await canvas.focus();
    await tab.keyboard.press("ArrowDown");
    await tab.keyboard.press("ArrowDown");
    assert.match(await text(tab, ".tip"), /of networking/);
    await tab.keyboard.press("Enter");
    assert.ok(await reset.isEnabled());
    await shot(tab, "flame-zoomed");
    await tab.keyboard.press("Escape");
    await tab.keyboard.press("Escape");
    assert.ok(await reset.isDisabled());
    await canvas.click({ position: { x: 300, y: 50 } });
    assert.ok(await reset.isEnabled());
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("a range of time is chosen by mouse and by keyboard, and a pause holds the view", async () => {
  const server = await serve(log("range", 2, 600), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    await tab.locator("#pause").click();
    const held = await figures();
    await new Promise((resolve) => setTimeout(resolve, 500));
    assert.equal(await figures(), held);
    await tab.locator("#pause").click();
    await changes(figures, held);

    // The last tenth of the minute that is shown: this many reports have been seen here.
    for (let seen = 0, last = await figures(); seen < 12; seen++) last = await changes(figures, last);
    const plot = await tab.locator(".u-over").boundingBox();
    await tab.mouse.move(plot.x + plot.width * 0.7, plot.y + 50);
    await tab.mouse.down();
    await tab.mouse.move(plot.x + plot.width * 0.97, plot.y + 60, { steps: 5 });
    // Reports come meanwhile.
    const shown = await figures();
    await changes(figures, shown);
    await tab.mouse.up();
    await tab.locator("text=observed").waitFor();
    const chosen = await figures();
    await shot(tab, "range");
    await new Promise((resolve) => setTimeout(resolve, 500));
    assert.equal(await figures(), chosen, "a range does not change");
    await tab.locator("#live").click();
    await changes(figures, chosen);

    await tab.locator(".chart").focus();
    await tab.keyboard.press("ArrowLeft");
    await tab.locator("text=/^[1-9].* observed|observed$/").waitFor();
    const range = () => text(tab, ".range");
    const first = await range();
    await tab.keyboard.press("ArrowLeft");
    await changes(range, first);
    await tab.keyboard.press("Escape");
    assert.equal(await tab.locator("#live").isVisible(), false);
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("the page goes on after the server was restarted", async () => {
  const path = log("restart", 2, 600);
  let server = await serve(path, { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    await server.stop();
    await state(tab, "lost");
    await shot(tab, "lost");
    server = await serve(path, { pace: PACE, port: server.port });
    await state(tab, "live");
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("a page says when reports stay away, and shows them when they come again", async () => {
  const server = await serve(log("stale", 2, 600), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    server.signal("SIGSTOP");
    await state(tab, "stale");
    server.signal("SIGCONT");
    await state(tab, "live");
    assert.deepEqual(wrong, []);
  } finally {
    server.signal("SIGCONT");
    await close();
    await server.stop();
  }
});

test("a client that does not read keeps nobody waiting, and is counted", async () => {
  const server = await serve(log("slow", 128, 400), { pace: 8 });
  const slow = createConnection(server.port, "127.0.0.1");
  slow.write(`GET /api/reports HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${server.token}\r\n\r\n`);
  slow.pause();
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    const dropped = async () => {
      const metrics = await (await fetch(new URL("metrics", server.url), { headers: { Authorization: `Bearer ${server.token}` } })).text();
      return Number(/^millrace_cost_http_dropped_frames_total (\d+)/m.exec(metrics)[1]);
    };
    assert.ok((await changes(dropped, 0)) > 0);
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    assert.deepEqual(wrong, []);
  } finally {
    slow.destroy();
    await close();
    await server.stop();
  }
});
