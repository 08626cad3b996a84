// A broadcast on a session, with the tracks and catalogs of `millrace publish` and moq-pub, so that their players
// play it.

import { Broadcast as Net, Group, Time, type Track as NetTrack } from "@moq/net";

import type { Chunk } from "./encode";
import { OPUS_RATE, type Track, fragment, init } from "./mp4";

/** Catalogs in the formats of MSF (draft-ietf-moq-msf-01), hang, and moq-pub, which moq-sub reads. */
const MSF = "catalog";
const HANG = "catalog.json";
const MOQ_PUB = ".catalog";
const INIT = "0.mp4";

/** Options of a catalog's track: the catalog is kept for subscribers however late they join. */
const KEPT = { latencyMax: Number.MAX_SAFE_INTEGER };

const name = (id: number) => `${id}.m4s`;

export class Broadcast {
  readonly producer = new Net.Producer();
  readonly #tracks = new Map<number, { track: NetTrack.Producer; group?: Group.Producer; next: number }>();
  readonly #described: Record<string, NetTrack.Producer>;
  /** Group ID of the latest catalog, by the track's name. */
  readonly #last = new Map<string, number>();
  #sequence = 0;
  #bytes = 0;

  constructor(
    readonly path: string,
    tracks: Track[],
  ) {
    this.#described = Object.fromEntries([MSF, HANG, MOQ_PUB, INIT].map((name) => [name, this.producer.createTrack(name, KEPT)]));
    for (const { id } of tracks) this.#tracks.set(id, { track: this.producer.createTrack(name(id)), next: now() });
    this.describe(tracks);
  }

  /** Describes the tracks in new catalogs. */
  describe(tracks: Track[]) {
    const text = (value: unknown) => new TextEncoder().encode(JSON.stringify(value));
    this.#whole(INIT, init(tracks));
    this.#whole(MOQ_PUB, text(moqPub(this.path, tracks)));
    this.#whole(HANG, text(hang(tracks)));
    this.#whole(MSF, text(msf(tracks)));
  }

  take({ id, isKey, at, duration, data }: Chunk) {
    const of = this.#tracks.get(id);
    if (!of) return;
    const isVideo = id === Math.min(...this.#tracks.keys());
    if (isVideo && isKey) for (const each of this.#tracks.values()) end(each);
    // The track begins with a key frame, where players can start.
    if (!of.group && isVideo && !isKey) return;
    of.group ??= begin(of);
    const payload = fragment(id, ++this.#sequence, at, duration, isKey, data);
    this.#bytes += payload.byteLength;
    of.group.writeFrame({ payload, timestamp: Time.Timestamp.fromMillis(at / 1000) });
  }

  /** Bytes of media that were published so far. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Drops pictures that are not sent yet. The track continues with the next key frame. */
  giveUp() {
    const picture = this.#tracks.get(Math.min(...this.#tracks.keys()));
    if (picture) end(picture, new Error("too late"));
  }

  /** Whether the picture has a subscriber. */
  get isWatched(): boolean {
    return [...this.#tracks.values()].some(({ track }) => track.used.peek());
  }

  close() {
    for (const each of this.#tracks.values()) end(each);
    this.producer.close();
  }

  /** Publishes `payload` as the only object of a new group. */
  #whole(name: string, payload: Uint8Array) {
    const track = this.#described[name];
    if (!track) return;
    const group = new Group.Producer(Math.max(now(), (this.#last.get(name) ?? 0) + 1));
    this.#last.set(name, group.sequence);
    track.writeGroup(group);
    group.writeFrame({ payload, timestamp: Time.Timestamp.now() });
    group.close();
  }
}

/** Returns a group ID from the clock, in seconds since 1970. After a reload the page's group IDs are thus higher than
    before. */
function now(): number {
  return Math.floor(Date.now() / 1000);
}

function begin(of: { track: NetTrack.Producer; next: number }): Group.Producer {
  const group = new Group.Producer(of.next);
  of.next += 1;
  of.track.writeGroup(group);
  return group;
}

/** Closes the track's present group. With `why` the group is reset before it is complete. */
function end(of: { group?: Group.Producer }, why?: Error) {
  of.group?.close(why);
  of.group = undefined;
}

function msf(tracks: Track[]) {
  return {
    version: "draft-01",
    tracks: tracks.map((track) => ({ name: name(track.id), packaging: "cmaf", isLive: true, renderGroup: 1, bitrate: track.bitrate, ...described(track), initRef: name(track.id) })),
    initDataList: tracks.map((track) => ({ id: name(track.id), type: "inline", data: base64(init([track])) })),
  };
}

/** Describes the tracks in hang's format. The decoder's configuration is repeated outside of the init segment,
    because moq-cli does not look inside. */
function hang(tracks: Track[]) {
  const common = (track: Track) => ({ container: { kind: "cmaf", init: base64(init([track])) }, bitrate: track.bitrate });
  const videos = tracks.flatMap((track) => {
    if (track.kind !== "video") return [];
    const size = { codedWidth: track.width, codedHeight: track.height };
    return [[name(track.id), { codec: track.codec, ...size, description: hexadecimal(track.avcC), ...common(track) }]];
  });
  const sounds = tracks.flatMap((track) => {
    if (track.kind !== "sound") return [];
    return [[name(track.id), { codec: track.codec, sampleRate: OPUS_RATE, numberOfChannels: track.channels, ...common(track) }]];
  });
  const section = (renditions: unknown[][]) => (renditions.length > 0 ? { renditions: Object.fromEntries(renditions) } : undefined);
  return { video: section(videos), audio: section(sounds) };
}

function described(track: Track) {
  if (track.kind === "video") return { role: "video", codec: track.codec, width: track.width, height: track.height };
  return { role: "audio", codec: track.codec, samplerate: OPUS_RATE, channelConfig: String(track.channels) };
}

/** Describes the tracks in the format of draft-ietf-moq-catalogformat-01. */
function moqPub(path: string, tracks: Track[]) {
  const of = (track: Track) => {
    const { role: _, ...selectionParams } = described(track);
    return { name: name(track.id), initTrack: INIT, selectionParams: { ...selectionParams, bitrate: track.bitrate } };
  };
  return {
    version: 1,
    streamingFormat: 1,
    streamingFormatVersion: "0.2",
    supportsDeltaUpdates: true,
    commonTrackFields: { namespace: `/${path}`, packaging: "cmaf", renderGroup: 1 },
    tracks: tracks.map(of),
  };
}

function hexadecimal(data: Uint8Array): string {
  return [...data].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function base64(data: Uint8Array): string {
  return btoa(String.fromCharCode(...data));
}
