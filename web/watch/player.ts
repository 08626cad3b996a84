// The element that plays, and what it says of itself.

import "@moq/watch/element";
import "@moq/watch/ui";
import type MoqWatch from "@moq/watch/element";
import { type Connection, Path } from "@moq/net";

import { byId, count, h } from "../src/dom";

const FIGURES_MS = 250;

const STATES = { offline: "waits for the broadcast", loading: "waits for media", live: "live" };

export class Player {
  readonly #watch: MoqWatch;
  readonly #place: HTMLElement;
  #shown = 0;
  #stalls = 0;
  #hasPicture = false;

  constructor(place: HTMLElement) {
    const canvas = h("canvas", { width: 640, height: 360, role: "img", "aria-label": "The video" });
    // Sound has to be asked for; until then browsers play nothing that has any.
    this.#watch = h("moq-watch", { muted: true, visible: "always", "catalog-format": "msf" }, canvas);
    this.#place = place;
    this.#watch.renderer.out.timestamp.subscribe((timestamp) => {
      if (timestamp === undefined) return;
      this.#shown += 1;
      this.#hasPicture = true;
    });
    this.#watch.video.out.stalled.subscribe((stalled) => {
      // Nothing stalls that has not begun.
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
    this.#watch.name = Path.from(name);
    // In the page it begins to connect, and to ask for what is called as it is.
    if (!this.#watch.isConnected) this.#place.append(h("moq-watch-ui", {}, this.#watch));
    document.title = `${name} - millrace relay`;
  }

  /** Shows figures in the list of this ID, from now on. */
  report(id: string) {
    setInterval(() => list(id, this.#figures()), FIGURES_MS);
  }

  #figures(): Record<string, string> {
    const { broadcast, video, sync } = this.#watch;
    const display = video.out.display.peek();
    const stats = video.out.stats.peek();
    const decoded = stats?.frameCount ?? 0;
    return {
      State: STATES[broadcast.out.status.peek()],
      Picture: display ? `${display.width} × ${display.height}` : "none yet",
      Rendition: video.source.out.track.peek() ?? "none yet",
      "Frames shown": String(this.#shown),
      "Frames not shown": String(Math.max(0, decoded - this.#shown)),
      Stalls: String(this.#stalls),
      "Buffer of this player": `${sync.out.buffer.peek().toFixed(0)} ms`,
      Received: `${count(stats?.bytesReceived ?? 0)}B`,
    };
  }
}

/** Names and values; what is there already is kept, so that readers of the page are not thrown back. */
export function list(id: string, entries: Record<string, string>) {
  const place = byId(id);
  const names = Object.keys(entries);
  if ([...place.querySelectorAll("dt")].map((name) => name.textContent).join() !== names.join()) {
    place.replaceChildren(...names.flatMap((name) => [h("dt", {}, name), h("dd", { "data-figure": name })]));
  }
  place.querySelectorAll("dd").forEach((value, at) => {
    const text = entries[names[at] ?? ""] ?? "";
    if (value.textContent !== text) value.textContent = text;
  });
}
