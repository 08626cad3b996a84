// How the page comes to the relay, and in plain words why it does not.

import type { Connection } from "@moq/net";

import { byId } from "../src/dom";

/** Where this relay serves WebTransport: `/web.json`. */
interface Web {
  port: number | null;
  /** Its address for who is on the same machine. */
  local: string | null;
  /** SHA-256 of a certificate that no authority has signed. */
  sha256: string | null;
}

/** What @moq/net 0.3.4 speaks as the drafts do. In draft-20 it writes LARGEST_OBJECT with a length in front: what it publishes there is refused. */
const PROTOCOLS = ["moqt-19", "moqt-18"];

/** How soon the relay is asked again whether it is there, and with which certificate. */
const AGAIN_MS = 1000;

const ENDED = "The connection to the relay has ended. The page connects again as soon as it can.";

/** Why a page can do nothing here, if it cannot; `needs`: of WebCodecs, and what for. */
export function hindrance(needs: Record<string, string>): string | undefined {
  if (!window.isSecureContext) {
    return (
      "Browsers connect to a relay, and open cameras, from pages on https:// and on localhost only, and this page is on neither. " +
      `Open http://localhost:${location.port} on the computer where the relay runs, or put a server with https in front of it.`
    );
  }
  if (!("WebTransport" in window)) {
    return "This browser has no WebTransport, by which media comes. Chromium, Edge and Firefox of today have it.";
  }
  const missing = Object.entries(needs).find(([name]) => !(name in window));
  return missing && `This browser cannot ${missing[1]} for a page (WebCodecs is missing).`;
}

export type Tell = (message: string | undefined) => void;

/** Messages in the place of this ID. */
export function say(id: string): Tell {
  const place = byId(id);
  return (message) => {
    place.hidden = !message;
    if (message !== undefined && place.textContent !== message) place.textContent = message;
  };
}

/** Keeps connections pointed at the relay, whose certificate may change. The first says whether it can be reached. */
export class Reach {
  #web: Web | undefined;
  /** With what `#web` says. */
  #hasConnected = false;
  #ends?: AbortSignal;

  /** `state`: the place where the connection's state is shown. */
  constructor(
    readonly connections: [Connection.Reload, ...Connection.Reload[]],
    readonly tell: Tell,
    readonly state: string,
  ) {
    for (const connection of connections) {
      // For ever: a relay may be away for longer than a moment.
      connection.delay = { initial: 500, multiplier: 2, max: 4000, timeout: 0 };
      connection.websocket = { enabled: false };
    }
    this.#show(connections[0].status.peek());
    connections[0].status.watch((status) => this.#show(status));
  }

  #is(status: "connected" | "disconnected") {
    return this.connections[0].status.peek() === status;
  }

  /** Until `ends`; then nothing is said any more. */
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
      this.tell("The relay does not answer any more: it was stopped, or the network is gone. It is tried again and again.");
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
      this.tell("The relay is being stopped, perhaps to be started anew. The page connects again as soon as it can.");
    } else if (this.#hasConnected) {
      this.tell(ENDED);
    } else if (this.#is("disconnected")) {
      this.tell(
        `The relay answers, but no connection to its UDP port ${web.port} comes about: a firewall keeps UDP out, the relay lets ` +
          "this page or this address not in (without a token, ?jwt=, perhaps), or the browser does not take its certificate" +
          (web.sha256 ? " (which no authority has signed; is this computer's clock right?)." : "."),
      );
    }
  }

  /** Connections go there, from their next attempt on. */
  #point({ sha256, local }: Web, port: number) {
    // Browsers may take localhost for the other of 127.0.0.1 and ::1.
    const host = location.hostname === "localhost" && local ? local : location.hostname;
    const url = new URL(`https://${host.includes(":") && !host.startsWith("[") ? `[${host}]` : host}:${port}/`);
    const jwt = new URLSearchParams(location.search).get("jwt");
    if (jwt) url.searchParams.set("jwt", jwt);
    byId("host").textContent = url.host;
    for (const connection of this.connections) {
      connection.webtransport = { protocols: PROTOCOLS, ...(sha256 && { serverCertificateHashes: [{ value: sha256 }] }) };
      connection.url.set(url);
    }
    // The player's is as soon as there is something to play: before, it would ask for all that there is, and then for a part of that,
    // which on one session may be refused.
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
