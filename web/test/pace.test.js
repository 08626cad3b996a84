// The publisher's bit rate follows the capacity of simulated paths: see `make web-test`.

import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { build } from "vite";

const entry = fileURLToPath(new URL("../relay/pace.ts", import.meta.url));
const [{ output }] = [await build({ configFile: false, logLevel: "error", build: { write: false, lib: { entry, formats: ["es"] } } })].flat();
const { Pace } = await import(`data:text/javascript,${encodeURIComponent(output[0].code)}`);

const MOST = 2_000_000;
const SOUND = 100_000;
const STEP_MS = 20;
const LOOK_MS = 100;
const GROUP_MS = 1000;
const WAY_MS = 40;
/** The key frame's part of a group. */
const KEY = 0.25;

/** Simulates a path that carries `room(at)` bits per second at each time. The publisher on it sends as much as `Pace`
    allows, with a group each second. */
function way(room) {
  const pace = new Pace(MOST, SOUND);
  let [at, given, sent, dropped, isKeyDue] = [0, 0, 0, 0, false];
  let marks = [];
  return {
    pace,
    /** Returns the longest waiting time in ms, and the picture's bits per second. */
    run(ms) {
      let [longest, made] = [0, 0];
      for (const end = at + ms; at < end; at += STEP_MS) {
        if (at % GROUP_MS === 0) isKeyDue = true;
        const share = isKeyDue ? KEY * (GROUP_MS / STEP_MS) : 1 - KEY;
        const picture = pace.hasRoom ? (share * pace.bitrate * STEP_MS) / 8000 : 0;
        if (pace.hasRoom) isKeyDue = false;
        if (!pace.hasRoom) dropped += 1;
        made += picture;
        given += picture + (SOUND * STEP_MS) / 8000;
        sent = Math.min(given, sent + (room(at) * STEP_MS) / 8000);
        longest = Math.max(longest, (8000 * (given - sent)) / room(at));
        if (at % GROUP_MS === 0) marks.push({ given, closed: at });
        for (const mark of marks) {
          if (mark.arrived !== undefined || sent < mark.given) continue;
          mark.left ??= at;
          if (at - mark.left >= WAY_MS) mark.arrived = at;
        }
        if (at % LOOK_MS !== 0) continue;
        marks = marks.filter(({ arrived }) => arrived === undefined || arrived >= Pace.since(at));
        pace.look({ at, given, marks });
      }
      return { longest, made: (8000 * made) / ms };
    },
    get dropped() {
      return dropped;
    },
  };
}

test("bit rate on a path with enough capacity stays as chosen", () => {
  const it = way(() => 10 * MOST);
  it.run(60_000);
  assert.equal(it.pace.bitrate, MOST);
  assert.equal(it.dropped, 0);
});

test("bit rate on a narrow path falls to its capacity, and data waits only briefly", () => {
  for (const room of [1_000_000, 500_000, 300_000]) {
    const it = way(() => room);
    it.run(15_000);
    const { longest, made } = it.run(60_000);
    assert.ok(made + SOUND <= 1.01 * room, `${made} bit/s exceed the capacity of ${room} bit/s`);
    assert.ok(made + SOUND > 0.6 * room, `${made} bit/s use too little of ${room} bit/s`);
    assert.ok(longest < 1500, `data waited ${longest} ms at a capacity of ${room} bit/s`);
  }
});

test("bit rate rises to the chosen one after the path has capacity again", () => {
  const it = way((at) => (at < 10_000 ? 600_000 : 10_000_000));
  it.run(10_000);
  assert.ok(it.pace.bitrate < 600_000);
  it.run(60_000);
  assert.equal(it.pace.bitrate, MOST);
});

test("pictures on a blocked path are not encoded until data arrives again", () => {
  const it = way((at) => (at < 5000 || at > 15_000 ? 10_000_000 : 1));
  it.run(5000);
  assert.ok(it.pace.hasRoom);
  it.run(10_000);
  assert.ok(it.pace.isLate && !it.pace.hasRoom);
  it.run(5000);
  assert.ok(!it.pace.isLate && it.pace.hasRoom);
});
