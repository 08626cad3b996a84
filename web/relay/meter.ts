// Estimates how much of the written data the browser has sent. Browsers accept more data than they can send at once, and
// none reports the bytes that it has sent. But closing a stream resolves once the peer has received all of the stream.

/** A group of streams that were closed at about the same time. */
export interface Mark {
  /** Number of bytes written to all streams until the mark's last stream was closed. */
  given: number;
  /** Time when the mark's first stream was closed, in milliseconds of the page's clock. */
  closed: number;
  /** Time when the peer had received all streams of the mark. `undefined` until then. */
  arrived?: number;
}

/** Streams that are closed within this time form one mark. */
const TOGETHER_MS = 50;

/** Measures all unidirectional streams of WebTransport sessions that begin while it exists. */
export class Meter {
  /** Number of bytes written, without those of aborted streams. */
  given = 0;
  /** Marks in the order of their times. */
  #marks: (Mark & { streams: number })[] = [];
  readonly #real = window.WebTransport;

  /** Replaces the class WebTransport, because @moq/net creates its sessions itself. */
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

  /** Forgets the marks that arrived before this time. */
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
        // The browser discards the waiting bytes of an aborted stream, so none of the stream's bytes count.
        this.given -= own;
        own = 0;
        return abort(reason);
      };
      return writer;
    };
  }
}
