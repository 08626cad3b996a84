// The tab Publish: captures camera or screen, encodes it, and sends it to the relay.

import { byId, h } from "../src/dom";
import { type Captured, type Kind, capture } from "./capture";
import type { News } from "./channel";
import { Encoder } from "./encode";
import { bytes, list, rate } from "./figures";
import { Reach, type Tell, hindrance, say } from "./reach";
import { Sender } from "./sender";
import type { Shell, Tab } from "./tab";

const FIGURES_MS = 500;

const STATES = { connecting: "connects to the relay", refused: "refused by the relay", idle: "published; no viewers yet", sent: "sent to the relay" };

export function open(shell: Shell): Tab {
  const tell = say("publish-message");
  const form = byId("publish-form") as HTMLFormElement;
  const why = hindrance({ VideoEncoder: "encode video" }) ?? without();
  if (why) {
    tell(why);
    return { show: () => "Publish" };
  }
  const publisher = new Publisher(form, shell, tell);
  return {
    show(rest) {
      publisher.suggest(rest);
      return "Publish";
    },
  };
}

function without(): string | undefined {
  return navigator.mediaDevices ? undefined : "This browser gives web pages no access to the camera or the screen.";
}

/** A broadcast in progress. */
interface Show {
  name: string;
  captured: Captured;
  encoder: Encoder;
  sender: Sender;
  ends: AbortController;
}

class Publisher {
  readonly #name: HTMLInputElement;
  readonly #settings: HTMLFieldSetElement;
  readonly #preview = byId("preview") as HTMLVideoElement;
  readonly #begin = byId("publish-begin") as HTMLButtonElement;
  readonly #end = byId("publish-end") as HTMLButtonElement;
  readonly #note = say("publish-note");
  #show?: Show;
  #viewers = "";
  /** Time of the last figures, and the bytes sent until then. */
  #before = { at: 0, bytes: 0 };

  constructor(
    readonly form: HTMLFormElement,
    readonly shell: Shell,
    readonly tell: Tell,
  ) {
    this.#name = form.elements.namedItem("name") as HTMLInputElement;
    this.#settings = form.querySelector("fieldset") as HTMLFieldSetElement;
    this.#name.value = `browser-${crypto.getRandomValues(new Uint16Array(1))[0]}`;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#publish();
    });
    this.#end.addEventListener("click", () => this.#stop());
    setInterval(() => this.#figures(), FIGURES_MS);
    this.#enable(true);
  }

  #enable(may: boolean) {
    this.#settings.disabled = !may;
    this.#begin.disabled = !may;
  }

  suggest(name: string) {
    if (name && !this.#show) this.#name.value = name;
  }

  async #publish() {
    const name = this.#name.value.split("/").filter(Boolean).join("/");
    if (!name) {
      this.tell("A broadcast needs a name, by which viewers find it.");
      this.#name.focus();
      return;
    }
    const chosen = new FormData(this.form);
    this.tell(undefined);
    this.#note(undefined);
    this.#enable(false);
    try {
      const lines = Number(chosen.get("lines"));
      const captured = await capture({ kind: chosen.get("source") as Kind, lines, sound: chosen.has("sound") });
      this.#start(name, captured, lines);
    } catch (error) {
      this.#stop(error instanceof Error ? error.message : String(error));
      this.#begin.focus();
    }
  }

  #start(name: string, captured: Captured, lines: number) {
    const { stream } = captured;
    const ends = new AbortController();
    const failed = (error: Error) => this.#stop(error.message);
    const sender = new Sender(name, failed, (reason) => this.tell(refusal(name, reason)));
    const encoder = new Encoder(stream, lines, sender);
    sender.from(encoder);
    this.#show = { name, captured, encoder, sender, ends };
    this.#before = { at: performance.now(), bytes: 0 };
    this.#preview.srcObject = stream;
    this.#preview.hidden = false;
    byId("publish-figures").hidden = false;
    for (const track of stream.getVideoTracks()) {
      track.addEventListener("ended", () => this.#stop("The browser stopped the capture: you ended it, or the device was removed."), { signal: ends.signal });
    }
    const noSound = stream.getAudioTracks().length > 0 && !encoder.hasSound ? "This browser cannot encode sound for a page: the broadcast has no sound." : undefined;
    this.#note(captured.missing ?? noSound);
    void new Reach([sender.connection], this.tell, "publish-connection").keep(ends.signal);
    const unlisten = this.shell.channel.listen((news) => (this.#viewers = viewers(news, name)));
    ends.signal.addEventListener("abort", unlisten);
    this.#begin.hidden = true;
    this.#end.hidden = false;
    this.#end.focus();
    const watch = h("a", { href: `#watch/${encodeURIComponent(name)}` }, name);
    byId("publish-where").replaceChildren("Viewers find it as ", watch, ".");
    this.#figures();
  }

  /** Ends the broadcast. `why` is the reason, unless the user ended it. */
  #stop(why?: string) {
    const { captured, encoder, sender, ends } = this.#show ?? {};
    this.#show = undefined;
    ends?.abort();
    encoder?.close();
    sender?.close();
    for (const track of captured?.stream.getTracks() ?? []) track.stop();
    this.#preview.srcObject = null;
    this.#preview.hidden = true;
    this.#enable(true);
    this.#begin.hidden = false;
    this.#end.hidden = true;
    byId("publish-where").replaceChildren();
    byId("publish-figures").hidden = true;
    this.tell(why);
    this.#note(undefined);
    if (ends) this.#begin.focus();
  }

  #figures() {
    if (!this.#show || this.shell.current() !== "publish") return;
    const { encoder, sender } = this.#show;
    const { at, bytes: sent } = this.#before;
    const now = { at: performance.now(), bytes: sender.bytes };
    this.#before = now;
    const [video, sound] = encoder.tracks ?? [];
    const size = video?.kind === "video" ? `${video.width} × ${video.height}, H.264` : "none yet";
    list("sent", {
      State: STATES[sender.state],
      Picture: size,
      Sound: sound ? "Opus" : "none",
      "Frames encoded": String(encoder.sent),
      "Frames skipped": String(encoder.skipped),
      "Frames dropped": String(encoder.dropped),
      "Bit rate": rate(((now.bytes - sent) * 8000) / Math.max(1, now.at - at)),
      "Bit rate of the picture, at most": sender.aim === undefined ? "not known yet" : rate(sender.aim),
      Encoded: bytes(now.bytes),
      ...(this.#viewers && { Viewers: this.#viewers }),
    });
  }
}

/** Returns the number of sessions that receive the picture, if the relay reports it to this page. */
function viewers(news: News, name: string): string {
  if ("why" in news) return "";
  const of = news.now.tracks.filter((track) => track.name.startsWith(`${name}/`));
  return String(Math.max(0, ...of.map((track) => track.subscribers)));
}

function refusal(name: string, reason: string): string {
  const said = reason ? `: “${reason}”.` : ".";
  const token = new URLSearchParams(location.search).has("jwt")
    ? "The token in this page's address (?jwt=) does not allow it, or no longer does."
    : "If publishing needs a token, open this page with it: add ?jwt=TOKEN to the address, before the #.";
  return `The relay refuses a broadcast “${name}” from this page${said} ${token}`;
}
