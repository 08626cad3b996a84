// The relay's page: its tabs, the part after # in its address, and the status channel that all tabs share. A tab's
// code is loaded when the tab is first shown.

import "../src/style.css";
import "./style.css";
import { byId } from "../src/dom";
import { themes } from "../src/theme";
import { Channel } from "./channel";
import type { Shell, Tab, TabName } from "./tab";
import { Tabs } from "./tabs";

const TITLES: Record<TabName, string> = { watch: "Watch", publish: "Publish", relay: "Relay" };

const LOAD: Record<TabName, () => Promise<{ open(shell: Shell): Tab }>> = {
  watch: () => import("./watch"),
  publish: () => import("./publish"),
  relay: () => import("./relay"),
};

const PRODUCT = "millrace relay";

const opened = new Map<TabName, Promise<Tab>>();
let current: TabName = "watch";

const shell: Shell = { channel: new Channel(), go, current: () => current };
const tabs = new Tabs(byId("tabs"), TITLES, (name) => go(name));

function go(name: TabName, rest = "", replace = false) {
  const address = `#${name}${rest && `/${encodeURIComponent(rest)}`}`;
  if (!replace) {
    location.hash = address;
    return;
  }
  history.replaceState(null, "", address);
  void route();
}

/** Parses `#TAB` and `#TAB/REST`; anything else names a broadcast to watch. */
function parse(hash: string): [TabName, string] {
  const [first = "", ...rest] = hash.slice(1).split("/");
  if (Object.hasOwn(TITLES, first)) return [first as TabName, decoded(rest.join("/"))];
  return ["watch", decoded(hash.slice(1))];
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function route() {
  const [name, rest] = parse(location.hash);
  const before = current;
  current = name;
  tabs.show(name);
  if (before !== name) void opened.get(before)?.then((tab) => tab.hide?.());
  if (!opened.has(name)) opened.set(name, LOAD[name]().then((module) => module.open(shell)));
  const problem = byId("problem");
  try {
    const tab = await opened.get(name);
    if (current !== name || !tab) return;
    document.title = `${tab.show(rest)} - ${PRODUCT}`;
    problem.hidden = true;
  } catch (error) {
    opened.delete(name);
    if (current !== name) return;
    problem.textContent = `This part of the page does not work: ${String(error)}`;
    problem.hidden = false;
  }
}

themes(byId("theme"));
window.addEventListener("hashchange", () => void route());
void route();
