// Adapts the media's bit rate to the capacity of the path to the relay. The rate is lowered when data waits, and
// raised in small steps when no data waits.

import type { Mark } from "./meter";

/** A measurement of the path. */
export interface Look {
  /** Time in milliseconds, on the marks' clock. */
  at: number;
  /** Number of bytes written until then. */
  given: number;
  /** Marks in the order in which they were made. */
  marks: readonly Mark[];
}

/** Smallest bit rate of a picture that can still be recognised. */
const LEAST = 100_000;
/** Shortest time over which throughput is measured, in milliseconds, and the age up to which marks are used for
    it. */
const SPAN_MS = 1500;
const WINDOW_MS = 10_000;
/** Waiting time above which the path counts as overloaded, in milliseconds and as a multiple of the path's delay. The
    larger one applies. */
const BUSY_MS = 250;
const BUSY_TIMES = 3;
/** Time after an arrival for which its waiting time counts as the present one. */
const FRESH_MS = 500;
/** Longest delay of a path without a queue. A longer delay counts as waiting. */
const MOST_WAY_MS = 400;
/** Waiting time above which no further picture is encoded. */
const FULL_MS = 500;
/** Waiting time above which waiting pictures are useless, and are dropped. */
const LATE_MS = 1500;
/** Fraction of the capacity that is used after an overload; the rest drains the queue. */
const DOWN = 0.8;
/** Factor by which one measurement may lower the estimated capacity, and raise it by the inverse. Streams share the path,
    so a measurement from few arrivals is uncertain. */
const LESS = 0.7;
const DOWN_EVERY_MS = 1500;
const UP = 1.08;
const UP_EVERY_MS = 1000;
/** Time without waiting data after which the bit rate is raised. */
const UP_AFTER_MS = 3000;
/** Fraction of the rate that last overloaded the path. Raises above that fraction wait for NEAR_AFTER_MS after an
    overload, and for NEAR_EVERY_MS after a change, when its effect is known. */
const NEAR = 0.9;
const NEAR_AFTER_MS = 15_000;
const NEAR_EVERY_MS = 4000;

export class Pace {
  /** The present bit rate in bits per second. */
  bitrate: number;
  /** Estimated waiting time of data that is written now, in milliseconds. */
  waitingMs = 0;
  /** Time that data takes to arrive without waiting, in milliseconds. */
  #wayMs = MOST_WAY_MS;
  /** Estimated capacity in bits per second. Infinity until the path was first overloaded. */
  #room = Infinity;
  /** The picture's bit rate that last overloaded the path, and whether the present rate is a raise that is on trial. */
  #tooMuch = Infinity;
  #isTried = true;
  #busyAt = -Infinity;
  #slowAt = -Infinity;
  #widenedAt = -Infinity;
  #changedAt = -Infinity;
  /** Arrival time of the last mark that was used. */
  #measured = -Infinity;

  /** `most` is the wanted bit rate of the picture. `reserved` is that of other data, which is never reduced. */
  constructor(
    readonly most: number,
    readonly reserved: number,
  ) {
    this.bitrate = most;
  }

  /** Whether one more picture may be encoded. */
  get hasRoom(): boolean {
    return this.waitingMs <= FULL_MS;
  }

  /** Whether waiting pictures should be dropped. */
  get isLate(): boolean {
    return this.waitingMs > LATE_MS;
  }

  /** Returns the time before which marks are too old to be used. */
  static since(at: number): number {
    return at - WINDOW_MS;
  }

  /** Updates the estimates from a measurement, and changes the bit rate if needed. */
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

  /** Raises the estimated capacity a little, while data arrives without waiting. */
  #widen(at: number) {
    if (at - Math.max(this.#slowAt + UP_AFTER_MS, this.#widenedAt + UP_EVERY_MS) < 0) return;
    this.#room *= UP;
    this.#widenedAt = at;
  }

  /** Returns how long the latest arrival waited, in milliseconds: its time since closing, less the path's delay. */
  #waited(at: number, arrived: Required<Mark>[]): number {
    for (const mark of arrived) this.#wayMs = Math.min(this.#wayMs, mark.arrived - mark.closed);
    const last = arrived.at(-1);
    return last && at - last.arrived <= FRESH_MS ? last.arrived - last.closed - this.#wayMs : 0;
  }

  /** Returns how long the oldest mark that has not arrived has been waiting, in milliseconds. */
  #unheard(at: number, marks: readonly Mark[]): number {
    const oldest = marks.find(({ arrived }) => arrived === undefined);
    return oldest ? at - oldest.closed - this.#wayMs : 0;
  }

  /** Measures throughput. It equals the path's capacity if data was waiting, and is a lower bound otherwise. */
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

  /** Returns the time that the data in the queue takes to be sent, in milliseconds: data written since the last
      arrival, less the data sent since. */
  #queued(at: number, given: number, arrived: Required<Mark>[]): number {
    const last = arrived.at(-1);
    if (!last) return 0;
    return (8000 * (given - last.given)) / Math.max(LEAST, this.#room) - (at - last.arrived);
  }

  #down(at: number) {
    if (at - this.#changedAt < DOWN_EVERY_MS) return;
    const room = this.#room - this.reserved;
    // The queue drains by itself once the rate fits.
    if (!this.#isTried && this.bitrate <= room && room !== Infinity) return;
    if (this.#isTried) this.#tooMuch = this.bitrate;
    this.#isTried = false;
    this.#change(at, DOWN * Math.min(this.bitrate, room));
  }

  #up(at: number) {
    const wanted = this.bitrate * UP;
    // A rate above the one that overloaded the path caused no overload, so both estimates are outdated.
    if (this.bitrate > this.#tooMuch) [this.#room, this.#tooMuch] = [Infinity, Infinity];
    const isNear = wanted > NEAR * this.#tooMuch;
    if (at - this.#changedAt < (isNear ? NEAR_EVERY_MS : UP_EVERY_MS)) return;
    if (isNear && at - this.#busyAt < NEAR_AFTER_MS) return;
    this.#isTried = true;
    this.#change(at, wanted);
    // No data waited, so the capacity is larger.
    this.#room = Math.max(this.#room, (this.bitrate + this.reserved) / DOWN);
  }

  #change(at: number, bitrate: number) {
    this.bitrate = Math.min(this.most, Math.max(LEAST, bitrate));
    this.#changedAt = at;
  }
}
