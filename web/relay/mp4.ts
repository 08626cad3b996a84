// Writes fragmented MP4 (ISO/IEC 14496-12) with one video and one sound track, as players, ffmpeg and this page read
// it.

/** Time units per second of all tracks. */
export const TIMESCALE = 1_000_000;

export type Track = Video | Sound;

export interface Video {
  id: number;
  kind: "video";
  codec: string;
  width: number;
  height: number;
  bitrate: number;
  /** The AVCDecoderConfigurationRecord (ISO/IEC 14496-15). */
  avcC: Uint8Array;
}

export interface Sound {
  id: number;
  kind: "sound";
  codec: "opus";
  channels: number;
  bitrate: number;
}

/** The rate at which Opus counts time. */
export const OPUS_RATE = 48_000;
/** Number of samples that an Opus decoder discards first, as libopus sets it. */
const OPUS_PRE_SKIP = 312;

const MATRIX = u32(0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000);
const NONE = u32(0);
/** Sample flags: independent (a decoder can start with it), and dependent. */
const KEY = 0x0200_0000;
const DELTA = 0x0101_0000;

/** Returns the init segment: `ftyp` and `moov` of all tracks. */
export function init(tracks: Track[]): Uint8Array {
  const next = Math.max(...tracks.map(({ id }) => id)) + 1;
  const mvhd = box("mvhd", u32(0, 0, 0, TIMESCALE, 0, 0x10000), u16(0x100, 0), zeros(8), MATRIX, zeros(24), u32(next));
  const mvex = box("mvex", ...tracks.map(({ id }) => box("trex", u32(0, id, 1, 0, 0, 0))));
  return join(box("ftyp", ascii("iso6"), NONE, ascii("iso6cmfcmp41")), box("moov", mvhd, ...tracks.map(trak), mvex));
}

/** Returns a fragment of one sample. Times are in units of `TIMESCALE`. */
export function fragment(id: number, sequence: number, at: number, duration: number, isKey: boolean, data: Uint8Array): Uint8Array {
  const moof = (size: number) =>
    box(
      "moof",
      box("mfhd", u32(0, sequence)),
      box(
        "traf",
        // Offsets count from the beginning of the moof.
        box("tfhd", u32(0x020000, id)),
        box("tfdt", u32(0x01000000, Math.floor(at / 2 ** 32), at % 2 ** 32)),
        // The fields are the data's offset, and the sample's duration, size and flags.
        box("trun", u32(0x000701, 1, size + 8, duration, data.byteLength, isKey ? KEY : DELTA)),
      ),
    );
  return join(moof(moof(0).byteLength), box("mdat", data));
}

function trak(track: Track): Uint8Array {
  const isVideo = track.kind === "video";
  const [width, height] = isVideo ? [track.width, track.height] : [0, 0];
  const tkhd = box("tkhd", u32(3, 0, 0, track.id, 0, 0), zeros(8), u16(0, 0, isVideo ? 0 : 0x100, 0), MATRIX, u32(width * 0x10000, height * 0x10000));
  const mdhd = box("mdhd", u32(0, 0, 0, TIMESCALE, 0), u16(0x55c4, 0));
  const hdlr = box("hdlr", u32(0, 0), ascii(isVideo ? "vide" : "soun"), zeros(13));
  const kind = isVideo ? box("vmhd", u32(1), zeros(8)) : box("smhd", u32(0, 0));
  const dinf = box("dinf", box("dref", u32(0, 1), box("url ", u32(1))));
  const stsd = box("stsd", u32(0, 1), isVideo ? avc1(track) : opus(track));
  const none = (type: string) => box(type, u32(0, 0));
  const stbl = box("stbl", stsd, none("stts"), none("stsc"), box("stsz", u32(0, 0, 0)), none("stco"));
  return box("trak", tkhd, box("mdia", mdhd, hdlr, box("minf", kind, dinf, stbl)));
}

function avc1({ width, height, avcC }: Video): Uint8Array {
  const dpi = 72 * 0x10000;
  return box("avc1", zeros(6), u16(1), zeros(16), u16(width, height), u32(dpi, dpi, 0), u16(1), zeros(32), u16(0x18, 0xffff), box("avcC", avcC));
}

function opus({ channels }: Sound): Uint8Array {
  const dOps = box("dOps", new Uint8Array([0, channels]), u16(OPUS_PRE_SKIP), u32(OPUS_RATE), u16(0), new Uint8Array([0]));
  return box("Opus", zeros(6), u16(1), zeros(8), u16(channels, 16, 0, 0), u32(OPUS_RATE * 0x10000), dOps);
}

function box(type: string, ...content: Uint8Array[]): Uint8Array {
  const size = content.reduce((sum, part) => sum + part.byteLength, 8);
  return join(u32(size), ascii(type), ...content);
}

function join(...parts: Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.byteLength, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.byteLength;
  }
  return whole;
}

function u32(...values: number[]): Uint8Array {
  const view = new DataView(new ArrayBuffer(values.length * 4));
  values.forEach((value, at) => view.setUint32(at * 4, value));
  return new Uint8Array(view.buffer);
}

function u16(...values: number[]): Uint8Array {
  const view = new DataView(new ArrayBuffer(values.length * 2));
  values.forEach((value, at) => view.setUint16(at * 2, value));
  return new Uint8Array(view.buffer);
}

function zeros(count: number): Uint8Array {
  return new Uint8Array(count);
}

function ascii(text: string): Uint8Array {
  return new TextEncoder().encode(text);
}
