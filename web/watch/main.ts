// What is live at this relay, and a player for it: @moq/watch, over WebTransport.

import "@moq/watch/element";
import "@moq/watch/ui";
import type MoqWatch from "@moq/watch/element";
import { Connection, Path } from "@moq/net";

import "../src/style.css";
import "./style.css";
import { byId, count, h } from "../src/dom";

/** Where this relay serves WebTransport: `/web.json`. */
interface Web {
  port: number;
  /** SHA-256 of a certificate that no authority has signed. */
  sha256: string | null;
}

const FIGURES_MS = 500;
const RELAY_MS = 2000;

async function main() {
  const web: Web = await (await fetch("./web.json")).json();
  const url = new URL(`https://${location.hostname}:${web.port}/${location.search}`);
  const webtransport = web.sha256 ? { serverCertificateHashes: [{ value: web.sha256 }] } : {};
  byId("host").textContent = url.host;

  const connection = new Connection.Reload({ enabled: true, url, webtransport, websocket: { enabled: false } });
  connection.status.watch((status) => (byId("connection").textContent = status));

  const player = new Player(url, webtransport);
  window.addEventListener("hashchange", () => player.play(named()));
  new Broadcasts((name) => (location.hash = encodeURIComponent(name))).follow(connection);
  if (named()) player.play(named());
  setInterval(() => player.show(), FIGURES_MS);
  await showRelay();
}

/** The broadcast in the address. */
function named(): string {
  return decodeURIComponent(location.hash.slice(1));
}

/** The list of what is live. */
class Broadcasts {
  readonly #buttons = new Map<string, HTMLLIElement>();

  constructor(readonly choose: (name: string) => void) {
    window.addEventListener("hashchange", () => this.#mark());
  }

  /** Those of each connection in turn. */
  follow(connection: Connection.Reload) {
    connection.established.watch((established) => {
      for (const name of [...this.#buttons.keys()]) this.#remove(name);
      if (established) void this.#listen(established);
    });
  }

  async #listen(established: Connection.Established) {
    const announced = established.announced(Path.empty());
    for (let event = await announced.next(); event; event = await announced.next()) {
      if (event.active) this.#add(event.path);
      else this.#remove(event.path);
    }
  }

  #add(name: string) {
    if (this.#buttons.has(name)) return;
    const button = h("button", { type: "button", onclick: () => this.choose(name) }, name);
    const item = h("li", {}, button);
    const after = [...this.#buttons].find(([other]) => other > name)?.[1] ?? null;
    byId("broadcasts").insertBefore(item, after);
    this.#buttons.set(name, item);
    this.#mark();
    // Of the first there is no choice.
    if (!named()) this.choose(name);
  }

  #remove(name: string) {
    this.#buttons.get(name)?.remove();
    this.#buttons.delete(name);
    this.#mark();
  }

  #mark() {
    byId("none").hidden = this.#buttons.size > 0;
    for (const [name, item] of this.#buttons) {
      item.firstElementChild?.setAttribute("aria-current", String(name === named()));
    }
  }
}

/** The element that plays, and what it says of itself. */
class Player {
  #watch: MoqWatch | undefined;
  #stalls = 0;

  constructor(
    readonly url: URL,
    readonly webtransport: Connection.Reload["webtransport"],
  ) {}

  play(name: string) {
    if (!this.#watch) {
      // Sound has to be asked for; until then browsers play nothing that has any.
      const watch = h("moq-watch", { muted: true, visible: "always" }, h("canvas", { width: 640, height: 360 }));
      watch.connection.webtransport = this.webtransport;
      watch.connection.websocket = { enabled: false };
      watch.video.out.stalled.subscribe((stalled) => (this.#stalls += stalled ? 1 : 0));
      byId("player").append(h("moq-watch-ui", {}, watch));
      watch.url = this.url;
      this.#watch = watch;
    }
    this.#stalls = 0;
    this.#watch.name = Path.from(name);
    document.title = `${name} - millrace relay`;
  }

  show() {
    const watch = this.#watch;
    if (!watch) return;
    const display = watch.video.out.display.peek();
    const stats = watch.video.out.stats.peek();
    list("figures", {
      State: watch.broadcast.out.status.peek(),
      Picture: display ? `${display.width} × ${display.height}` : "none yet",
      Rendition: watch.video.source.out.track.peek() ?? "none yet",
      Frames: count(stats?.frameCount ?? 0),
      Received: `${count(stats?.bytesReceived ?? 0)}B`,
      Stalls: String(this.#stalls),
      Buffer: `${watch.sync.out.buffer.peek().toFixed(0)} ms`,
    });
  }
}

/** What /status says, to whom it is for. */
async function showRelay() {
  for (;;) {
    const answer = await fetch("./status").catch(() => undefined);
    if (answer?.ok) {
      const status = await answer.json();
      const { totals } = status;
      list("relay", {
        Engine: status.engine.name,
        "Packets by kernel": count(totals.kernel.packets),
        "Packets by userspace": count(totals.data_plane.packets),
        Sessions: String(status.sessions.length),
        Tracks: String(status.tracks.length),
      });
    } else {
      list("relay", { Status: answer?.status === 401 ? "needs the link with the token" : "not to be had" });
    }
    await new Promise((resolve) => setTimeout(resolve, RELAY_MS));
  }
}

function list(id: string, entries: Record<string, string>) {
  const items = Object.entries(entries).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  byId(id).replaceChildren(...items);
}

main().catch((error: unknown) => (byId("connection").textContent = String(error)));
