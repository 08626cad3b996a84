import "./style.css";

import { Chart } from "./chart";
import { Cpus, Parts, summary } from "./cpus";
import { byId, h } from "./dom";
import { Explanations } from "./explain";
import { Flame } from "./flame";
import type { Report } from "./model";
import { Store } from "./store";
import { About, Cgroups, Processes, Programs } from "./tasks";
import { themes } from "./theme";

interface View {
  element: HTMLElement;
  show(report: Report): void;
}

const CONNECTIONS = { connecting: "connecting…", live: "live", stale: "no new reports", lost: "no connection, trying again", log: "log" };

const store = new Store();
const chart = new Chart(store);
const flame = new Flame(store);
const about = new About();
const views: Record<string, [string, View]> = {
  cpus: ["CPUs", new Cpus()],
  parts: ["Parts of the stack", new Parts()],
  flame: ["Flame graph", { element: flame.element, show: () => {} }],
  processes: ["Processes", new Processes()],
  cgroups: ["Cgroups", new Cgroups()],
  programs: ["BPF programs", new Programs()],
  about: ["Notes", { element: about.element, show: (report) => about.show(report, store.dropped) }],
};
let current = "cpus";

const tabs = Object.entries(views).map(([id, [title]]) =>
  h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "view", onclick: () => open(id) }, title),
);

function open(id: string): void {
  current = id in views ? id : "cpus";
  history.replaceState(null, "", `#${current}`);
  const [, view] = views[current] as [string, View];
  byId("view").replaceChildren(view.element);
  byId("view").setAttribute("aria-labelledby", `tab-${current}`);
  for (const tab of tabs) {
    const selected = tab.id === `tab-${current}`;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  draw();
}

function draw(): void {
  const connection = byId("connection");
  connection.textContent = CONNECTIONS[store.connection];
  connection.dataset["state"] = store.connection;
  const { report } = store;
  flame.show(current === "flame");
  if (!report) return;
  byId("host").textContent = `${report.host.name}, Linux ${report.host.kernel}`;
  byId("summary").textContent = summary(report);
  document.title = `${report.host.name}: millrace cost`;
  const notes = About.notes(report, store.dropped);
  byId("tab-about").textContent = notes > 0 ? `Notes (${notes})` : "Notes";
  (views[current] as [string, View])[1].show(report);
}

/** Moves to the next or previous tab when an arrow key is pressed. */
function tabKey(event: KeyboardEvent): void {
  const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (by === 0) return;
  const at = tabs.findIndex((tab) => tab.id === `tab-${current}`);
  const next = tabs[(at + by + tabs.length) % tabs.length];
  next?.click();
  next?.focus();
}

new Explanations();
byId("tabs").append(...tabs);
byId("tabs").addEventListener("keydown", tabKey);
themes(byId("theme"), () => {
  chart.restyle();
  flame.restyle();
});
store.addEventListener("change", draw);
open(location.hash.slice(1));
store.connect();
