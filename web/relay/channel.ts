// What the relay says of itself, once a second: `/events`, for all that the page shows.

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
  uptime_s: number;
  draining: boolean;
  listen: string[];
  /** Of `session_count`, and so on: the relay sends some hundreds at most. */
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

/** Either a status, with that before it where there is one, or why there is none. */
export type News = { now: Status; before?: Status } | { why: string };

type Listener = (news: News) => void;

const AGAIN_MS = 2000;
/** Without a word for so long the connection is gone: it can be without a sign. */
const SILENT_MS = 8000;

const NO_TOKEN = "need the link with the token, which the relay's operator has";
const FULL = "not to be had: too many pages are open";
const AWAY = "not to be had at the moment";

/** Open while somebody listens and the page is looked at: a browser has few connections to a server. */
export class Channel {
  readonly #listeners = new Set<Listener>();
  #news?: News;
  #ends?: AbortController;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#settle());
  }

  /** Until the function that is returned is called. */
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

  /** Until the channel ends; then it says why. */
  async #follow(ends: AbortSignal): Promise<string> {
    const silent = new AbortController();
    const answer = await fetch("./events", { cache: "no-store", signal: AbortSignal.any([ends, silent.signal]) });
    if (answer.status === 401) return NO_TOKEN;
    if (answer.status === 503) return FULL;
    if (!answer.ok || !answer.body) return AWAY;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let before: Status | undefined;
    let rest = "";
    for (;;) {
      const alarm = setTimeout(() => silent.abort(), SILENT_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(alarm));
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

/** A server-sent event. */
function parse(event: string): Status {
  const data = event.split("\n").filter((line) => line.startsWith("data: "));
  return JSON.parse(data.map((line) => line.slice(6)).join("\n"));
}

/** Packets and bytes of media. */
export function media({ kernel, data_plane }: { kernel: Sent; data_plane: Sent }): Sent {
  return { packets: kernel.packets + data_plane.packets, bytes: kernel.bytes + data_plane.bytes };
}
