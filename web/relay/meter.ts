// What the browser has sent of what it was given, as far as that can be seen: no browser of today says how many bytes it has sent, and all of
// them take more than they can send at once. But a stream that was closed is done with once the other end has all of it.

/** Streams that were closed at a time. */
export interface Mark {
  /** Bytes that had been given by then. */
  given: number;
  /** Milliseconds of the page's clock. */
  closed: number;
  /** Likewise; `undefined`: not all of them have arrived. */
  arrived?: number;
}

/** Streams that are closed within so many milliseconds are one mark. */
const TOGETHER_MS = 50;

/** Of the unidirectional streams of all sessions of WebTransport that are begun while it is there. */
export class Meter {
  /** Bytes. */
  given = 0;
  /** From the first one on that may still be of use. */
  #marks: (Mark & { streams: number })[] = [];
  readonly #real = window.WebTransport;

  /** The library makes its sessions itself, so they are measured where they come from. */
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

  /** Nothing of what was given matters any more. */
  begin() {
    this.given = 0;
    this.#marks = [];
  }

  /** Marks before this are of no use any more. */
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
        // What waits of it is thrown away.
        this.given -= own;
        own = 0;
        return abort(reason);
      };
      return writer;
    };
  }
}
