// Sends what an encoder makes to the relay, on one session after another.

import { Connection, Path } from "@moq/net";

import { Broadcast } from "./broadcast";
import type { Chunk, Encoder, Sink } from "./encode";
import type { Track } from "./mp4";

export class Sender implements Sink {
  readonly connection = new Connection.Reload();
  #encoder?: Encoder;
  #broadcast?: Broadcast;
  /** Of sessions before this one. */
  #bytes = 0;
  #isRefused = false;
  readonly #path: Path.Valid;
  readonly #unhear: () => void;

  /** `refused`: by the relay, with its reason. */
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

  /** Media comes from there. */
  from(encoder: Encoder) {
    this.#encoder = encoder;
  }

  described(tracks: Track[]) {
    if (this.#broadcast) this.#broadcast.describe(tracks);
    else this.#begin();
  }

  take(chunk: Chunk) {
    this.#broadcast?.take(chunk);
  }

  /** Of media that was ready to be sent. */
  get bytes(): number {
    return this.#bytes + (this.#broadcast?.bytes ?? 0);
  }

  get state(): "connecting" | "refused" | "idle" | "sent" {
    if (!this.#broadcast) return "connecting";
    if (this.#broadcast.isWatched) return "sent";
    return this.#isRefused ? "refused" : "idle";
  }

  close() {
    this.#unhear();
    this.#end();
    this.connection.close();
  }

  /** A session has its own broadcast, which begins with a key frame. */
  #begin() {
    this.#end();
    const session = this.connection.established.peek();
    const tracks = this.#encoder?.tracks;
    if (!session || !tracks) return;
    this.#isRefused = false;
    this.#broadcast = new Broadcast(this.#path, tracks);
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

/** Until the function that is returned is called. @moq/net tells the console alone why a relay does not take a broadcast. */
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
