import { type Column, Table } from "./table";
import { figure, h, percent } from "./dom";
import { Legend } from "./legend";
import { type Cpu, EVENTS, type EventCost, type Report, busy, measures, networking } from "./model";

/** More CPUs than this are shown side by side. */
const ROWS = 16;

/** Each CPU: a bar of its events, then what else it was busy with. */
export class Cpus {
  readonly element: HTMLElement;
  private readonly grid = h("div", { class: "cpus" });
  private readonly toggle = h("button", { type: "button", onclick: () => this.other() }, "");
  private readonly order = h(
    "select",
    { "aria-label": "Order of CPUs", onchange: () => this.draw() },
    h("option", { value: "number" }, "by number"),
    h("option", { value: "share" }, "most networking first"),
  );
  private readonly table: Table<Cpu>;
  private compact?: boolean;
  private report?: Report;

  constructor() {
    const event = (at: number): Column<Cpu> => ({
      title: EVENTS[at] ?? "",
      value: (cpu) => cost(cpu, at)?.share ?? -1,
      text: (cpu) => {
        const share = cost(cpu, at)?.share;
        return share === undefined ? "?" : figure(share);
      },
      share: true,
    });
    const other = (title: string, of: keyof Cpu["procstat"]): Column<Cpu> => ({
      title,
      value: (cpu) => cpu.procstat[of] / (this.report?.period_ns ?? 1),
      text: (cpu) => figure(cpu.procstat[of] / (this.report?.period_ns ?? 1)),
    });
    this.table = new Table<Cpu>(
      "Figures of each CPU",
      [
        { title: "CPU", value: (cpu) => cpu.cpu },
        { title: "networking", value: (cpu) => cpu.networking_share, text: (cpu) => figure(cpu.networking_share), share: true },
        ...EVENTS.map((_, at) => event(at)),
        { title: "observer", value: (cpu) => cpu.observer_share, text: (cpu) => figure(cpu.observer_share) },
        other("user", "user_ns"),
        other("system", "system_ns"),
        other("softirq", "softirq_ns"),
        other("idle", "idle_ns"),
      ],
      "no CPU",
    );
    this.element = h("div", {}, h("div", { class: "bar" }, new Legend([...EVENTS, "observer", "other work"]).element, h("span", { class: "note" }, "shares are of one CPU"), this.order, this.toggle), this.grid, this.table.element);
  }

  show(report: Report): void {
    this.report = report;
    this.compact ??= report.cpus.length > ROWS;
    this.draw();
  }

  private other(): void {
    this.compact = !this.compact;
    this.draw();
  }

  private draw(): void {
    const { report } = this;
    if (!report) return;
    this.toggle.textContent = this.compact ? "Rows" : "Side by side";
    this.grid.classList.toggle("compact", this.compact);
    const cpus = [...report.cpus];
    if (this.order.value === "share") cpus.sort((a, b) => b.networking_share - a.networking_share);
    this.grid.replaceChildren(...cpus.map((cpu) => row(cpu, report)));
    this.table.show(report.cpus);
  }
}

function cost(cpu: Cpu, at: number): EventCost | undefined {
  return cpu.events.find((of) => of.event === EVENTS[at]);
}

function row(cpu: Cpu, report: Report): HTMLElement {
  const segments = EVENTS.map((event, at) => segment(event, cost(cpu, at)?.share ?? 0));
  const rest = Math.max(0, busy(cpu, report) - cpu.networking_share - cpu.observer_share);
  const text = EVENTS.map((event, at) => [event, cost(cpu, at)] as const)
    .map(([event, of]) => `${event} ${of ? percent(of.share) : "not measured"}`)
    .join(", ");
  return h(
    "div",
    { class: "cpu", title: `CPU ${cpu.cpu}: ${text}; observer ${percent(cpu.observer_share)}; other work ${percent(rest)}` },
    h("span", { class: "name" }, String(cpu.cpu)),
    h("span", { class: "stack", role: "img", "aria-label": text }, ...segments, segment("observer", cpu.observer_share), segment("rest", rest)),
    h("span", { class: "number" }, percent(cpu.networking_share)),
  );
}

function segment(kind: string, share: number): HTMLElement {
  const element = h("span", { class: kind });
  element.style.width = `${Math.min(1, share) * 100}%`;
  return element;
}

interface PartRow {
  name: string;
  all: number;
  events: number[];
}

/** Parts of the stack, over all CPUs. */
export class Parts {
  readonly element: HTMLElement;
  private report?: Report;
  private readonly table = new Table<PartRow>(
    "Parts of the stack, all CPUs",
    [
      { title: "part", value: (part) => part.name },
      { title: "share", value: (part) => part.all, text: (part) => figure(part.all), share: true },
      ...EVENTS.map(
        (event, at): Column<PartRow> => ({
          title: event,
          value: (part) => part.events[at] ?? 0,
          text: (part) => (this.report && measures(this.report, event) ? figure(part.events[at] ?? 0) : "?"),
        }),
      ),
    ],
    "No part was sampled in this time.",
    true,
  );
  private readonly others = new Table<{ name: string; event: string; share: number }>(
    "Functions of the part “other”",
    [
      { title: "function", value: (row) => row.name },
      { title: "event", value: (row) => row.event },
      { title: "share", value: (row) => row.share, text: (row) => figure(row.share), share: true },
    ],
    "Every sample had a part.",
  );

  constructor() {
    this.element = h("div", {}, this.table.element, this.others.element);
  }

  show(report: Report): void {
    this.report = report;
    const parts = new Map<string, PartRow>();
    for (const of of report.cpus.flatMap((cpu) => cpu.events)) {
      const at = EVENTS.indexOf(of.event);
      for (const part of of.parts) {
        const row = parts.get(part.name) ?? { name: part.name, all: 0, events: EVENTS.map(() => 0) };
        row.all += part.share;
        row.events[at] = (row.events[at] ?? 0) + part.share;
        parts.set(part.name, row);
      }
    }
    this.table.show([...parts.values()].sort((a, b) => b.all - a.all));
    const rows = report.other.flatMap(({ event, functions }) =>
      functions.map(({ name, ns }) => ({ name, event, share: ns / report.period_ns })),
    );
    this.others.show(rows.sort((a, b) => b.share - a.share));
  }
}

/** In one line, for the head of the page. */
export function summary(report: Report): string {
  const all = report.cpus.reduce((sum, cpu) => sum + busy(cpu, report), 0);
  const cpus = report.cpus.length === 1 ? "1 CPU" : `${report.cpus.length} CPUs`;
  return (
    `networking ${percent(networking(report))} of one CPU (${cpus}, ${percent(all)} busy); observer ${percent(report.observer.share)}` +
    (report.mode === "sampling" ? "; events sampled, not timed" : "")
  );
}
