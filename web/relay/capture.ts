// Captures camera, screen and microphone. Errors say in words for users why a device is missing.

export type Kind = "camera" | "screen";

export interface Wanted {
  kind: Kind;
  /** Largest height of the picture, in lines. */
  lines: number;
  sound: boolean;
}

/** The captured tracks, and a message about a wanted track that is missing. */
export interface Captured {
  stream: MediaStream;
  missing?: string;
}

const FRAMES_A_SECOND = 30;

/** Asks the browser for the tracks; the browser asks the user. Rejects with an error whose text is for users. */
export async function capture(wanted: Wanted): Promise<Captured> {
  try {
    return { stream: await ask(wanted) };
  } catch (error) {
    if (!wanted.sound || !isMissing(error)) throw new Error(inWords(error, wanted), { cause: error });
  }
  // The browser does not say whether the camera or the microphone is missing, so the picture is asked for alone.
  try {
    return { stream: await ask({ ...wanted, sound: false }), missing: "There is no microphone: the broadcast has no sound." };
  } catch (error) {
    throw new Error(inWords(error, wanted), { cause: error });
  }
}

/** Returns the frames of a picture track. The reader must close each frame. */
export function frames(track: MediaStreamTrack): ReadableStream<VideoFrame> {
  const Processor = processor<VideoFrame>();
  return Processor ? new Processor({ track }).readable : drawn(track);
}

/** Returns the samples of a microphone, or `undefined` if this browser cannot encode sound for a page. */
export function samples(track: MediaStreamTrack): ReadableStream<AudioData> | undefined {
  const Processor = processor<AudioData>();
  return Processor && "AudioEncoder" in window ? new Processor({ track }).readable : undefined;
}

type Processor<T> = new (from: { track: MediaStreamTrack }) => { readable: ReadableStream<T> };

/** Returns the class MediaStreamTrackProcessor if the browser has it. Only Chromium and its derivatives do. */
function processor<T>(): Processor<T> | undefined {
  return (window as { MediaStreamTrackProcessor?: Processor<T> }).MediaStreamTrackProcessor;
}

/** Returns frames of a video element that plays the track, for browsers without MediaStreamTrackProcessor. Frames come
    only while the page is visible. */
function drawn(track: MediaStreamTrack): ReadableStream<VideoFrame> {
  const video = document.createElement("video");
  video.muted = true;
  video.playsInline = true;
  video.srcObject = new MediaStream([track]);
  let next = 0;
  return new ReadableStream<VideoFrame>(
    {
      start: () => video.play(),
      pull: (controller) =>
        new Promise((resolve) => {
          next = video.requestVideoFrameCallback((now) => {
            controller.enqueue(new VideoFrame(video, { timestamp: Math.round(now * 1000) }));
            resolve();
          });
        }),
      cancel: () => {
        video.cancelVideoFrameCallback(next);
        video.srcObject = null;
      },
    },
    { highWaterMark: 0 },
  );
}

function ask({ kind, lines, sound }: Wanted): Promise<MediaStream> {
  const frameRate = { ideal: FRAMES_A_SECOND, max: FRAMES_A_SECOND };
  if (kind === "screen") return navigator.mediaDevices.getDisplayMedia({ video: { frameRate }, audio: sound });
  const video = { width: { ideal: Math.round((lines * 16) / 9) }, height: { ideal: lines }, frameRate };
  return navigator.mediaDevices.getUserMedia({ video, audio: sound });
}

function isMissing(error: unknown): boolean {
  return error instanceof DOMException && ["NotFoundError", "NotSupportedError", "OverconstrainedError"].includes(error.name);
}

function inWords(error: unknown, { kind, sound }: Wanted): string {
  const what = kind === "screen" ? "the screen" : sound ? "camera and microphone" : "the camera";
  switch (error instanceof DOMException ? error.name : "") {
    case "NotAllowedError":
      return (
        `The browser does not let this page have ${what}. Allow it when the browser asks, or in its menu next to the page's address ` +
        "if it was refused before; a computer may forbid it to the whole browser, too."
      );
    case "NotFoundError":
    case "OverconstrainedError":
      return kind === "screen" ? "There is no screen to capture here." : "There is no camera here. Plug one in, or publish the screen.";
    case "NotReadableError":
    case "AbortError":
      return `The browser cannot open ${what}: another program may be using it.`;
    case "NotSupportedError":
      return `This browser cannot capture ${what}.`;
    default:
      return `The browser cannot open ${what}: ${error instanceof Error ? error.message : String(error)}`;
  }
}
