// What /status says, to whom it is for.

import { count } from "../src/dom";
import { list } from "./player";

const RELAY_MS = 2000;

/** Shows the relay's figures in the list of this ID, from now on. */
export async function follow(id: string) {
  for (;;) {
    list(id, await figures());
    await new Promise((resolve) => setTimeout(resolve, RELAY_MS));
  }
}

async function figures(): Promise<Record<string, string>> {
  const answer = await fetch("./status", { cache: "no-store" }).catch(() => undefined);
  if (answer?.status === 401) return { Figures: "need the link with the token, which the relay's operator has" };
  if (!answer?.ok) return { Figures: "not to be had at the moment" };
  const { engine, totals, sessions, tracks } = await answer.json();
  return {
    Engine: engine.name,
    "Packets by the kernel": count(totals.kernel.packets),
    "Packets by userspace": count(totals.data_plane.packets),
    Sessions: String(sessions.length),
    Tracks: String(tracks.length),
  };
}
