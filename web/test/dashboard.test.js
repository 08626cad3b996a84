// Tests of the dashboard in a real browser, with recorded reports. `make web-test` runs them.
//
// Environment variables: REPORTS is a file with lines of JSON as `millrace cost --json --stacks` prints them, MILLRACE
// the binary, SHOTS the folder for screenshots, PICTURE the file for the documentation's picture, if it should be drawn.

import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createConnection } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Readable } from "node:stream";
import { after, before } from "node:test";

import { chromium } from "playwright-core";

import { BOUND_MS, BROWSER, changes, settles, start, test } from "./support.js";

const { MILLRACE, REPORTS, SHOTS, PICTURE, CHROMIUM = "/usr/bin/chromium" } = process.env;
/** The events that are part of networking. A report also has others if the observer only samples. */
const NETWORKING = ["net_rx", "net_tx", "send", "receive", "io_uring", "timers", "sockets", "poll", "devices", "workers"];
/** Speed of a replay, relative to the recording. */
const PACE = 4;

let browser;
const dir = mkdtempSync(join(tmpdir(), "millrace-web-"));
const TOKEN = join(dir, "token");
const reports = readFileSync(REPORTS, "utf8").trim().split("\n").map((line) => JSON.parse(line));

/** Returns a function that makes the line of JSON with a given number. The line is a recorded report for `cpus` CPUs,
 * each with the figures of a recorded CPU, scaled by its own factor. `change` modifies each report.
 */
function lines(cpus, change = () => {}) {
  return (at) => {
    const report = structuredClone(reports[at % reports.length]);
    const real = report.cpus;
    report.sequence = at;
    report.time_unix_ms = 1_700_000_000_000 + Math.round(elapsed(at) / 1e6);
    report.cpus = Array.from({ length: cpus }, (_, cpu) => {
      const copy = structuredClone(real[cpu % real.length]);
      const factor = cpus === real.length ? 1 : 0.15 + 1.5 * Math.abs(Math.sin(cpu * 1.7));
      copy.cpu = cpu;
      copy.networking_share = 0;
      for (const event of copy.events) {
        event.ns = Math.round(event.ns * factor);
        event.share *= factor;
        if (NETWORKING.includes(event.event)) copy.networking_share += event.share;
      }
      return copy;
    });
    change(report);
    return `${JSON.stringify(report)}\n`;
  };
}

/** Returns the nanoseconds from the beginning of the first report to the end of report `at`. Periods differ on a busy
    machine, so they are added up. */
function elapsed(at) {
  const sum = (some) => some.reduce((ns, report) => ns + report.period_ns, 0);
  return Math.floor(at / reports.length) * sum(reports) + sum(reports.slice(0, (at % reports.length) + 1));
}

/** Writes a log of `length` reports, and returns its path. */
function log(name, cpus, length, change) {
  const line = lines(cpus, change);
  const path = join(dir, name);
  writeFileSync(path, Array.from({ length }, (_, at) => line(at)).join(""));
  return path;
}

/** Yields lines without end, since a finite log could end before a slow browser has seen enough of it. */
function* endless(line) {
  for (let at = 0; ; at++) yield line(at);
}

/** Starts `millrace cost replay` on a free port, or on `port`; returns undefined if that is taken. */
async function begin(from, port, pace) {
  const replay = [MILLRACE, "cost", "replay", "--http", `127.0.0.1:${port}`, "--http-token-file", TOKEN, ...(pace ? ["--pace", String(pace)] : [])];
  // `cost replay` opens a pipe made by bash: Node's own pipes are sockets, which cannot be opened by path.
  const piped = ["bash", "-c", 'exec "$@" <(cat <&3) 3<&-', "-", ...replay];
  const child = typeof from === "string" ? start([...replay, from]) : start(piped, "ignore", "ignore", "pipe");
  if (typeof from !== "string") {
    const [feed, pipe] = [Readable.from(endless(from)), child.stdio[3]];
    // Lines are no longer made when the reader of the pipe has ended.
    pipe.on("error", () => {}).on("close", () => feed.destroy());
    child.on("exit", () => pipe.destroy());
    feed.pipe(pipe);
  }
  const said = () => child.lines.map((line) => /(http:\/\/\S+)/.exec(line)?.[1]).find((url) => url);
  await settles("the server", () => [said(), child.exitCode, child.lines], ([url, code]) => url !== undefined || code !== null);
  if (child.exitCode === null) return { child, url: said() };
  await child.ended;
  assert.match(child.lines.join("\n"), /in use/);
  return undefined;
}

/** Serves the log `from`, or with `pace` the endless lines of the function `from`. `stop` ends the server. */
async function serve(from, { port = 0, pace } = {}) {
  let begun;
  // A port may take a while to become free again.
  await settles("a server on the port", async () => Boolean((begun = await begin(from, port, pace))), true);
  const { child, url } = begun;
  const token = readFileSync(TOKEN, "utf8").trim();
  const ask = (path) => fetch(new URL(path, url), { headers: { Authorization: `Bearer ${token}` } });
  const points = async () => (await (await ask("api/history")).json()).points;
  // A page that is opened while a log is being read shows the part that has been read.
  if (!pace) await settles("all of the log", async () => (await points()).length, readFileSync(from, "utf8").trim().split("\n").length);
  return {
    // The address is the one that `millrace cost` prints on a terminal.
    url: `${url}?token=${token}`,
    token,
    port: Number(new URL(url).port),
    ask,
    points,
    signal: (signal) => child.kill(signal),
    stop: child.stop,
  };
}

/** Opens a page and fails on its errors, refused resources and requests to other servers. */
async function page(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(BOUND_MS);
  await context.addInitScript(RECORD_TEXTS);
  await context.addInitScript(COUNT_REPORTS);
  const opened = await context.newPage();
  const wrong = [];
  opened.on("pageerror", (error) => wrong.push(String(error)));
  opened.on("console", (message) => {
    // Network errors (ERR_...) do not count: some tests stop the server.
    if (message.type() === "error" && !message.text().includes("ERR_")) wrong.push(`${message.text()}: ${message.location().url}`);
  });
  opened.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(url).origin) wrong.push(`asked for ${request.url()}`);
  });
  await opened.goto(url);
  return { page: opened, wrong, close: () => context.close() };
}

/** Script that records each text drawn on a canvas, its place, and the width of the canvas. */
const RECORD_TEXTS = `
  window.texts = [];
  const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
  const width = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, "width");
  const clear = (canvas) => (window.texts = window.texts.filter((text) => text.canvas !== canvas));
  Object.defineProperty(HTMLCanvasElement.prototype, "width", { ...width, set(value) { clear(this); width.set.call(this, value); } });
  CanvasRenderingContext2D.prototype.clearRect = function () {
    clear(this.canvas);
    return clearRect.apply(this, arguments);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { a, e } = this.getTransform();
    const width = this.measureText(text).width * a;
    const left = x * a + e - (this.textAlign === "center" ? width / 2 : this.textAlign === "right" ? width : 0);
    window.texts.push({ canvas: this.canvas, text, left, right: left + width, middle: left + width / 2, whole: this.canvas.width, chart: this.canvas.closest(".chart") !== null });
    return fillText.apply(this, arguments);
  };
`;

/** Script that counts the reports that the page has received. */
const COUNT_REPORTS = `
  window.reports = 0;
  EventSource.prototype.addEventListener = function (type, listener) {
    EventTarget.prototype.addEventListener.call(this, type, (event) => {
      listener(event);
      if (type === "report") window.reports += 1;
    });
  };
`;

/** Waits until the page has received this number of further reports. */
async function waitForReports(page, count) {
  const taken = () => page.evaluate(() => window.reports);
  const before = await taken();
  await settles(`${count} more reports than ${before}`, taken, (now) => now >= before + count);
}

const shot = async (page, name, fullPage = true) => SHOTS && page.screenshot({ path: join(SHOTS, `${name}.png`), fullPage });
const state = (page, wanted) => page.locator(`#connection[data-state=${wanted}]`).waitFor();
const text = (page, selector) => page.locator(selector).first().innerText();

before(async () => {
  if (SHOTS) mkdirSync(SHOTS, { recursive: true });
  browser = await chromium.launch({ executablePath: CHROMIUM, args: BROWSER, timeout: BOUND_MS });
});

after(async () => {
  await browser?.close();
  rmSync(dir, { recursive: true, force: true });
});

test("every view with two CPUs opens and updates", async () => {
  const server = await serve(lines(2), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    await settles("two CPUs", () => tab.locator(".cpu").count(), 2);
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    // Waits for some history, so that the screenshot shows it.
    await waitForReports(tab, 12);
    for (const view of ["cpus", "parts", "flame", "processes", "cgroups", "programs", "about"]) {
      await tab.locator(`#tab-${view}`).click();
      await settles(`the choice of ${view}`, () => tab.locator(`#tab-${view}`).getAttribute("aria-selected"), "true");
      if (view === "flame") await tab.locator("#view tbody tr").first().waitFor();
      await shot(tab, `two-${view}`);
    }
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("sampled figures show their error, and a long log shows the length of its steps", async () => {
  const few = (report) => {
    for (const event of report.cpus.flatMap((cpu) => cpu.events)) {
      event.parts = [
        { name: "sure", ns: 1e7, share: 0.01, samples: 500, interval: [0.009, 0.011] },
        { name: "poor", ns: 1e6, share: 0.001, samples: 1, interval: [0.0001, 0.006] },
      ];
      event.samples = 501;
    }
    for (const cpu of report.cpus) {
      Object.assign(cpu, { networking_share: 0.2, networking_interval: [0.19, 0.22] });
      Object.assign(cpu, { observer_share: 0.002, observer_samples: 2, observer_interval: [0.0002, 0.007] });
    }
    const times = Object.fromEntries(["receive_ns", "io_uring_ns", "local_ns", "send_calls", "receive_calls", "local_calls"].map((name) => [name, 0]));
    const task = { ...times, share: 0.301, send_ns: Math.round(0.3 * report.period_ns), other_ns: Math.round(0.001 * report.period_ns), samples: 1 };
    Object.assign(task, { figure_samples: [0, 0, 0, 1, 0], figure_intervals: [null, null, null, [0.0001, 0.006], null] });
    report.processes = [{ ...task, pid: 1, name: "few" }];
    report.cgroups = [{ ...task, id: 1, path: "/few", processes: 1 }];
    report.missing = [{ what: "hard interrupts", reason: "this kernel does not measure them" }];
  };
  const server = await serve(lines(1, few), { pace: PACE });
  const { page: tab, wrong, close } = await page(`${server.url}#parts`);
  try {
    await state(tab, "live");
    const row = (name) => tab.locator("#view tbody tr", { hasText: name }).first();
    // The expected values are sums over ten events.
    await settles("a figure that is sure", () => row("sure").innerText(), /10\.00±0\.32 %.*5000/s);
    await settles("a figure of few samples", () => row("poor").locator("td").nth(2).innerText(), "~0.10 %");
    const few = "1 sample only: 0.01 to 0.60 % with 95 % confidence";
    await settles("what it rests on", () => row("poor").locator("td").nth(2).getAttribute("title"), few);
    await settles("the sum in the head", () => text(tab, "#summary"), /^networking 20\.00±2\.00 % of one CPU/);
    // The cell of the first row under a column's head.
    const cell = (column) => tab.locator("#view tbody").first().locator("tr").first().locator("td").nth(column);
    const column = async (name) => (await tab.locator("#view table").first().locator("th:visible").allInnerTexts()).findIndex((head) => head.trim() === name);
    for (const view of ["processes", "cgroups"]) {
      await tab.locator(`#tab-${view}`).click();
      const [send, other] = [await column("send"), await column("other")];
      await settles(`a time of few samples in ${view}`, () => cell(other).innerText(), "~0.10 %");
      await settles("what it rests on", () => cell(other).getAttribute("title"), few);
      await settles("a time that is exact", () => cell(send).innerText(), "30.00 %");
      assert.equal(await cell(send).getAttribute("title"), null); // exact: no report has samples of this time
    }
    await tab.locator("#tab-cpus").click();
    const [observer, irq] = [await column("observer"), await column("irq")];
    await settles("the observer's share of few samples", () => cell(observer).innerText(), "~0.20 %");
    await settles("what it rests on", () => cell(observer).getAttribute("title"), "2 samples only: 0.02 to 0.70 % with 95 % confidence");
    await settles("an unmeasured time", () => cell(irq).innerText(), "?");
    await tab.locator("#tab-about").click();
    await settles("what is missing", () => text(tab, "#view li"), "hard interrupts (this kernel does not measure them)");
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
  // The log has more reports than a page keeps points, so each point is the mean of several reports. They have figures of
  // CPUs only, since those of processes and stacks grow with what runs on the machine.
  const bare = (report) => Object.assign(report, { processes: [], cgroups: [], programs: [], stacks: undefined });
  const long = await begin(log("long", 1, 4000, bare), 0);
  const { page: log_tab, close: close_log } = await page(`${long.url}?token=${readFileSync(TOKEN, "utf8").trim()}`);
  try {
    await settles("the steps of a log", () => text(log_tab, ".range"), /; a point is the mean of 4 reports, ranges are in steps of \d+$/);
  } finally {
    await close_log();
    await long.child.stop();
  }
});

test("128 CPUs are readable in the light and in the dark theme", async () => {
  const server = await serve(lines(128), { pace: PACE });
  try {
    for (const colorScheme of ["light", "dark"]) {
      const { page: tab, wrong, close } = await page(server.url, { colorScheme });
      await state(tab, "live");
      await settles("128 CPUs", () => tab.locator(".cpus.compact .cpu").count(), 128);
      await settles("a page that is no wider than its window", () => tab.evaluate(() => document.documentElement.scrollWidth), (width) => width <= 1280);
      const isShort = (bars) => bars.y + bars.height < 1050;
      await settles("all bars on one screen or little more", () => tab.locator(".cpus").boundingBox(), isShort);
      // Waits for some history, so that the screenshot shows it.
      await waitForReports(tab, 6);
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
    await tab.locator("text=/matches: .* % of the graph/").waitFor();
    await shot(tab, "flame-search");
    await tab.locator("#flame-search").fill("(");
    await tab.locator("#flame-search:invalid").waitFor();
    await tab.locator("#flame-search").fill("");
    const reset = tab.getByRole("button", { name: "Zoom out" });
    const isZoomed = (zoomed) => settles(`zoomed: ${zoomed}`, () => reset.isEnabled(), zoomed);
    await isZoomed(false);
    const canvas = tab.locator(".flame canvas");
    await canvas.focus();
    await tab.keyboard.press("ArrowDown");
    await tab.keyboard.press("ArrowDown");
    await settles("the frame's figures", () => text(tab, ".flame .tip"), /: \d+\.\d\d % of one CPU, \d+\.\d\d % of the graph$/);
    await tab.keyboard.press("Enter");
    await isZoomed(true);
    await shot(tab, "flame-zoomed");
    await tab.keyboard.press("Escape");
    await tab.keyboard.press("Escape");
    await isZoomed(false);
    await canvas.click({ position: { x: 300, y: 50 } });
    await isZoomed(true);
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("a range of time is chosen by mouse and by keyboard, and a pause holds the view", async () => {
  const server = await serve(lines(2), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    await tab.locator("#pause").click();
    await tab.locator("#pause[aria-pressed=true]").waitFor();
    const held = await figures();
    await waitForReports(tab, 4);
    assert.equal(await figures(), held); // exact: four reports have arrived since
    await tab.locator("#pause").click();
    await changes(figures, held);

    // Waits for enough reports to select: 12 of them fill the last third of the chart's minute.
    await tab.getByLabel("Time shown").selectOption("1 min");
    await waitForReports(tab, 12);
    const plot = await tab.locator(".u-over").boundingBox();
    await tab.mouse.move(plot.x + plot.width * 0.7, plot.y + 50);
    await tab.mouse.down();
    await tab.mouse.move(plot.x + plot.width * 0.97, plot.y + 60, { steps: 5 });
    // Reports arrive while the mouse button is down.
    const shown = await figures();
    await changes(figures, shown);
    // The page draws the selection with its next frame; a selection that was not drawn is ignored.
    await settles("the choice under the mouse", () => tab.locator(".u-select").evaluate((area) => area.offsetWidth), (width) => width > 100);
    await tab.mouse.up();
    await settles("a range that was observed", () => text(tab, ".range"), / observed$/);
    const chosen = await figures();
    await shot(tab, "range");
    await waitForReports(tab, 4);
    assert.equal(await figures(), chosen, "a range does not change"); // exact: four reports have been taken since
    await tab.locator("#live").click();
    await changes(figures, chosen);

    // Waits until the history covers both ranges that the keys select, 10 s each.
    await waitForReports(tab, 50);
    await tab.locator(".chart").focus();
    await tab.keyboard.press("ArrowLeft");
    const range = () => text(tab, ".range");
    const first = await settles("a range that was observed", range, / observed$/);
    await tab.keyboard.press("ArrowLeft");
    await changes(range, first);
    await tab.keyboard.press("Escape");
    await tab.locator("#live").waitFor({ state: "hidden" });
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("a page continues after the server was restarted", async () => {
  let server = await serve(lines(2), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    await server.stop();
    await state(tab, "lost");
    await shot(tab, "lost");
    server = await serve(lines(2), { pace: PACE, port: server.port });
    await state(tab, "live");
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("a page says when reports stop, and continues when they arrive again", async () => {
  const server = await serve(lines(2), { pace: PACE });
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

test("a client that does not read delays no other client, and its lost reports are counted", async () => {
  const server = await serve(lines(128), { pace: 8 });
  const slow = createConnection(server.port, "127.0.0.1");
  // The server may close this connection after a while.
  slow.on("error", () => {});
  slow.write(`GET /api/reports HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${server.token}\r\n\r\n`);
  slow.pause();
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    const dropped = async () => {
      const metrics = await (await server.ask("metrics")).text();
      return Number(/^millrace_cost_http_dropped_frames_total (\d+)/m.exec(metrics)[1]);
    };
    await settles("frames that are dropped", dropped, (count) => count > 0);
    const figures = () => text(tab, "#view table tbody");
    await changes(figures, await figures());
    assert.deepEqual(wrong, []);
  } finally {
    slow.destroy();
    await close();
    await server.stop();
  }
});

/** Returns the seconds since midnight of a text such as 12:34:56, and null for other texts. */
const seconds = (text) => (/^\d\d:\d\d:\d\d$/.test(text) ? text.split(":").reduce((sum, part) => 60 * sum + Number(part), 0) : null);

test("the chart's time axis has the chosen length, names its time zone, and its labels are complete", async () => {
  const server = await serve(lines(2), { pace: PACE });
  const cases = [
    ["UTC", "UTC", 0],
    ["Asia/Kolkata", "local time, UTC+05:30", 5.5],
    ["America/New_York", "local time, UTC-05:00", -5],
  ];
  try {
    for (const [timezoneId, said, hours] of cases) {
      for (const width of [1280, 390]) {
        const { page: tab, wrong, close } = await page(server.url, { timezoneId, viewport: { width, height: 844 } });
        await state(tab, "live");
        await tab.locator(".cpu").nth(1).waitFor();
        for (const [name, length] of [["1 min", 60], ["5 min", 300], ["1 h", 3600]]) {
          await tab.getByLabel("Time shown").selectOption(name);
          const moment = () => text(tab, ".moment");
          await changes(moment, await moment());
          const { texts, plot, canvas, latest } = await tab.evaluate(() => {
            const canvas = document.querySelector(".chart canvas");
            return {
              texts: window.texts.filter(({ chart }) => chart).map(({ canvas: _, ...text }) => text),
              plot: document.querySelector(".u-over").getBoundingClientRect().toJSON(),
              canvas: canvas.getBoundingClientRect().toJSON(),
              latest: document.querySelector(".moment").textContent,
            };
          });
          assert.ok(texts.some(({ text }) => text === said), `the axis does not name ${said}: ${texts.map(({ text }) => text)}`);
          for (const { text, left, right, whole } of texts) {
            assert.ok(seconds(text) === null || (left >= 0 && right <= whole), `${text} is cut: ${left} to ${right} of ${whole}`);
          }
          const times = texts.filter(({ text }) => seconds(text) !== null);
          const [first, last] = [times.at(-2), times.at(-1)];
          assert.ok(first && last, `the axis has fewer than two times: ${texts.map(({ text }) => text)}`);
          const scale = (seconds(last.text) - seconds(first.text)) / (last.middle - first.middle);
          const shown = scale * plot.width;
          assert.ok(Math.abs(shown - length) < 0.05 * length, `the axis for ${name} covers ${shown} s`);
          const end = seconds(last.text) + scale * (plot.right - canvas.left - last.middle);
          const now = seconds(/\d\d:\d\d:\d\d/.exec(latest)[0]);
          assert.ok(Math.abs(end - now) < 0.05 * length, `the axis ends at ${end} s and not at the latest report, ${now} s`);
        }
        // The page's latest report may be slightly older than the server's.
        const clocks = async () => {
          const utc = ((await server.points()).at(-1).time_unix_ms / 3_600_000 + hours + 24) % 24;
          const now = seconds(/\d\d:\d\d:\d\d/.exec(await text(tab, ".moment"))[0]) / 3600;
          return { utc, now };
        };
        const isSame = ({ utc, now }) => Math.min(Math.abs(now - utc), 24 - Math.abs(now - utc)) < 0.5;
        await settles("the time of the reports", clocks, isSame);
        assert.deepEqual(wrong, []);
        await close();
      }
    }
  } finally {
    await server.stop();
  }
});

test("the legend shows the latest values in the order of the bars, and those under the pointer", async () => {
  const server = await serve(lines(2), { pace: PACE });
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "live");
    const legend = () => tab.locator("#history .legend").innerText();
    const values = async () => (await legend()).replaceAll(/\s+/g, " ");
    await changes(values, await values());
    await settles("values", values, /^net_rx [\d.?]+.* net_tx .* send .* receive .* io_uring .* workers .* networking \d+\.\d\d %$/);
    const bars = async () => {
      const names = await tab.locator(".cpu").nth(0).locator(".stack > span").evaluateAll((spans) => spans.map((span) => span.className));
      return names.slice(0, 10);
    };
    await settles("bars in the same order", bars, NETWORKING);
    await settles("their moment", () => text(tab, ".moment"), /^of one CPU, latest: \d\d:\d\d:\d\d$/);
    // The values equal those in the head of the page: same report, same unit. Both are read at once, since reports
    // continue.
    const heads = () => tab.evaluate(() => ["#summary", "#history .legend"].map((place) => document.querySelector(place).innerText.replaceAll(/\s+/g, " ").trim()));
    const isSame = ([summary, values]) => values.endsWith(`networking ${/networking ~?(\d+\.\d\d)(±[\d.]+)? % of one CPU/.exec(summary)?.[1]} %`);
    await settles("the same in the head of the page", heads, isSame);
    await tab.locator("#pause").click();
    await tab.locator("#pause[aria-pressed=true]").waitFor();
    const plot = await tab.locator(".u-over").boundingBox();
    await tab.mouse.move(plot.x + plot.width - 2, plot.y + 30);
    await tab.locator("text=/of one CPU, at /").waitFor();
    await tab.mouse.move(5, 5);
    await tab.locator("text=/of one CPU, latest/").waitFor();
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("figures equal those of the terminal, and are aligned to the right", async () => {
  const path = log("figures", 2, 60);
  const printed = start([MILLRACE, "cost", "replay", path], "ignore", "pipe");
  let terminal = "";
  for await (const chunk of printed.stdout) terminal += chunk;
  const server = await serve(path);
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "log");
    await settles("all of the log", () => text(tab, ".range"), / observed$/);
    // A row of the terminal's table of CPUs equals one of the page's.
    const [, wanted] = /\nCPU +networking.*\n(.*)\n/.exec(terminal);
    // The uncertainty of events' figures is only in their tooltips.
    const row = wanted.trim().split(/  +/).map((cell, at) => (at > 1 ? cell.replace(/±[\d.]+/, "") : cell));
    await settles("the terminal's row", () => tab.locator("#view tbody tr").first().locator("td").allInnerTexts(), row);
    for (const view of ["cpus", "parts", "flame", "processes", "cgroups", "programs"]) {
      await tab.locator(`#tab-${view}`).click();
      await tab.locator("#view tbody tr").first().waitFor();
      const wrongly = () => tab.evaluate(() =>
        [...document.querySelectorAll("#view td, #view th")]
          .filter((cell) => /^([\d.]+( %| .?s)?|-|\?)$/.test(cell.innerText) || cell.classList.contains("number"))
          .filter((cell) => getComputedStyle(cell).textAlign !== "right")
          .map((cell) => cell.innerText),
      );
      await settles(`figures to the right in ${view}`, wrongly, []);
      const shares = await settles(`the unit in ${view}`, () => tab.locator("#view").innerText(), view === "about" ? /./ : /shares are of one CPU/);
      assert.doesNotMatch(shares, /\d\.\d %|\d\.\d{3,} %/, "two places");
    }
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

test("terms such as net_rx are explained to the mouse, the keyboard and screen readers", async () => {
  const server = await serve(log("terms", 2, 60));
  const { page: tab, wrong, close } = await page(server.url);
  try {
    await state(tab, "log");
    await tab.locator("#view tbody tr").first().waitFor();
    const tip = tab.locator("#explanation");
    for (const name of ["net_rx", "net_tx", "send", "receive", "io_uring", "networking", "observer", "other work", "timers", "user", "softirq", "irq", "steal", "idle"]) {
      const term = tab.getByRole("button", { name: new RegExp(`^${name}( |$)`) }).first();
      await tip.waitFor({ state: "hidden" });
      await term.hover();
      await tip.waitFor();
      const said = await settles(`what ${name} is`, () => tip.innerText(), (said) => said.length > 20);
      await tab.mouse.move(700, 895);
      await tip.waitFor({ state: "hidden" });
      await term.focus();
      await tip.waitFor();
      await settles(`the same by the keyboard, of ${name}`, () => tip.innerText(), said);
      const described = () => term.evaluate((element) => document.getElementById(element.getAttribute("aria-describedby"))?.textContent);
      await settles(`the same to a screen reader, of ${name}`, described, said);
      // The text disappears while the pointer stays, as WCAG 1.4.13 requires.
      await tab.keyboard.press("Escape");
      await tip.waitFor({ state: "hidden" });
      await tab.locator("#theme").focus();
    }
    // The text can be opened with the Tab key alone, and read completely.
    await tab.locator("[aria-label=Later]").focus();
    await tab.keyboard.press("Tab");
    await tab.keyboard.press("Tab");
    await tip.waitFor();
    await settles("what net_rx is", () => tip.innerText(), /^Packets that arrive/);
    await shot(tab, "explained");
    await tip.hover();
    assert.ok(await tip.isVisible()); // exact: the page has handled the pointer's events
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

/** Replaces a report's stacks by known ones: 300 ms of networking, and 100 ms of a process, most of whose frames have no
    known function. */
function known(report) {
  const functions = ["outer", "inner", "[unknown]", "]]></script><img src=x onerror=alert(1)>", "bpf:relay_ingress"];
  const stack = (frames, samples, more) => ({ cpu: 0, frames, samples, ns: samples * 1_000_000, ...more });
  report.stacks = {
    functions,
    stacks: [
      stack([0, 1], 200, { event: "net_rx" }),
      stack([0, 4], 60, { event: "net_rx" }),
      stack([3], 40, { event: "send" }),
      stack([2, 2, 2, 0, 2, 2], 100, { pid: 77 }),
    ],
  };
  report.period_ns = 1_000_000_000;
  report.processes = [];
}

test("the flame graph's root names its contents, and consecutive unknown functions are merged", async () => {
  const server = await serve(log("root", 2, 1, known));
  const { page: tab, wrong, close } = await page(`${server.url}#flame`);
  try {
    await tab.locator("#view tbody tr").first().waitFor();
    const names = () => tab.evaluate(() => window.texts.filter(({ chart }) => !chart).map(({ text }) => text));
    const root = async () => (await names())[0];
    await settles("the root's name", root, "networking and process 77, all CPUs");
    await settles("two that are unknown", names, (names) => names.filter((name) => name === "[unknown]").length === 2);
    const cpu = tab.getByLabel("CPU", { exact: true });
    await cpu.selectOption("CPU 0");
    await settles("the root of CPU 0", root, "networking and process 77, CPU 0");
    await cpu.selectOption("CPU 1");
    await settles("the root of CPU 1", root, "nothing");
    assert.deepEqual(wrong, []);
  } finally {
    await close();
    await server.stop();
  }
});

/** Runs a command to its end. */
async function run(...args) {
  const [code] = await once(start([MILLRACE, ...args]), "exit");
  assert.equal(code, 0, args.join(" "));
}

test("a flame graph's SVG file names its contents, is zoomed and searched, and loads no other file", async () => {
  const file = join(dir, "flame.svg");
  await run("cost", "replay", log("flame-file", 2, 1, known), "--flame", file);
  const { page: tab, wrong, close } = await page(`file://${file}`);
  const text = (tab, selector) => tab.locator(selector).textContent();
  tab.on("dialog", (dialog) => wrong.push(dialog.message()));
  try {
    const visible = () => tab.locator("#frames > g:visible > title").evaluateAll((titles) => titles.map((title) => title.textContent.replace(/: [^:]*$/, "")));
    const all = await settles("the root", visible, ([root]) => root === "networking and process 77, 2 CPUs");
    assert.equal(all.filter((name) => name === "[unknown]").length, 2);
    assert.ok(all.includes("]]></script><img src=x onerror=alert(1)>"));
    const { name, kernel } = reports[0].host;
    // The range ends with the first report, whose period depends on the machine.
    const until = new Date(1_700_000_000_000 + Math.round(reports[0].period_ns / 1e6)).toISOString().slice(0, 19).replace("T", " ");
    const about = `${name}, Linux ${kernel}: 1.00 s until ${until} UTC, ${reports[0].frequency_hz} stacks a second and CPU`;
    await settles("what it is of", () => text(tab, "#about"), about);
    await settles("its title", () => tab.title(), `millrace cost: networking and process 77, 2 CPUs; ${about}`);
    await shot(tab, "svg", false);

    const reset = tab.locator("#reset");
    const isZoomed = (zoomed) => settles(`zoomed: ${zoomed}`, () => reset.isEnabled(), zoomed);
    await isZoomed(false);
    const frame = (name) => tab.locator("#frames > g", { has: tab.locator("title", { hasText: new RegExp(`^${name}: `) }) });
    const width = async (of) => Number(await of.first().locator("rect").getAttribute("width"));
    const matches = (count) => settles(`${count} that match`, () => tab.locator("#frames > g.match").count(), count);
    await settles("half of the width", () => width(frame("inner")), (width) => Math.round(width) === 600);
    await frame("inner").first().click();
    await settles("all of the width", () => width(frame("inner")), 1200);
    await settles("what is above and below", visible, [all[0], "net_rx", "outer", "inner"]);
    await settles("its figures", () => text(tab, "#detail"), /^inner: 20\.00 % of one CPU$/);
    await reset.click();
    await settles("all frames", visible, all);

    await tab.keyboard.press("/");
    await tab.keyboard.type("^(outer|inner|bpf:)");
    // The graph has 400 ms. Matches have 260 ms in net_rx, where `outer` contains the other two, and 100 ms in the process.
    await settles("the share that matches", () => text(tab, "#found"), "matches: 90.00 % of the graph");
    await matches(4);
    const fill = (of) => of.first().locator("rect").evaluate((rect) => getComputedStyle(rect).fill);
    await settles("the colour of what matches", () => fill(frame("inner")), "rgb(122, 31, 162)");
    await shot(tab, "svg-search", false);
    await tab.keyboard.type("(");
    await settles("a complaint", () => text(tab, "#found"), "not a regular expression");
    await tab.keyboard.press("Escape");
    await matches(0);

    // The keyboard alone zooms into net_rx and its function, and out again.
    for (const key of ["ArrowDown", "ArrowDown", "Enter"]) await tab.keyboard.press(key);
    await settles("all of the width", () => width(frame("outer")), 1200);
    await settles("its figures", () => text(tab, "#detail"), /^outer: 26\.00 % of one CPU$/);
    await tab.keyboard.press("ArrowDown");
    await tab.keyboard.press("ArrowRight");
    await settles("the program's figures", () => text(tab, "#detail"), /^bpf:relay_ingress: 6\.00 % of one CPU$/);
    await shot(tab, "svg-zoomed", false);
    await tab.keyboard.press("Escape");
    await tab.keyboard.press("Escape");
    await settles("all frames", visible, all);
    await isZoomed(false);
    assert.deepEqual(wrong, []);
  } finally {
    await close();
  }
});

test("command lines are shown only with --arguments, cut to the table's width, and can be hidden", async () => {
  const secret = `server --token s3cret \u001b[2J<b>${"x".repeat(480)}`;
  const path = (name, args) => log(name, 2, 60, (report) => {
    report.processes = [{ pid: 7, name: "server", arguments: args, share: 0.1, send_ns: 1, receive_ns: 0, io_uring_ns: 0, other_ns: 0, local_ns: 0, send_calls: 1, receive_calls: 0 }];
  });
  for (const [name, args] of [["arguments", secret], ["none", undefined]]) {
    const server = await serve(path(name, args));
    const { page: tab, wrong, close } = await page(`${server.url}#processes`);
    try {
      await tab.locator("#view tbody tr").first().waitFor();
      const toggle = tab.locator("#arguments");
      await settles("the switch", () => toggle.isVisible(), args !== undefined);
      const table = () => text(tab, "#view table");
      if (args === undefined) await settles("a table without command lines", table, (table) => !/command line/.test(table));
      else {
        await settles("the command line", table, /server --token s3cret .*<b>xxx/);
        const widths = () => tab.evaluate(() => [document.documentElement.scrollWidth, document.querySelector("#view td.long").getBoundingClientRect().height]);
        await settles("it in one line of the page", widths, ([page, row]) => page <= 1280 && row < 40);
        await settles("all of it", () => tab.locator("#view td.long").getAttribute("title"), args);
        await shot(tab, "arguments");
        await toggle.click();
        await settles("the switch off", () => toggle.getAttribute("aria-pressed"), "false");
        await settles("a table without it", table, (table) => !/s3cret|command line/.test(table));
      }
      const metrics = await (await server.ask("metrics")).text();
      assert.doesNotMatch(metrics, /s3cret/);
      const { status } = await fetch(new URL("api/report", server.url));
      assert.equal(status, 401);
      assert.deepEqual(wrong, []);
    } finally {
      await close();
      await server.stop();
    }
  }
});

if (PICTURE) {
  test("the picture of the documentation", async () => {
    const server = await serve(REPORTS, { pace: 20 });
    const { page: tab, wrong, close } = await page(`${server.url}#flame`, { viewport: { width: 1200, height: 760 } });
    try {
      // The host's name does not matter for the picture.
      await tab.locator("#host").evaluate((host) => (host.hidden = true));
      await tab.getByLabel("Time shown").selectOption("1 min");
      const moment = () => text(tab, ".moment");
      const clock = await tab.evaluate((ms) => new Date(ms).toTimeString().slice(0, 8), reports.at(-1).time_unix_ms);
      await settles("the last report", moment, (text) => text.endsWith(clock));
      // The graph's stacks are fetched again, since the replay has added reports after the page was opened.
      await tab.locator("#tab-cpus").click();
      await Promise.all([tab.waitForResponse(/api\/stacks/), tab.locator("#tab-flame").click()]);
      await tab.locator("#view tbody tr").first().waitFor();
      await tab.screenshot({ path: PICTURE });
      assert.deepEqual(wrong, []);
    } finally {
      await close();
      await server.stop();
    }
  });
}
