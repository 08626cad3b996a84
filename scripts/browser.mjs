// Drives a headless Chromium over a pipe by the DevTools protocol; it needs only node.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** Attempts to remove the files that a browser leaves. */
const TRIES = 600;

export class Browser {
  #process;
  #profile = mkdtempSync(join(tmpdir(), "millrace-browser-"));
  /** Pending answers by the command's number. */
  #awaited = new Map();
  #commands = 0;
  #rest = "";
  /** Rejected when the browser ends. */
  #ended;

  /** Browsers connect from pages on localhost or https, and in a lab the relay is elsewhere: `origin` is treated as
   * secure. `flags`: further flags of Chromium.
   */
  constructor(chromium, origin, flags = []) {
    this.#process = spawn(
      chromium,
      [
        "--headless",
        "--no-sandbox",
        "--remote-debugging-pipe",
        "--window-size=1280,800",
        `--user-data-dir=${this.#profile}`,
        `--unsafely-treat-insecure-origin-as-secure=${origin}`,
        ...flags,
      ],
      { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] },
    );
    this.#ended = new Promise((_, reject) =>
      this.#process.on("exit", () => reject(new Error("the browser ended"))).on("error", reject),
    );
    this.#ended.catch(() => {});
    this.#process.stdio[3].on("error", () => {});
    this.#process.stdio[4].on("data", (bytes) => this.#take(bytes));
  }

  #take(bytes) {
    const messages = (this.#rest + bytes).split("\0");
    this.#rest = messages.pop();
    for (const message of messages.map((text) => JSON.parse(text))) this.#awaited.get(message.id)?.(message);
  }

  send(method, params = {}, sessionId = undefined) {
    const id = ++this.#commands;
    const answer = new Promise((resolve, reject) =>
      this.#awaited.set(id, ({ result, error }) => {
        this.#awaited.delete(id);
        if (error) reject(new Error(`${method}: ${error.message}`));
        else resolve(result);
      }),
    );
    this.#process.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    return Promise.race([answer, this.#ended]);
  }

  /** Opens a page; `script` runs in it before its own scripts. */
  async open(url, script = "") {
    const { targetId } = await this.send("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await this.send("Target.attachToTarget", { targetId, flatten: true });
    const send = (method, params) => this.send(method, params, sessionId);
    await send("Page.enable");
    await send("Page.addScriptToEvaluateOnNewDocument", { source: script });
    await send("Page.navigate", { url });
    return {
      /** Evaluates an expression, and waits for its result. */
      evaluate: async (expression) => {
        const { result, exceptionDetails } = await send("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
        if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
        return result.value;
      },
      /** Takes a screenshot as PNG. */
      screenshot: async () => Buffer.from((await send("Page.captureScreenshot", {})).data, "base64"),
    };
  }

  async close() {
    this.#process.kill("SIGKILL");
    // The browser's helpers write there until they notice its end.
    for (let tries = 0; tries < TRIES; tries++) {
      await new Promise((resolve) => setTimeout(resolve, 200)); // exact: the gap between two tries
      try {
        rmSync(this.#profile, { recursive: true, force: true });
        return;
      } catch {}
    }
    console.error(`${this.#profile} could not be removed`);
  }
}
