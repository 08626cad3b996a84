// Encodes captured media in the browser with WebCodecs: pictures as H.264, which every player supports, sound as Opus.

import { frames, samples } from "./capture";
import { type Sound, TIMESCALE, type Track, type Video } from "./mp4";

/** One encoded frame, or 20 ms of sound. */
export interface Chunk {
  /** The track ID in MP4. */
  id: number;
  isKey: boolean;
  /** Time of capture in microseconds since 1970, from which a player computes its latency. */
  at: number;
  /** Duration in microseconds. */
  duration: number;
  data: Uint8Array;
}

export interface Sink {
  /** Called when the tracks have changed. The next picture is a key frame. */
  described(tracks: Track[]): void;
  /** Whether the connection has capacity for one more picture. */
  readonly hasRoom: boolean;
  take(chunk: Chunk): void;
  failed(error: Error): void;
}

type Config = VideoEncoderConfig & { bitrate: number };

const VIDEO = 1;
const SOUND = 2;
/** Interval of key frames in microseconds. Viewers can start at a key frame. */
const GROUP_US = TIMESCALE;
/** Largest number of frames in the encoder's queue. Further frames are skipped, since they would be late. */
const WAITING = 2;
const BITS_PER_PIXEL = 0.08;
export const FRAMES_A_SECOND = 30;
export const SOUNDS_A_SECOND = 50;
const SOUND_BITRATE = 64_000;
/** Smallest relative change of the bit rate that is passed to the encoder. */
const WORTH = 0.03;
const MOST_CHANNELS = 2;
/** H.264 levels by the pixels of a picture at 30 pictures a second; Constrained Baseline, which every decoder
    supports. */
const LEVELS: [number, string][] = [
  [640 * 480, "avc1.42e01e"],
  [1280 * 720, "avc1.42e01f"],
  [1920 * 1088, "avc1.42e028"],
];
const HIGHEST = "avc1.42e033";

export class Encoder {
  /** Number of pictures that were sent. */
  sent = 0;
  /** Number of pictures that were skipped because the encoder was busy. */
  skipped = 0;
  /** Number of pictures that were dropped because they would have been late. */
  dropped = 0;
  readonly hasSound: boolean;
  #video?: VideoEncoder;
  #sound?: AudioEncoder;
  readonly #readers: ReadableStreamDefaultReader<unknown>[] = [];
  /** The encoded size in pixels, and the captured size (`from`) that it was computed for. */
  #size = { width: 0, height: 0, from: "" };
  #described?: { video: Video; sound?: Sound };
  #config?: Config;
  /** Largest bit rate of the picture that the path allows, in bits per second. */
  #aim = Infinity;
  /** Offset from each track's clock to the time of day, in microseconds. Picture and sound may have different clocks. */
  readonly #offsets = new Map<number, number>();
  #lastKey = -Infinity;
  #closed = false;

  constructor(
    stream: MediaStream,
    readonly lines: number,
    readonly sink: Sink,
  ) {
    const [sound] = stream.getAudioTracks();
    const heard = sound && samples(sound);
    this.hasSound = heard !== undefined;
    if (heard) void this.#each(heard, (data) => this.#hear(data));
    for (const picture of stream.getVideoTracks()) void this.#each(frames(picture), (frame) => this.#see(frame));
  }

  /** Makes the next picture a key frame. */
  begin() {
    this.#lastKey = -Infinity;
  }

  /** Limits the bit rate of the picture from now on. */
  aim(bitrate: number) {
    this.#aim = bitrate;
    const config = this.#config;
    if (!config || this.#video?.state !== "configured") return;
    const wanted = Math.min(bitrate, this.#most());
    if (Math.abs(wanted - config.bitrate) < WORTH * wanted) return;
    this.#config = { ...config, bitrate: wanted };
    this.#video.configure(this.#config);
  }

  /** The tracks, once they are known. */
  get tracks(): Track[] | undefined {
    const { video, sound } = this.#described ?? {};
    return video && (sound ? [video, sound] : [video]);
  }

  close() {
    this.#closed = true;
    for (const reader of this.#readers) void reader.cancel().catch(() => {});
    for (const encoder of [this.#video, this.#sound]) if (encoder && encoder.state !== "closed") encoder.close();
  }

  async #each<T extends { close(): void }>(stream: ReadableStream<T>, take: (item: T) => Promise<void> | void) {
    const reader = stream.getReader();
    this.#readers.push(reader);
    try {
      for (let next = await reader.read(); !next.done; next = await reader.read()) {
        try {
          if (!this.#closed) await take(next.value);
        } finally {
          next.value.close();
        }
      }
    } catch (error) {
      this.#fail(error);
    }
  }

  async #see(frame: VideoFrame) {
    const from = `${frame.displayWidth}x${frame.displayHeight}`;
    if (from !== this.#size.from) await this.#configure(frame, from);
    const encoder = this.#video;
    if (!encoder || this.#closed) return;
    if (encoder.encodeQueueSize > WAITING) {
      this.skipped += 1;
      return;
    }
    if (!this.sink.hasRoom) {
      this.dropped += 1;
      return;
    }
    this.#clock(VIDEO, frame.timestamp);
    const keyFrame = frame.timestamp - this.#lastKey >= GROUP_US;
    if (keyFrame) this.#lastKey = frame.timestamp;
    encoder.encode(frame, { keyFrame });
  }

  /** Configures the encoder for pictures of this size. The size changes when a captured window is resized or a phone is
      turned. */
  async #configure({ displayWidth, displayHeight }: VideoFrame, from: string) {
    const scale = Math.min(1, this.lines / Math.min(displayWidth, displayHeight));
    // Width and height must be even, because H.264's chroma planes (4:2:0) have half the resolution.
    const even = (length: number) => Math.max(2, 2 * Math.round((length * scale) / 2));
    const [width, height] = [even(displayWidth), even(displayHeight)];
    this.#size = { width, height, from };
    const codec = LEVELS.find(([pixels]) => width * height <= pixels)?.[1] ?? HIGHEST;
    const bitrate = Math.min(this.#aim, this.#most());
    const config: Config = { codec, width, height, bitrate, framerate: FRAMES_A_SECOND, latencyMode: "realtime", avc: { format: "avc" } };
    const { supported } = await VideoEncoder.isConfigSupported(config);
    if (!supported) throw new Error(`This browser cannot encode H.264 of ${width} × ${height}, which players expect.`);
    if (this.#closed) return;
    this.#video ??= new VideoEncoder({ output: (chunk, metadata) => this.#seen(chunk, metadata), error: (error) => this.#fail(error) });
    this.#video.configure(config);
    this.#config = config;
    this.begin();
  }

  /** Returns the bit rate for a good picture of the encoded size, in bits per second. */
  #most(): number {
    const { width, height } = this.#size;
    return Math.round(width * height * FRAMES_A_SECOND * BITS_PER_PIXEL);
  }

  #seen(chunk: EncodedVideoChunk, metadata?: EncodedVideoChunkMetadata) {
    const config = metadata?.decoderConfig;
    if (config?.description) {
      const { width, height } = this.#size;
      const bitrate = this.#most();
      const avcC = bytes(config.description);
      const video: Video = { id: VIDEO, kind: "video", codec: config.codec, width, height, bitrate, avcC };
      // The track always has two channels: an Opus decoder also plays a mono stream as stereo.
      const sound: Sound = { id: SOUND, kind: "sound", codec: "opus", channels: MOST_CHANNELS, bitrate: SOUND_BITRATE };
      const isNew = String(this.#described?.video.avcC) !== String(avcC);
      this.#described = this.hasSound ? { video, sound } : { video };
      if (isNew) this.sink.described(this.tracks ?? []);
    }
    this.sent += 1;
    this.#emit(VIDEO, chunk, TIMESCALE / FRAMES_A_SECOND);
  }

  #hear(data: AudioData) {
    this.#clock(SOUND, data.timestamp);
    this.#sound ??= this.#listen(data);
    this.#sound.encode(data);
  }

  #listen({ sampleRate, numberOfChannels }: AudioData): AudioEncoder {
    const encoder = new AudioEncoder({ output: (chunk) => this.#emit(SOUND, chunk, TIMESCALE / SOUNDS_A_SECOND), error: (error) => this.#fail(error) });
    encoder.configure({ codec: "opus", sampleRate, numberOfChannels: Math.min(MOST_CHANNELS, numberOfChannels), bitrate: SOUND_BITRATE });
    return encoder;
  }

  /** Records the offset of a track's clock when its first sample arrives, which was captured just then. */
  #clock(id: number, timestamp: number) {
    if (!this.#offsets.has(id)) this.#offsets.set(id, Date.now() * 1000 - timestamp);
  }

  #emit(id: number, chunk: EncodedVideoChunk | EncodedAudioChunk, usual: number) {
    if (this.#closed) return;
    const data = new Uint8Array(chunk.byteLength);
    chunk.copyTo(data);
    const duration = Math.round(chunk.duration || usual);
    const at = Math.round(chunk.timestamp + (this.#offsets.get(id) ?? 0));
    this.sink.take({ id, isKey: chunk.type === "key", at, duration, data });
  }

  #fail(error: unknown) {
    if (!this.#closed) this.sink.failed(error instanceof Error ? error : new Error(String(error)));
  }
}

function bytes(source: AllowSharedBufferSource): Uint8Array {
  const view = ArrayBuffer.isView(source) ? new Uint8Array(source.buffer, source.byteOffset, source.byteLength) : new Uint8Array(source);
  return view.slice();
}
