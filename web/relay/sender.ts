// Sends an encoder's output to the relay, on one session after another, and adapts its bit rate to the path.

import { Connection, Path } from "@moq/net";

import { Broadcast } from "./broadcast";
import { type Chunk, type Encoder, FRAMES_A_SECOND, SOUNDS_A_SECOND, type Sink } from "./encode";
import { Meter } from "./meter";
import type { Track } from "./mp4";
import { Pace } from "./pace";

/** Interval of measurements. */
const LOOK_MS = 100;
/** Bytes around each frame: headers of MP4, of MoQ, and of packets. */
const AROUND_BYTES = 150;
const AROUND = 8 * AROUND_BYTES * FRAMES_A_SECOND;
const AROUND_SOUND = 8 * AROUND_BYTES * SOUNDS_A_SECOND;

export class Sender implements Sink {
  /** Measures the connection's streams, so it must exist before the connection is made. */
  readonly #meter = new Meter();
  readonly connection = new Connection.Reload();
  #encoder?: Encoder;
  #broadcast?: Broadcast;
  /** Bytes of media in earlier sessions. */
  #bytes = 0;
  #isRefused = false;
  #pace?: Pace;
  readonly #looking = setInterval(() => this.#look(), LOOK_MS);
  readonly #path: Path.Valid;
  readonly #unhear: () => void;

  /** `failed` is called if encoding fails, and `refused` with the relay's reason if the relay refuses the broadcast. */
  constructor(
    name: string,
    readonly failed: (error: Error) => void,
    refused: (reason: string) => void,
  ) {
    this.#path = Path.from(name);
    this.#unhear = refusals(this.#path, (reason) => {
      this.#isRefused = true;
      refused(reason);
    });
    this.connection.established.watch(() => this.#begin());
  }

  /** Sets the encoder whose media is sent. */
  from(encoder: Encoder) {
    this.#encoder = encoder;
  }

  described(tracks: Track[]) {
    const [video, sound] = tracks;
    const reserved = AROUND + (sound ? sound.bitrate + AROUND_SOUND : 0);
    if (video && video.bitrate !== this.#pace?.most) this.#pace = new Pace(video.bitrate, reserved);
    if (this.#broadcast) this.#broadcast.describe(tracks);
    else this.#begin();
  }

  take(chunk: Chunk) {
    this.#broadcast?.take(chunk);
  }

  get hasRoom(): boolean {
    return this.#pace?.hasRoom ?? true;
  }

  /** Largest bit rate that the picture may have, in bits per second. */
  get aim(): number | undefined {
    return this.#pace?.bitrate;
  }

  /** Bytes of media that were published in all sessions. */
  get bytes(): number {
    return this.#bytes + (this.#broadcast?.bytes ?? 0);
  }

  get state(): "connecting" | "refused" | "idle" | "sent" {
    if (!this.#broadcast) return "connecting";
    if (this.#broadcast.isWatched) return "sent";
    return this.#isRefused ? "refused" : "idle";
  }

  close() {
    clearInterval(this.#looking);
    this.#unhear();
    this.#end();
    this.connection.close();
    this.#meter.close();
  }

  #look() {
    const [broadcast, pace, at] = [this.#broadcast, this.#pace, performance.now()];
    if (!broadcast || !pace) return;
    this.#meter.forget(Pace.since(at));
    pace.look({ at, given: this.#meter.given, marks: this.#meter.marks });
    if (pace.isLate) {
      broadcast.giveUp();
      this.#encoder?.begin();
    }
    this.#encoder?.aim(pace.bitrate);
  }

  /** Begins a new broadcast for the present session, with a key frame. */
  #begin() {
    this.#end();
    const session = this.connection.established.peek();
    const tracks = this.#encoder?.tracks;
    if (!session || !tracks) return;
    this.#isRefused = false;
    this.#broadcast = new Broadcast(this.#path, tracks);
    this.#meter.begin();
    session.publish(this.#path, this.#broadcast.producer);
    this.#encoder?.begin();
  }

  #end() {
    const { bytes } = this;
    this.#broadcast?.close();
    this.#broadcast = undefined;
    this.#bytes = bytes;
  }
}

/** Calls `refused` when the relay refuses a broadcast, until the returned function is called. @moq/net writes the reason
    only to the console, so `console.warn` is replaced meanwhile. */
function refusals(path: string, refused: (reason: string) => void): () => void {
  const warn = console.warn;
  console.warn = (...all: unknown[]) => {
    const reason = /^announce failed: broadcast=(.*) error=.*PublishNamespace rejected: \d+ ?(.*)$/.exec(String(all[0]));
    if (reason?.[1] === path) refused(reason[2] ?? "");
    warn.apply(console, all);
  };
  return () => {
    console.warn = warn;
  };
}
