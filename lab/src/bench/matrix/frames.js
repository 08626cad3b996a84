// Records the bytes of every frame that the page encodes or decodes, for a script outside of the page.
//
// It runs before the page's own scripts. WEB is the content of /web.json, PROTOCOL the WebTransport protocol to offer,
// and LATENCY_MS the player's buffer.

(() => {
  /** As base64. */
  const frames = [];
  window.millraceFrames = frames;

  const fetched = window.fetch;
  window.fetch = (input, ...rest) =>
    String(input).endsWith("/web.json") ? Promise.resolve(new Response(JSON.stringify(WEB))) : fetched(input, ...rest);

  window.WebTransport = class extends WebTransport {
    constructor(url, options) {
      super(url, { ...options, protocols: [PROTOCOL] });
    }
  };

  function bytes(chunk) {
    const data = new Uint8Array(chunk.byteLength);
    chunk.copyTo(data);
    let text = "";
    for (const byte of data) text += String.fromCharCode(byte);
    return btoa(text);
  }

  window.VideoEncoder = class extends VideoEncoder {
    constructor({ output, error }) {
      const keep = (chunk, metadata) => {
        frames.push(bytes(chunk));
        output(chunk, metadata);
      };
      super({ output: keep, error });
    }
  };

  window.VideoDecoder = class extends VideoDecoder {
    /** Bytes of frames that have not been decoded yet, by time stamp. */
    #waiting = new Map();

    constructor({ output, error }) {
      let waiting;
      const keep = (frame) => {
        const data = waiting.get(frame.timestamp);
        if (data !== undefined) frames.push(data);
        waiting.delete(frame.timestamp);
        output(frame);
      };
      super({ output: keep, error });
      waiting = this.#waiting;
    }

    decode(chunk) {
      this.#waiting.set(chunk.timestamp, bytes(chunk));
      super.decode(chunk);
    }
  };

  // Set the buffer before the player starts.
  new MutationObserver((_, observer) => {
    const player = document.querySelector("moq-watch");
    if (!player) return;
    player.setAttribute("latency", String(LATENCY_MS));
    observer.disconnect();
  }).observe(document, { childList: true, subtree: true });
})();
