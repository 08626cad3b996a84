// How fast media may be made for the way to the relay to carry it: less once it waits, more, with care, while it does not.

import type { Mark } from "./meter";

/** What was seen of the way. */
export interface Look {
  /** Milliseconds, as the marks' times. */
  at: number;
  /** Bytes that were to be sent, so far. */
  given: number;
  /** In the order in which they were made. */
  marks: readonly Mark[];
}

/** Bits per second of a picture at which it can still be recognised. */
const LEAST = 100_000;
/** What throughput is measured over at least, milliseconds; and until when a mark may be of use for that. */
const SPAN_MS = 1500;
const WINDOW_MS = 10_000;
/** Media that waits for longer is too much for the way; or that waits for so many times of what it takes when nothing waits. */
const BUSY_MS = 250;
const BUSY_TIMES = 3;
/** For so long after something has arrived it says how much waits. */
const FRESH_MS = 500;
/** Ways are no longer than this; what takes longer waits. */
const MOST_WAY_MS = 400;
/** No more is made until it waits for less. */
const FULL_MS = 500;
/** It is of no use any more. */
const LATE_MS = 1500;
/** Of what the way carries; the rest lets go what waits. */
const DOWN = 0.8;
/** Of what it was thought to carry: streams share it, so that a few arrivals say little. */
const LESS = 0.7;
const DOWN_EVERY_MS = 1500;
const UP = 1.08;
const UP_EVERY_MS = 1000;
/** Without anything that waits. */
const UP_AFTER_MS = 3000;
/** What comes near to what was too much is tried after so long, and not more before it is known what came of it. */
const NEAR = 0.9;
const NEAR_AFTER_MS = 15_000;
const NEAR_EVERY_MS = 4000;

export class Pace {
  /** Bits per second. */
  bitrate: number;
  /** How long what is given now waits until it is sent, milliseconds. */
  waitingMs = 0;
  /** How long it takes until something has arrived for which nothing waits, milliseconds. */
  #wayMs = MOST_WAY_MS;
  /** Bits per second that the way carries, as far as it was ever filled. */
  #room = Infinity;
  /** What was tried then, and whether it is tried now. */
  #tooMuch = Infinity;
  #isTried = true;
  #busyAt = -Infinity;
  #slowAt = -Infinity;
  #widenedAt = -Infinity;
  #changedAt = -Infinity;
  /** When the last mark arrived that was looked at. */
  #measured = -Infinity;

  /** `most`: what the picture is to have; `reserved`: what else is sent, which is never made less. */
  constructor(
    readonly most: number,
    readonly reserved: number,
  ) {
    this.bitrate = most;
  }

  /** One more picture may be made. */
  get hasRoom(): boolean {
    return this.waitingMs <= FULL_MS;
  }

  /** What waits is better given up. */
  get isLate(): boolean {
    return this.waitingMs > LATE_MS;
  }

  /** Marks that arrived before this are not looked at any more. */
  static since(at: number): number {
    return at - WINDOW_MS;
  }

  look({ at, given, marks }: Look) {
    const arrived = marks.filter(({ arrived }) => arrived !== undefined) as Required<Mark>[];
    const waited = this.#waited(at, arrived);
    const unheard = this.#unheard(at, marks);
    const isSlow = Math.max(waited, unheard) > Math.max(BUSY_MS, BUSY_TIMES * this.#wayMs);
    this.#measure(arrived, isSlow);
    this.waitingMs = Math.max(unheard, this.#queued(at, given, arrived), 0);
    if (isSlow) this.#slowAt = at;
    else this.#widen(at);
    if (isSlow || !this.hasRoom) {
      this.#busyAt = at;
      this.#down(at);
    } else if (at - this.#busyAt >= UP_AFTER_MS) this.#up(at);
  }

  /** What arrives in time may be more than is known to go through. */
  #widen(at: number) {
    if (at - Math.max(this.#slowAt + UP_AFTER_MS, this.#widenedAt + UP_EVERY_MS) < 0) return;
    this.#room *= UP;
    this.#widenedAt = at;
  }

  /** What has arrived last, by how long that took from when it was closed. */
  #waited(at: number, arrived: Required<Mark>[]): number {
    for (const mark of arrived) this.#wayMs = Math.min(this.#wayMs, mark.arrived - mark.closed);
    const last = arrived.at(-1);
    return last && at - last.arrived <= FRESH_MS ? last.arrived - last.closed - this.#wayMs : 0;
  }

  /** What was closed longest ago and has not arrived. */
  #unheard(at: number, marks: readonly Mark[]): number {
    const oldest = marks.find(({ arrived }) => arrived === undefined);
    return oldest ? at - oldest.closed - this.#wayMs : 0;
  }

  /** What arrived in a time is what the way carried: all that it can, if something waited. */
  #measure(arrived: Required<Mark>[], isSlow: boolean) {
    const last = arrived.at(-1);
    const first = arrived.findLast((mark) => last && last.arrived - mark.arrived >= SPAN_MS);
    if (!first || !last || last.arrived === this.#measured) return;
    this.#measured = last.arrived;
    const carried = (8000 * (last.given - first.given)) / (last.arrived - first.arrived);
    if (!isSlow) this.#room = Math.max(this.#room, carried);
    else if (this.#room === Infinity) this.#room = carried;
    else this.#room = Math.min(Math.max(carried, LESS * this.#room), this.#room / LESS);
  }

  /** What was given since what has arrived, less what has been sent since. */
  #queued(at: number, given: number, arrived: Required<Mark>[]): number {
    const last = arrived.at(-1);
    if (!last) return 0;
    return (8000 * (given - last.given)) / Math.max(LEAST, this.#room) - (at - last.arrived);
  }

  #down(at: number) {
    if (at - this.#changedAt < DOWN_EVERY_MS) return;
    const room = this.#room - this.reserved;
    // Once it fits, what waits goes by itself.
    if (!this.#isTried && this.bitrate <= room && room !== Infinity) return;
    if (this.#isTried) this.#tooMuch = this.bitrate;
    this.#isTried = false;
    this.#change(at, DOWN * Math.min(this.bitrate, room));
  }

  #up(at: number) {
    const wanted = this.bitrate * UP;
    // What was too much is none any more.
    if (this.bitrate > this.#tooMuch) [this.#room, this.#tooMuch] = [Infinity, Infinity];
    const isNear = wanted > NEAR * this.#tooMuch;
    if (at - this.#changedAt < (isNear ? NEAR_EVERY_MS : UP_EVERY_MS)) return;
    if (isNear && at - this.#busyAt < NEAR_AFTER_MS) return;
    this.#isTried = true;
    this.#change(at, wanted);
    // Nothing waited, so there is more than that.
    this.#room = Math.max(this.#room, (this.bitrate + this.reserved) / DOWN);
  }

  #change(at: number, bitrate: number) {
    this.bitrate = Math.min(this.most, Math.max(LEAST, bitrate));
    this.#changedAt = at;
  }
}
