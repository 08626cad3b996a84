// The player's element (moq-watch), and the figures of the picture that it plays.

import "@moq/watch/element";
import "@moq/watch/ui";
import type MoqWatch from "@moq/watch/element";
import { type Connection, Path } from "@moq/net";

import { h } from "../src/dom";
import { bytes, list } from "./figures";
import { hinders } from "./playable";

const FIGURES_MS = 250;
/** Largest difference between a time stamp and this clock at which the time stamp counts as a time of day. Other time
    stamps begin anywhere, mostly at 0. */
const DAY_MS = 86_400_000;

/** Formats of catalogs, in the order in which they are tried. With MSF the player supports neither LOC, nor the
 * configuration of a FLAC decoder, nor moq-cli's numbers, and it mistakes encrypted pictures for others.
 */
const FORMATS = ["hang", "msf"] as const;
const AGAIN_MS = 500;

const STATES = { offline: "waits for the broadcast", loading: "waits for media", live: "live" };

export class Player {
  readonly #watch: MoqWatch;
  readonly #place: HTMLElement;
  /** Names the parts of the broadcast that cannot be played, and why. */
  readonly #note = h("p", { class: "note", role: "status", id: "unplayable", hidden: true });
  #shown = 0;
  #stalls = 0;
  #hasPicture = false;
  /** Time stamp of the last picture, and the time when it was shown, in milliseconds. */
  #stamp?: number;
  #shownAt = 0;
  /** Whether a catalog in the requested format has arrived. */
  #hasCatalog = false;

  constructor(place: HTMLElement) {
    const canvas = h("canvas", { width: 640, height: 360, role: "img", "aria-label": "The video" });
    // The player starts muted: browsers play sound only after an action of the user.
    this.#watch = h("moq-watch", { muted: true, visible: "always", "catalog-format": FORMATS[0] }, canvas);
    this.#place = place;
    place.append(this.#note);
    this.#watch.renderer.out.timestamp.subscribe((timestamp) => {
      if (timestamp === undefined) return;
      this.#shown += 1;
      this.#stamp = timestamp;
      this.#shownAt = Date.now();
      this.#hasPicture = true;
    });
    const { active, catalog, status } = this.#watch.broadcast.out;
    catalog.subscribe((catalog) => void this.#judge(catalog));
    // The next broadcast may have catalogs in other formats.
    active.subscribe((broadcast) => (this.#hasCatalog &&= broadcast !== undefined));
    status.subscribe((status) => {
      if (status === "live") this.#hasCatalog = true;
      // The broadcast exists, but its catalog does not or cannot be read.
      if (status === "offline" && active.peek() && !this.#hasCatalog) setTimeout(() => this.#tryOther(), AGAIN_MS);
    });
    this.#watch.video.out.stalled.subscribe((stalled) => {
      // A player that has not shown a picture cannot stall.
      if (stalled && this.#hasPicture) this.#stalls += 1;
    });
  }

  get connection(): Connection.Reload {
    return this.#watch.connection;
  }

  play(name: string) {
    this.#shown = 0;
    this.#stalls = 0;
    this.#hasPicture = false;
    this.#stamp = undefined;
    this.#ask(FORMATS[0]);
    this.#watch.name = Path.from(name);
    // The element is added to the page after its broadcast is set, because it connects when it is added.
    if (!this.#watch.isConnected) this.#place.prepend(h("moq-watch-ui", {}, this.#watch));
  }

  #ask(format: (typeof FORMATS)[number]) {
    this.#hasCatalog = false;
    this.#watch.catalogFormat = format;
  }

  async #judge(catalog: MoqWatch["catalog"]) {
    const why = catalog && (await hinders(this.#watch, catalog));
    // The result is dropped if another catalog has replaced this one meanwhile.
    if (this.#watch.catalog !== catalog) return;
    this.#note.hidden = !why;
    this.#note.textContent = why ?? "";
  }

  #tryOther() {
    if (this.#hasCatalog || this.#watch.broadcast.out.status.peek() !== "offline") return;
    this.#ask(this.#watch.catalogFormat === FORMATS[0] ? FORMATS[1] : FORMATS[0]);
  }

  /** Shows the player's figures from now on, in the list element with this ID. */
  report(id: string) {
    setInterval(() => list(id, this.#figures()), FIGURES_MS);
  }

  /** Returns the picture's latency: the difference between this clock and the time stamp, if that is a time of day. */
  #latency(): string {
    const late = this.#stamp === undefined ? undefined : this.#shownAt - this.#stamp;
    if (late === undefined) return "none yet";
    return Math.abs(late) < DAY_MS ? `${late.toFixed(0)} ms` : "no time stamps";
  }

  #sound(): string {
    const { audio, catalog, muted } = this.#watch;
    const config = audio.source.out.config.peek();
    if (config) return muted ? `${config.codec}, muted` : config.codec;
    return catalog?.audio ? "none yet" : "none";
  }

  #figures(): Record<string, string> {
    const { broadcast, video, sync } = this.#watch;
    const display = video.out.display.peek();
    const stats = video.out.stats.peek();
    const decoded = stats?.frameCount ?? 0;
    return {
      State: STATES[broadcast.out.status.peek()],
      Picture: display ? `${display.width} × ${display.height}` : "none yet",
      Sound: this.#sound(),
      Rendition: video.source.out.track.peek() ?? "none yet",
      "Frames shown": String(this.#shown),
      "Frames not shown": String(Math.max(0, decoded - this.#shown)),
      Stalls: String(this.#stalls),
      Latency: this.#latency(),
      "Buffer of this player": `${sync.out.buffer.peek().toFixed(0)} ms`,
      Received: bytes(stats?.bytesReceived ?? 0),
    };
  }
}
