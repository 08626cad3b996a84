// Tests that the page's player continues after a publisher was killed and started again. `scripts/web.sh test returns`
// runs them.
//
// The environment variables are those of `harness.js`, ABSENT_MS (how long the publisher is away) and ROUNDS (how often
// it is killed). The output has the longest times without a new picture, less the publisher's absence.

import assert from "node:assert/strict";

import { at, host, moves, open, ports, relay, shot } from "./harness.js";
import { start, test, until } from "./support.js";

const { MILLRACE, CLIP, ABSENT_MS = "0", ROUNDS = "1" } = process.env;
/** Number of frames that must be shown before the publisher is killed, and again after it was started again. */
const SOME = 45;

/** Publishes the clip in a loop in real time. */
function publish(options) {
  const output = ["-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"];
  const source = start(["ffmpeg", "-v", "error", "-nostdin", "-re", "-stream_loop", "-1", "-i", CLIP, "-c", "copy", ...output], "ignore", "pipe");
  const child = start(at("PUB", MILLRACE, "publish", "--name", "live", ...options, "--tls-disable-verify", `moqt://${host}:${ports.media}`), "pipe");
  source.stdout.on("error", () => {});
  source.stdout.pipe(child.stdin);
  return { kill: () => Promise.all([source.stop("SIGKILL"), child.stop("SIGKILL")]) };
}

/** Makes the page record the time of each picture that it shows. */
const watch = (page) =>
  page.evaluate(() => {
    window.shown = [];
    document.querySelector("moq-watch").renderer.out.timestamp.subscribe(() => window.shown.push(performance.now()));
  });

const longest = (page) => page.evaluate(() => Math.max(...window.shown.slice(1).map((at, index) => at - window.shown[index])));

const PUBLISHERS = [
  ["a publisher", []],
  ["a publisher that numbers its groups from 0 each time", ["--first-group", "0"]],
];

for (const [what, options] of PUBLISHERS) {
  test(`${what} that is killed and started again is a gap in the page's picture`, async (context) => {
    // The idle timeout is so long that the killed publisher's session is still open when the next publisher comes.
    const server = await relay({ who: ["--public", "--idle-timeout", "600"] });
    let publisher = publish(options);
    const { page, wrong, close } = await open();
    try {
      for (let round = 0; round < Number(ROUNDS); round += 1) {
        await moves(page, SOME);
        await watch(page);
        const killed = Date.now();
        await publisher.kill();
        await until("the publisher to be away for as long as is wanted", () => Date.now() - killed >= Number(ABSENT_MS));
        const absent = Date.now() - killed;
        publisher = publish(options);
        await moves(page, SOME);
        context.diagnostic(`no picture for ${((await longest(page)) - absent).toFixed(0)} ms beyond the publisher's absence of ${absent} ms`);
      }
      await shot(page, "returned");
      assert.deepEqual(wrong, []);
    } finally {
      await close();
      await publisher.kill();
      await server.stop();
    }
  });
}
