// Camera, screen and microphone, and in plain words why there is none of them.

export type Kind = "camera" | "screen";

export interface Wanted {
  kind: Kind;
  /** Of the picture, at most. */
  lines: number;
  sound: boolean;
}

/** What is captured, and what of that which was wanted is missing. */
export interface Captured {
  stream: MediaStream;
  missing?: string;
}

const FRAMES_A_SECOND = 30;

/** Asks for it; the browser asks its user. Rejects with an error in words. */
export async function capture(wanted: Wanted): Promise<Captured> {
  try {
    return { stream: await ask(wanted) };
  } catch (error) {
    if (!wanted.sound || !isMissing(error)) throw new Error(inWords(error, wanted), { cause: error });
  }
  // It is not said which of them is missing.
  try {
    return { stream: await ask({ ...wanted, sound: false }), missing: "There is no microphone: the picture goes without sound." };
  } catch (error) {
    throw new Error(inWords(error, wanted), { cause: error });
  }
}

/** The frames of a picture, or what a microphone hears; a frame that is taken has to be closed. */
export function frames(track: MediaStreamTrack): ReadableStream<VideoFrame> {
  const Processor = processor<VideoFrame>();
  return Processor ? new Processor({ track }).readable : drawn(track);
}

/** `undefined`: this browser gives a page no sound to encode. */
export function samples(track: MediaStreamTrack): ReadableStream<AudioData> | undefined {
  const Processor = processor<AudioData>();
  return Processor && "AudioEncoder" in window ? new Processor({ track }).readable : undefined;
}

type Processor<T> = new (from: { track: MediaStreamTrack }) => { readable: ReadableStream<T> };

/** It is in no browser but Chromium's kin. */
function processor<T>(): Processor<T> | undefined {
  return (window as { MediaStreamTrackProcessor?: Processor<T> }).MediaStreamTrackProcessor;
}

/** By way of an element that plays it; only while the page is looked at. */
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
        `The browser does not let this page have ${what}. Allow it where the browser asks, or beside the page's address ` +
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
