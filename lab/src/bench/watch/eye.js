// Reads the frame number from the page's canvas at the end of each animation frame. The number is drawn as 16 squares,
// white for a bit that is set, the lowest bit first. The square below each shows the opposite.
//
// This runs before the page's own scripts. WEB is the content of /web.json, LATENCY_MS the player's buffer.

(() => {
  const BITS = 16;
  const SIDE = 16;
  /** Thresholds of a byte: a value above the first is white, below the second black. */
  const [WHITE, BLACK] = [170, 85];

  /** A longer time between animation frames is reported. */
  const GAP_MS = 50;

  const eye = { played: undefined, seen: [], gaps: [], buffer: undefined };
  window.millraceEye = eye;

  const fetched = window.fetch;
  window.fetch = (input, ...rest) =>
    String(input).endsWith("/web.json") ? Promise.resolve(new Response(JSON.stringify(WEB))) : fetched(input, ...rest);

  // The page plays the first broadcast that is announced, and then changes its address to it.
  const replaced = history.replaceState;
  history.replaceState = function (state, unused, address) {
    if (String(address).startsWith("#watch/")) eye.played ??= Date.now();
    replaced.call(this, state, unused, address);
  };

  // Set the buffer before the player starts.
  let player;
  new MutationObserver((_, observer) => {
    player = document.querySelector("moq-watch");
    if (!player) return;
    player.setAttribute("latency", String(LATENCY_MS));
    observer.disconnect();
  }).observe(document, { childList: true, subtree: true });

  const small = new OffscreenCanvas(BITS, 2);
  const context = small.getContext("2d", { willReadFrequently: true });

  /** The number in the picture, if there is one. */
  function read(canvas) {
    context.drawImage(canvas, 0, 0, BITS * SIDE, 2 * SIDE, 0, 0, BITS, 2);
    const { data } = context.getImageData(0, 0, BITS, 2);
    let number = 0;
    for (let bit = 0; bit < BITS; bit++) {
      const [one, other] = [data[4 * bit + 1], data[4 * (BITS + bit) + 1]];
      if (one > WHITE && other < BLACK) number |= 1 << bit;
      else if (!(one < BLACK && other > WHITE)) return undefined;
    }
    return number;
  }

  let last;
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => {
    const canvas = player?.querySelector("canvas");
    const number = canvas && read(canvas);
    if (number === undefined || number === last) return;
    eye.seen.push([number, Date.now()]);
    eye.buffer = player.sync.out.buffer.peek();
    last = number;
  };
  let before = Infinity;
  const look = () => {
    requestAnimationFrame(look);
    const now = Date.now();
    if (now - before > GAP_MS) eye.gaps.push([now, now - before]);
    before = now;
    port2.postMessage(undefined);
  };
  requestAnimationFrame(look);
})();
