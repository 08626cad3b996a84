// A headless Chromium that is driven over a pipe by the DevTools protocol: node is enough.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** To remove what a browser leaves behind. */
const TRIES = 600;

export class Browser {
  #process;
  #profile = mkdtempSync(join(tmpdir(), "millrace-browser-"));
  /** Answers that are awaited, by the command's number. */
  #awaited = new Map();
  #commands = 0;
  #rest = "";
  /** Is rejected when the browser ends. */
  #ended;

  /** `origin`: browsers connect from pages on localhost or https; in a lab the relay is elsewhere. `flags`: more of them. */
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

  /** A page with this address; `script` runs in it before its own. */
  async open(url, script = "") {
    const { targetId } = await this.send("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await this.send("Target.attachToTarget", { targetId, flatten: true });
    const send = (method, params) => this.send(method, params, sessionId);
    await send("Page.enable");
    await send("Page.addScriptToEvaluateOnNewDocument", { source: script });
    await send("Page.navigate", { url });
    return {
      /** What the expression has come to, once that is known. */
      evaluate: async (expression) => {
        const { result, exceptionDetails } = await send("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
        if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
        return result.value;
      },
      /** As PNG. */
      screenshot: async () => Buffer.from((await send("Page.captureScreenshot", {})).data, "base64"),
    };
  }

  async close() {
    this.#process.kill("SIGKILL");
    // Its helpers write there until they have noticed.
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
