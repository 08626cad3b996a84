// Connects the page to the relay. If that fails, a message tells the user why.

import type { Connection } from "@moq/net";

import { byId } from "../src/dom";

/** The address of this relay's WebTransport server: `/web.json`. */
interface Web {
  port: number | null;
  /** The address for clients on the same machine. */
  local: string | null;
  /** SHA-256 of a certificate that is not signed by an authority. */
  sha256: string | null;
}

/** Drafts that @moq/net 0.3.4 implements correctly. In draft-20 it writes LARGEST_OBJECT with a length in front, so the
    relay refuses its PUBLISH. */
const PROTOCOLS = ["moqt-19", "moqt-18"];

/** Interval at which the page asks an unreachable relay for its address and certificate. */
const AGAIN_MS = 1000;

const ENDED = "The connection to the relay has ended. The page connects again as soon as it can.";

/** Returns the reason why the page cannot work in this browser, or `undefined` if it can. `needs` maps each needed class
    of WebCodecs to its use in words. */
export function hindrance(needs: Record<string, string>): string | undefined {
  if (!window.isSecureContext) {
    return (
      "Browsers connect to a relay, and open cameras, from pages on https:// and on localhost only, and this page is on neither. " +
      `Open http://localhost:${location.port} on the computer where the relay runs, or put a server with https in front of it.`
    );
  }
  if (!("WebTransport" in window)) {
    return "This browser has no WebTransport, which the page needs for media. Current versions of Chromium, Edge and Firefox have it.";
  }
  const missing = Object.entries(needs).find(([name]) => !(name in window));
  return missing && `This browser cannot ${missing[1]} for a page (WebCodecs is missing).`;
}

export type Tell = (message: string | undefined) => void;

/** Shows messages in the element with this ID. */
export function say(id: string): Tell {
  const place = byId(id);
  return (message) => {
    place.hidden = !message;
    if (message !== undefined && place.textContent !== message) place.textContent = message;
  };
}

/** Keeps the connections' address and certificate up to date: a restarted relay may have others. The state of the first
    connection shows whether the relay can be reached. */
export class Reach {
  #web: Web | undefined;
  /** Whether a connection with the present `#web` has succeeded. */
  #hasConnected = false;
  #ends?: AbortSignal;

  /** `state` is the element that shows the connection's state. */
  constructor(
    readonly connections: [Connection.Reload, ...Connection.Reload[]],
    readonly tell: Tell,
    readonly state: string,
  ) {
    for (const connection of connections) {
      // `timeout: 0` makes attempts continue for ever, since a relay may be down for long.
      connection.delay = { initial: 500, multiplier: 2, max: 4000, timeout: 0 };
      connection.websocket = { enabled: false };
    }
    this.#show(connections[0].status.peek());
    connections[0].status.watch((status) => this.#show(status));
  }

  #is(status: "connected" | "disconnected") {
    return this.connections[0].status.peek() === status;
  }

  /** Looks up the relay's address while there is no connection, until `ends` is aborted. */
  async keep(ends: AbortSignal) {
    this.#ends = ends;
    while (!ends.aborted) {
      if (!this.#is("connected")) await this.#look(ends);
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  async #look(ends: AbortSignal) {
    const web: Web | undefined = await fetch("./web.json", { cache: "no-store" })
      .then((answer) => answer.json())
      .catch(() => undefined);
    if (this.#is("connected") || ends.aborted) return;
    if (!web) {
      this.tell("The relay no longer answers: it was stopped, or the network is down. This page keeps trying.");
      return;
    }
    if (web.port === null) {
      this.tell("This relay is configured not to serve browsers (webtransport = false).");
      return;
    }
    const isDraining = (await fetch("./healthz", { cache: "no-store" }).catch(() => undefined))?.status === 503;
    if (this.#is("connected") || ends.aborted) return;
    const isNew = web.sha256 !== this.#web?.sha256 || web.port !== this.#web?.port;
    if (isNew) {
      this.#web = web;
      this.#hasConnected = false;
      this.#point(web, web.port);
    } else if (isDraining) {
      this.tell("The relay is shutting down, perhaps for a restart. This page connects again as soon as it can.");
    } else if (this.#hasConnected) {
      this.tell(ENDED);
    } else if (this.#is("disconnected")) {
      this.tell(
        `The relay answers, but no connection to its UDP port ${web.port} can be established: a firewall blocks UDP, the relay refuses ` +
          "this page or this address (a token, ?jwt=, may be missing), or the browser refuses its certificate" +
          (web.sha256 ? " (which no authority has signed; is this computer's clock right?)." : "."),
      );
    }
  }

  /** Sets the relay's URL and certificate for the next attempt of each connection. */
  #point({ sha256, local }: Web, port: number) {
    // Browsers resolve localhost to 127.0.0.1 or ::1, and the relay may serve only one of them.
    const host = location.hostname === "localhost" && local ? local : location.hostname;
    const url = new URL(`https://${host.includes(":") && !host.startsWith("[") ? `[${host}]` : host}:${port}/`);
    const jwt = new URLSearchParams(location.search).get("jwt");
    if (jwt) url.searchParams.set("jwt", jwt);
    byId("host").textContent = url.host;
    for (const connection of this.connections) {
      connection.webtransport = { protocols: PROTOCOLS, ...(sha256 && { serverCertificateHashes: [{ value: sha256 }] }) };
      connection.url.set(url);
    }
    // Only the first connection is enabled here. The player's connection would subscribe to all namespaces before a
    // broadcast is chosen, and to one of them afterwards; a relay may refuse overlapping prefixes in one session.
    this.connections[0].enabled.set(true);
  }

  #show(status: string) {
    if (this.#ends?.aborted) return;
    const place = byId(this.state);
    place.textContent = status;
    place.dataset.state = status === "connected" ? "live" : status === "connecting" ? "waits" : "lost";
    if (status === "connected") {
      this.#hasConnected = true;
      this.tell(undefined);
    } else if (status === "disconnected" && this.#hasConnected) {
      this.tell(ENDED);
    }
  }
}
