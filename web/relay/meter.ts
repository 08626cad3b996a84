// Estimates how much of its data the browser has sent. No browser reports the bytes that it has sent, and all accept
// more than they can send at once. But the end of a closed stream is reported once the peer has received all of it.

/** A group of streams that were closed at about the same time. */
export interface Mark {
  /** Bytes that had been written by then. */
  given: number;
  /** Time of closing, in milliseconds of the page's clock. */
  closed: number;
  /** Time when the last of them had arrived; `undefined` while some have not. */
  arrived?: number;
}

/** Streams that are closed within this time form one mark. */
const TOGETHER_MS = 50;

/** Measures all unidirectional streams of WebTransport sessions that begin while it exists. */
export class Meter {
  /** Bytes that were written. */
  given = 0;
  /** Marks, from the first that may still be useful. */
  #marks: (Mark & { streams: number })[] = [];
  readonly #real = window.WebTransport;

  /** The library creates its sessions itself, so their class is replaced here. */
  constructor() {
    const opened = (stream: WritableStream) => this.#measure(stream);
    window.WebTransport = class extends this.#real {
      override async createUnidirectionalStream(options?: WebTransportSendStreamOptions) {
        const stream = await super.createUnidirectionalStream(options);
        opened(stream);
        return stream;
      }
    };
  }

  get marks(): readonly Mark[] {
    return this.#marks;
  }

  /** Forgets everything that was written so far. */
  begin() {
    this.given = 0;
    this.#marks = [];
  }

  /** Forgets the marks before this time. */
  forget(before: number) {
    this.#marks = this.#marks.filter(({ arrived }) => arrived === undefined || arrived >= before);
  }

  close() {
    window.WebTransport = this.#real;
  }

  #mark() {
    const [last, now] = [this.#marks.at(-1), performance.now()];
    if (last && last.arrived === undefined && now - last.closed < TOGETHER_MS) return Object.assign(last, { given: this.given });
    const mark: Mark & { streams: number } = { given: this.given, closed: now, streams: 0 };
    this.#marks.push(mark);
    return mark;
  }

  #measure(stream: WritableStream) {
    const getWriter = stream.getWriter.bind(stream);
    stream.getWriter = () => {
      const writer = getWriter();
      const [write, close, abort] = [writer.write.bind(writer), writer.close.bind(writer), writer.abort.bind(writer)];
      let own = 0;
      writer.write = (chunk: Uint8Array) => {
        own += chunk.byteLength;
        this.given += chunk.byteLength;
        return write(chunk);
      };
      writer.close = async () => {
        const mark = this.#mark();
        mark.streams += 1;
        try {
          await close();
        } finally {
          mark.streams -= 1;
          if (mark.streams === 0) mark.arrived = performance.now();
        }
      };
      writer.abort = (reason) => {
        // The bytes that were waiting are discarded.
        this.given -= own;
        own = 0;
        return abort(reason);
      };
      return writer;
    };
  }
}
