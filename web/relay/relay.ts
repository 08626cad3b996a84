// The tab Relay: the relay's present figures, sessions and tracks.

import { byId, count } from "../src/dom";
import { type Column, Table } from "../src/table";
import { type News, type Session, type Share, type Status, type Track, media } from "./channel";
import { bytes, list, rate, span } from "./figures";
import type { Shell, Tab } from "./tab";

/** A session, and its present rate. */
interface Row extends Session {
  /** Bits per second; absent in the first second. */
  rate?: number;
}

const ms = (us: number) => `${(us / 1000).toFixed(us < 10_000 ? 1 : 0)} ms`;
const none = "-";

/** Whether any session has an identity from a token or a certificate, other than its address. */
let hasIdentities = false;

const SESSIONS: Column<Row>[] = [
  { title: "ID", value: (row) => row.id },
  { title: "Peer", value: (row) => row.remote },
  { title: "As", value: (row) => row.identity ?? "", when: () => hasIdentities },
  { title: "Role", value: role },
  { title: "Since", value: (row) => row.age_s, text: (row) => span(row.age_s) },
  { title: "Media to it", value: (row) => row.rate ?? 0, text: (row) => (row.rate ? rate(row.rate) : none) },
  { title: "By kernel", value: byKernel, text: (row) => (media(row).packets ? `${byKernel(row).toFixed(0)} %` : none) },
  { title: "Round trip", value: (row) => row.rtt_us, text: (row) => ms(row.rtt_us) },
  { title: "Queue", value: (row) => row.queue_us, text: (row) => (row.queue_us ? ms(row.queue_us) : none) },
  { title: "Path's queue", value: (row) => row.path_queue_us, text: (row) => (row.path_queue_us ? ms(row.path_queue_us) : none) },
  { title: "Path carries", value: (row) => row.bandwidth ?? 0, text: (row) => (row.bandwidth ? rate(row.bandwidth * 8) : none) },
  { title: "Lost", value: (row) => row.loss ?? 0, text: (row) => (row.loss === undefined ? none : `${(row.loss * 100).toFixed(1)} %`) },
  { title: "Subscribed", value: (row) => row.subscriptions, text: (row) => whole(row.subscriptions) },
  { title: "Published", value: (row) => row.publications, text: (row) => whole(row.publications) },
  { title: "Dropped", value: (row) => sum(row.drops), text: (row) => reasons(row.drops) },
];

const TRACKS: Column<Track>[] = [
  { title: "Track", value: (track) => track.name },
  { title: "Publishers", value: (track) => track.publishers, text: (track) => whole(track.publishers) },
  { title: "Subscribers", value: (track) => track.subscribers, text: (track) => whole(track.subscribers) },
  { title: "Newest", value: (track) => track.largest?.[0] ?? 0, text: (track) => track.largest?.join("/") ?? none },
  { title: "Groups kept", value: (track) => track.groups_cached, text: (track) => whole(track.groups_cached) },
  { title: "Bytes kept", value: (track) => track.bytes_cached, text: (track) => bytes(track.bytes_cached) },
  { title: "Of", value: (track) => track.owner ?? "" },
];

export function open(shell: Shell): Tab {
  const sessions = new Table("Sessions", SESSIONS, "There are no sessions.", true);
  const tracks = new Table("Tracks", TRACKS, "There are no tracks.", true);
  byId("tables").append(sessions.element, tracks.element);
  const draw = (news: News) => {
    const there = !("why" in news);
    byId("tables").hidden = !there;
    list("relay-figures", figures(news));
    if (!there) return;
    hasIdentities = news.now.sessions.some(({ identity, remote }) => identity && !remote.includes(identity));
    sessions.show(rows(news.now, news.before));
    tracks.show(news.now.tracks);
    const { session_count, track_count } = news.now;
    const isCut = session_count > news.now.sessions.length || track_count > news.now.tracks.length;
    byId("cut").hidden = !isCut;
    byId("cut").textContent = `Only the sessions with the longest queues and the tracks with the most subscribers are listed: ${news.now.sessions.length} of ${session_count} sessions, ${news.now.tracks.length} of ${track_count} tracks. All are in /status.`;
  };
  let ends: (() => void) | undefined;
  return {
    show() {
      ends ??= shell.channel.listen(draw);
      return "Relay";
    },
    hide() {
      ends?.();
      ends = undefined;
    },
  };
}

function figures(news: News): Record<string, string> {
  if ("why" in news) return { Figures: news.why };
  const { now, before } = news;
  const { engine, totals, cache, gate, upstream } = now;
  const sent = media(totals);
  const seconds = before ? now.uptime_s - before.uptime_s : 0;
  const out = before && seconds > 0 ? ((sent.bytes - media(before.totals).bytes) * 8) / seconds : undefined;
  const into = before && seconds > 0 ? ((totals.object_bytes_received - before.totals.object_bytes_received) * 8) / seconds : undefined;
  const refused = sum(gate.refused);
  return {
    State: now.draining ? "shutting down" : "serves",
    Version: now.version,
    "Runs for": span(now.uptime_s),
    "Listens on": now.listen.join(", "),
    Engine: `${engine.name}: ${engine.reason}`,
    "Media in": into === undefined ? none : rate(Math.max(0, into)),
    "Media out": out === undefined ? none : rate(Math.max(0, out)),
    "Packets by the kernel": count(totals.kernel.packets),
    "Packets by userspace": count(totals.data_plane.packets),
    ...Object.fromEntries(Object.entries(now.shares.interfaces).map(lately)),
    "Packets lost": count(totals.packets_lost),
    Cache: `${bytes(cache.bytes)} of ${bytes(cache.limit)}`,
    "Not forwarded": reasons(now.drops),
    "Not allowed": reasons(now.access.refused),
    Gate: `${gate.on ? "on" : "off"}: ${gate.reason}${refused > 0 ? `; ${count(refused)} packets refused` : ""}`,
    ...(upstream && { Upstream: upstream.session === null ? `${upstream.host}, away: ${upstream.reason}` : `${upstream.host}, session ${upstream.session}` }),
  };
}

/** Returns the share of an interface's recent media that the kernel forwarded, and the reason why it did not forward the
    rest. */
function lately([name, share]: [string, Share]): [string, string] {
  const part = `${Math.floor((share.by_kernel * 100) / share.bytes)} % of the last 10 s`;
  const rest = share.reason && `; the rest mostly for ${share.reason.replaceAll("_", " ")}`;
  return [`By the kernel on ${name}`, part + rest + (share.remedy && `: ${share.remedy}`)];
}

function rows(now: Status, before?: Status): Row[] {
  const seconds = before ? now.uptime_s - before.uptime_s : 0;
  const then = new Map(before?.sessions.map((session) => [session.id, media(session).bytes]));
  return now.sessions.map((session) => {
    const had = then.get(session.id);
    return had === undefined || seconds <= 0 ? session : { ...session, rate: Math.max(0, ((media(session).bytes - had) * 8) / seconds) };
  });
}

function role({ upstream, publisher, subscriber }: Session): string {
  const roles = [upstream && "upstream", publisher && "publishes", subscriber && "watches"].filter(Boolean);
  return roles.join(", ") || none;
}

/** Returns the share of a session's media packets that the kernel sent, in percent. */
function byKernel(session: Session): number {
  const { packets } = media(session);
  return packets ? (session.kernel.packets * 100) / packets : 0;
}

function sum(counts: Record<string, number>): number {
  return Object.values(counts).reduce((all, one) => all + one, 0);
}

function reasons(counts: Record<string, number>): string {
  const some = Object.entries(counts).filter(([, number]) => number > 0);
  return some.map(([reason, number]) => `${reason.replaceAll("_", " ")} ${count(number)}`).join(", ") || none;
}

function whole(value: number): string {
  return value ? String(value) : none;
}
