// The live broadcasts of this relay, and a player for them: @moq/watch over WebTransport.

import { Connection } from "@moq/net";

import { byId } from "../src/dom";
import { Broadcasts } from "./broadcasts";
import { inShort, list } from "./figures";
import { Player } from "./player";
import { Reach, hindrance, say } from "./reach";
import type { Shell, Tab } from "./tab";

const TITLE = "Watch";

export function open(shell: Shell): Tab {
  const tell = say("message");
  const why = hindrance({ VideoDecoder: "decode video" });
  if (why) {
    tell(why);
    return { show: () => TITLE };
  }
  const player = new Player(byId("player"));
  // The list has a connection of its own. MoQ allows no overlapping namespace prefixes in one session, and both the
  // list and the player subscribe to namespaces.
  const connection = new Connection.Reload();
  const reach = new Reach([connection, player.connection], tell, "connection");
  const broadcasts = new Broadcasts(connection, (name) => shell.go("watch", name));
  let chosen = "";
  const play = (name: string) => {
    if (name && name !== chosen) player.play(name);
    chosen = name || chosen;
    broadcasts.mark(chosen);
  };
  void broadcasts.follow((first) => {
    if (chosen) return;
    play(first);
    if (shell.current() === "watch") shell.go("watch", first, true);
  });
  player.report("figures");
  void reach.keep(new AbortController().signal);
  let ends: (() => void) | undefined;
  return {
    show(rest) {
      // The address names the broadcast that is playing.
      if (!rest && chosen) shell.go("watch", chosen, true);
      play(rest);
      ends ??= shell.channel.listen((news) => list("relay", inShort(news)));
      return chosen || TITLE;
    },
    hide() {
      ends?.();
      ends = undefined;
    },
  };
}
