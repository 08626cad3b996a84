// Shared by the browser's tests: waiting for a state, and the output of the programs that a failed test had started.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { test as run } from "node:test";
import { inspect, isDeepStrictEqual } from "node:util";

/** Time after which waiting for a state fails. It is far longer than any state takes on a slow machine. */
export const BOUND_MS = 300_000;
const PAUSE_MS = 50;
/** Arguments of Chromium, which root must start without a sandbox. It draws in software: emulating a GPU takes a
    fifth more CPU. */
export const BROWSER = ["--no-sandbox", "--disable-gpu"];
/** Number of lines that are printed of each program of a failed test, counted from the end. */
const LINES = 40;

/** The programs of the running test. */
let programs = [];

/** Reads a state again and again until it is as wanted, and returns it. `wanted` is an equal value, a pattern for a
 * text, or a function that checks the state. `what` completes the error "waited in vain for ...", and `report` adds
 * details to it.
 */
export async function settles(what, read, wanted, report = async () => "") {
  const deadline = Date.now() + BOUND_MS;
  for (;;) {
    const state = await read();
    if (isWanted(state, wanted)) return state;
    if (Date.now() > deadline) {
      const sought = typeof wanted === "function" ? "" : `, not ${inspect(wanted)}`;
      const more = await report();
      assert.fail(`waited in vain for ${what}, ${BOUND_MS / 1000} s; last seen: ${inspect(state, { depth: 5 })}${sought} ${more}`);
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS)); // exact: the pause between two reads
  }
}

function isWanted(state, wanted) {
  if (typeof wanted === "function") return wanted(state);
  if (wanted instanceof RegExp) return typeof state === "string" && wanted.test(state);
  return isDeepStrictEqual(state, wanted);
}

/** Waits until `holds` returns true. */
export function until(what, holds, report) {
  return settles(what, holds, Boolean, report);
}

/** Waits until the value differs from `before`, and returns it. */
export function changes(read, before) {
  return settles("a change", read, (now) => now !== before);
}

/** Starts a program whose standard error is kept in `lines` and printed if the test fails; `stop` ends it. */
export function start([program, ...args], stdin = "ignore", stdout = "ignore", ...more) {
  const child = spawn(program, args, { stdio: [stdin, stdout, "pipe", ...more] });
  child.lines = [];
  createInterface(child.stderr).on("line", (line) => child.lines.push(line));
  child.stdin?.on("error", () => {});
  /** Resolves when the program has ended and `lines` is complete. */
  child.ended = once(child, "close");
  child.ended.catch(() => {});
  child.stop = async (signal = "SIGTERM") => {
    child.kill(signal);
    await until(`${program} to end`, () => child.exitCode !== null || child.signalCode !== null);
  };
  programs.push([[program, ...args].join(" "), child]);
  return child;
}

/** Which half of the tests runs: every other one, from the first (0) or the second (1). All run if this is not set. */
const { HALF } = process.env;
let defined = 0;

/** Defines a test. If the test fails, its error has the last output of the programs that it started. */
export function test(name, ...rest) {
  if (HALF !== undefined && defined++ % 2 !== Number(HALF)) return undefined;
  const body = rest.pop();
  return run(name, ...rest, async (context) => {
    programs = [];
    try {
      await body(context);
    } catch (error) {
      if (error instanceof Error) error.message += programs.filter(([, { lines }]) => lines.length > 0).map(log).join("");
      throw error;
    }
  });
}

function log([command, { lines, exitCode, signalCode }]) {
  const end = exitCode ?? signalCode;
  const last = lines.slice(-LINES);
  return [`\n---- ${command}: ${end === null ? "runs" : `ended with ${end}`}, ${lines.length - last.length} lines before these ----`, ...last].join("\n");
}
