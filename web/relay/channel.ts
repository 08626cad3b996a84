// The relay's status, which the relay sends once a second on `/events`. All parts of the page share one connection.

export interface Sent {
  packets: number;
  bytes: number;
}

export interface Session {
  id: number;
  remote: string;
  upstream: boolean;
  publisher: boolean;
  subscriber: boolean;
  age_s: number;
  rtt_us: number;
  path_queue_us: number;
  queue_us: number;
  bandwidth?: number;
  loss?: number;
  kernel: Sent;
  data_plane: Sent;
  packets_lost: number;
  subscriptions: number;
  publications: number;
  pending: number;
  drops: Record<string, number>;
  identity: string | null;
}

/** The share of the last ten seconds' media that the kernel forwarded, and the main reason why it did not forward the
    rest. */
export interface Share {
  bytes: number;
  by_kernel: number;
  reason: string;
  remedy: string;
}

export interface Track {
  name: string;
  publishers: number;
  subscribers: number;
  groups_cached: number;
  bytes_cached: number;
  largest: [number, number] | null;
  owner: string | null;
}

/** The part of the status that the page shows. */
export interface Status {
  version: string;
  engine: { name: string; reason: string; streams: number };
  /** The kernel's share by the interface's name. */
  shares: { interfaces: Record<string, Share> };
  uptime_s: number;
  draining: boolean;
  listen: string[];
  /** Sessions: the relay lists a few hundred at most. `session_count` is the number of all. */
  sessions: Session[];
  session_count: number;
  tracks: Track[];
  track_count: number;
  cache: { bytes: number; limit: number; groups: number };
  drops: Record<string, number>;
  access: { open: boolean; refused: Record<string, number> };
  gate: { on: boolean; reason: string; refused: Record<string, number> };
  upstream: { host: string; session: number | null; reason: string } | null;
  totals: { quinn: Sent; data_plane: Sent; kernel: Sent; packets_lost: number; object_bytes_received: number };
}

/** Either a status, with the previous one if there is one, or the reason why there is none. */
export type News = { now: Status; before?: Status } | { why: string };

type Listener = (news: News) => void;

const AGAIN_MS = 2000;
/** Time without an event after which the connection counts as dead. A connection may die without an error. */
const SILENT_MS = 8000;

const NO_TOKEN = "need the link with the token, which the relay's operator has";
const FULL = "unavailable: too many pages are open";
const AWAY = "unavailable at the moment";

/** A connection to `/events`. It is open only while it has listeners and the page is visible, because a browser opens
    only a few connections to a server. */
export class Channel {
  readonly #listeners = new Set<Listener>();
  #news?: News;
  #ends?: AbortController;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#settle());
  }

  /** Adds a listener. The returned function removes it. */
  listen(listener: Listener): () => void {
    this.#listeners.add(listener);
    if (this.#news) listener(this.#news);
    this.#settle();
    return () => {
      this.#listeners.delete(listener);
      this.#settle();
    };
  }

  #settle() {
    const isWanted = this.#listeners.size > 0 && !document.hidden;
    if (!isWanted) {
      this.#ends?.abort();
      this.#ends = undefined;
      this.#news = undefined;
    } else if (!this.#ends) {
      this.#ends = new AbortController();
      void this.#keep(this.#ends.signal);
    }
  }

  async #keep(ends: AbortSignal) {
    while (!ends.aborted) {
      const why = await this.#follow(ends).catch(() => AWAY);
      if (ends.aborted) return;
      this.#tell({ why });
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  /** Reads events until the connection ends; returns the reason. The connection is closed when this returns or fails. */
  async #follow(ends: AbortSignal): Promise<string> {
    const over = new AbortController();
    const heard = <T>(what: Promise<T>) => {
      const alarm = setTimeout(() => over.abort(), SILENT_MS);
      return what.finally(() => clearTimeout(alarm));
    };
    try {
      return await this.#read(AbortSignal.any([ends, over.signal]), heard);
    } finally {
      over.abort();
    }
  }

  async #read(signal: AbortSignal, heard: <T>(what: Promise<T>) => Promise<T>): Promise<string> {
    const answer = await heard(fetch("./events", { cache: "no-store", signal }));
    if (answer.status === 401) return NO_TOKEN;
    if (answer.status === 503) return FULL;
    if (!answer.ok || !answer.body) return AWAY;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let before: Status | undefined;
    let rest = "";
    for (;;) {
      const { done, value } = await heard(reader.read());
      if (done) return AWAY;
      const events = (rest + value).split("\n\n");
      rest = events.pop() ?? "";
      const last = events.at(-1);
      if (last === undefined) continue;
      const now = parse(last);
      this.#tell({ now, before });
      before = now;
    }
  }

  #tell(news: News) {
    this.#news = news;
    for (const listener of this.#listeners) listener(news);
  }
}

/** Parses a server-sent event. */
function parse(event: string): Status {
  const data = event.split("\n").filter((line) => line.startsWith("data: "));
  return JSON.parse(data.map((line) => line.slice(6)).join("\n"));
}

/** Returns the packets and bytes of media that the kernel and userspace have sent together. */
export function media({ kernel, data_plane }: { kernel: Sent; data_plane: Sent }): Sent {
  return { packets: kernel.packets + data_plane.packets, bytes: kernel.bytes + data_plane.bytes };
}
