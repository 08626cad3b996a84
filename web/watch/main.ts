// What is live at this relay, and a player for it: @moq/watch, over WebTransport.

import "../src/style.css";
import "./style.css";
import { Connection } from "@moq/net";

import { byId } from "../src/dom";
import { Broadcasts } from "./broadcasts";
import { Player } from "./player";
import { follow } from "./relay";
import { Reach, hindrance, tell } from "./reach";

async function main() {
  const why = hindrance();
  if (why) {
    tell(why);
    return;
  }
  const player = new Player(byId("player"));
  // Of its own: on one session no two may ask for namespaces whose prefixes overlap, and the player asks too.
  const connection = new Connection.Reload();
  const reach = new Reach([connection, player.connection]);
  const broadcasts = new Broadcasts(connection, (name) => (location.hash = encodeURIComponent(name)));
  const choose = () => {
    const name = chosen();
    broadcasts.mark(name);
    player.play(name);
  };
  window.addEventListener("hashchange", choose);
  broadcasts.follow(chosen);
  if (chosen()) choose();
  player.report("figures");
  follow("relay");
  await reach.keep();
}

/** The broadcast in the address. */
function chosen(): string {
  return decodeURIComponent(location.hash.slice(1));
}

main().catch((error: unknown) => tell(`The page does not work: ${String(error)}`));
