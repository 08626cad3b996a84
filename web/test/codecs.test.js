// Tests that the page's player plays every codec that this browser decodes, with both catalogs, and that the page names
// the codecs that the browser does not decode. `scripts/web.sh test codecs` runs them.
//
// The environment variables are those of `harness.js`, and INPUTS, a folder with the output of scripts/media.py.

import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { join } from "node:path";

import { catalogBy, moves, open, publish, relay, shot } from "./harness.js";
import { settles, test } from "./support.js";

const { INPUTS } = process.env;

/** Configuration of a FLAC decoder: "fLaC" and a STREAMINFO block (RFC 9639, 8.2) of 48 kHz, two channels, 16
    bits. */
const STREAMINFO = [0x66, 0x4c, 0x61, 0x43, 0x80, 0, 0, 34, 16, 0, 16, 0, ...Array(6).fill(0), 0x0b, 0xb8, 0x02, 0xf0, ...Array(20).fill(0)];

/** Codecs to ask the browser about, by the codecs' names in the clips' names. They are written here and not taken from our
    catalogs, so that an error in a catalog is noticed. */
const VIDEO = {
  h264: { codec: "avc1.64001f" },
  h264base: { codec: "avc1.42e01f" },
  avc3: { codec: "avc1.42e01f" },
  hevc: { codec: "hvc1.1.6.L93.B0" },
  hev1: { codec: "hev1.1.6.L93.B0" },
  av1: { codec: "av01.0.04M.08" },
  vp9: { codec: "vp09.00.10.08" },
  mpeg4: { codec: "mp4v.20.1" },
};
const SOUND = {
  aac: { codec: "mp4a.40.2" },
  opus: { codec: "opus" },
  flac: { codec: "flac", description: STREAMINFO },
  mp3: { codec: "mp3" },
  ac3: { codec: "ac-3" },
  eac3: { codec: "ec-3" },
  alac: { codec: "alac" },
};

/** Clips of scripts/media.py, named VIDEO_SOUND after their codecs. A name without an entry above is not asked about. */
const MADE = [
  "h264_aac",
  "avc3_opus",
  "vp9_flac",
  "av1_opus",
  "hevc_ac3",
  "hev1_aac",
  "h264base_mp3",
  "h264base_eac3",
  "h264base_alac",
  "mpeg4_mp2",
  "only_opus",
];

/** Errors of the browser for sound that the player cannot play with MSF. @moq/hang 0.4 (`extractDescription`) does not
 * find the configuration of a FLAC decoder in an init segment, which is its only place with MSF.
 */
const UNREAD_BY_MSF = { flac: /description is required/ };
/** The player's message when it unsubscribes from a track while a stream of the track begins. The relay then resets the
    stream with CANCELLED. */
const LEFT = /^error processing object stream RemoteError: remote error: 1\b/;

/** Pitch of the tone in every input. */
const HZ = 440;
/** Level of the tone above other frequencies, in decibels. */
const AUDIBLE = -60;

/** Asks the browser whether it decodes the video and the sound codec. The answer for an absent codec is `undefined`. */
const decodes = (page, video, sound) =>
  page.evaluate(
    async ([video, sound]) => {
      const bytes = ({ description, ...config }) => ({ ...config, ...(description && { description: new Uint8Array(description) }) });
      const asked = (decoder, config) => config && decoder.isConfigSupported(bytes(config)).then(({ supported }) => supported, () => false);
      return {
        video: await asked(VideoDecoder, video),
        sound: await asked(AudioDecoder, sound && { sampleRate: 48_000, numberOfChannels: 2, ...sound }),
      };
    },
    [video, sound],
  );

/** Turns sound on like a viewer, whose key press allows the browser to play it. */
async function unmute(page) {
  await page.getByRole("button", { name: "Unmute" }).focus();
  await page.keyboard.press("Enter");
}

/** Waits until the loudest frequency of the player's sound is that of the clip's tone. */
async function sounds(page) {
  const loudest = () =>
    page.evaluate(() => {
      const root = document.querySelector("moq-watch").audio.out.root.peek();
      if (!root) return undefined;
      if (window.heard?.root !== root) {
        window.heard = { root, by: new AnalyserNode(root.context, { fftSize: 8192 }) };
        root.connect(window.heard.by);
      }
      const { by } = window.heard;
      const levels = new Float32Array(by.frequencyBinCount);
      by.getFloatFrequencyData(levels);
      const top = levels.reduce((best, level, at) => (level > levels[best] ? at : best), 0);
      return { hz: (top * root.context.sampleRate) / by.fftSize, level: levels[top], context: root.context.state };
    });
  const isTone = (found) => found && found.level > AUDIBLE && Math.abs(found.hz - HZ) < 10;
  await settles("the tone of the input", loudest, isTone, page.report);
}

const note = (page, wanted) => settles("what the page says that it cannot play", () => page.locator("#unplayable").textContent(), wanted, page.report);

/** Returns a pattern for the page's message about parts that this browser does not decode, or "" for no message. */
function words({ video, sound }) {
  const parts = [...(video === false ? ["the picture \\(.+\\)"] : []), ...(sound === false ? ["the sound \\(.+\\)"] : [])];
  return parts.length > 0 ? new RegExp(`^This browser does not decode ${parts.join(" and ")} of this broadcast\\.$`) : "";
}

async function plays(page, { video, sound }, frames) {
  if (video) await moves(page, frames);
  if (sound) await sounds(page);
}

for (const made of MADE) {
  const clip = join(INPUTS, `${made}_every.mp4`);
  test(`${made} plays as far as this browser decodes it`, { skip: !existsSync(clip) && "ffmpeg cannot make it here" }, async (context) => {
    const [video, sound] = made.split("_");
    const server = await relay();
    const publisher = publish(made, { clip });
    const { page, wrong, complaints, close } = await open({ tab: `#watch/${made}` });
    try {
      const decoded = await decodes(page, VIDEO[video], SOUND[sound]);
      context.diagnostic(`${made}: this browser decodes ${JSON.stringify(decoded)}`);
      await unmute(page);
      await plays(page, decoded);
      await note(page, words(decoded));
      await shot(page, `codec-${made}`);
      assert.deepEqual([...wrong, ...complaints], []);
      await catalogBy(page, "msf");
      const unread = UNREAD_BY_MSF[sound];
      await plays(page, { ...decoded, sound: decoded.sound && !unread }, 10);
      const unexpected = complaints.filter((text) => !unread?.test(text) && !LEFT.test(text));
      assert.deepEqual([...wrong, ...unexpected], []);
    } finally {
      await close();
      await publisher.stop();
      await server.stop();
    }
  });
}

test("a page with an encrypted broadcast says that it has nothing to play", { skip: !existsSync(join(INPUTS, "cenc_every.mp4")) && "ffmpeg cannot make it here" }, async () => {
  const server = await relay();
  const publisher = publish("secret", { clip: join(INPUTS, "cenc_every.mp4"), isOnce: true });
  const { page, wrong, complaints, close } = await open({ tab: "#watch/secret" });
  try {
    await note(page, /neither pictures nor sound for a page: they may be encrypted/);
    await shot(page, "codec-encrypted");
    assert.deepEqual([...wrong, ...complaints], []);
  } finally {
    await close();
    await publisher.stop();
    await server.stop();
  }
});
