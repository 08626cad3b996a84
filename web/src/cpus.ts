import { type Column, Table } from "./table";
import { FEW, basis, estimate, figure, h, percent } from "./dom";
import { Legend } from "./legend";
import { type Cpu, EVENTS, Estimate, type EventCost, type EventName, OTHERS, type Report, busy, measures, measuresInterrupts } from "./model";

/** Events that have a column even if they did not occur. */
const ALWAYS: readonly EventName[] = EVENTS.slice(0, 5);

/** Largest number of CPUs that have a row each. More CPUs are shown side by side. */
const ROWS = 16;

/** The view of CPUs: for each CPU a bar with its events and its other work. */
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
    const event = (name: EventName): Column<Cpu> => ({
      title: name,
      value: (cpu) => cost(cpu, name)?.share ?? -1,
      text: (cpu) => {
        const of = cost(cpu, name);
        return of === undefined ? "?" : estimate(ofEvent(of), false);
      },
      basis: (cpu) => {
        const of = cost(cpu, name);
        return of === undefined ? "" : basis(ofEvent(of));
      },
      share: true,
      // The columns are those of the terminal's table: events that are timed, and other events that occurred.
      when: () => ALWAYS.includes(name) || (this.report?.cpus ?? []).some((cpu) => (cost(cpu, name)?.share ?? 0) > 0),
    });
    const other = (title: string, of: keyof Cpu["procstat"]): Column<Cpu> => ({
      title,
      value: (cpu) => cpu.procstat[of] / (this.report?.period_ns ?? 1),
      text: (cpu) => (of === "irq_ns" && this.report && !measuresInterrupts(this.report) ? "?" : figure(cpu.procstat[of] / (this.report?.period_ns ?? 1))),
    });
    this.table = new Table<Cpu>(
      "Figures of each CPU",
      [
        { title: "CPU", value: (cpu) => cpu.cpu },
        { title: "networking", value: (cpu) => cpu.networking_share, text: (cpu) => estimate(ofCpu(cpu)), basis: (cpu) => basis(ofCpu(cpu)), share: true },
        ...[...EVENTS, ...OTHERS].map(event),
        { title: "observer", value: (cpu) => cpu.observer_share, text: (cpu) => estimate(ofObserver(cpu), false), basis: (cpu) => basis(ofObserver(cpu)) },
        other("user", "user_ns"),
        other("system", "system_ns"),
        other("softirq", "softirq_ns"),
        other("irq", "irq_ns"),
        other("steal", "steal_ns"),
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

function ofEvent(of: EventCost): Estimate {
  return new Estimate().add(of.share, of.samples, of.interval);
}

function ofCpu(cpu: Cpu, sum = new Estimate()): Estimate {
  const samples = EVENTS.reduce((sum, event) => sum + (cost(cpu, event)?.samples ?? 0), 0);
  return sum.add(cpu.networking_share, samples, cpu.networking_interval);
}

function ofObserver(cpu: Cpu): Estimate {
  return new Estimate().add(cpu.observer_share, cpu.observer_samples ?? 0, cpu.observer_interval);
}

function cost(cpu: Cpu, event: EventName): EventCost | undefined {
  return cpu.events.find((of) => of.event === event);
}

function row(cpu: Cpu, report: Report): HTMLElement {
  const segments = EVENTS.map((event) => segment(event, cost(cpu, event)?.share ?? 0));
  const rest = Math.max(0, busy(cpu, report) - cpu.networking_share - cpu.observer_share);
  const text = EVENTS.map((event) => [event, cost(cpu, event)] as const)
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
  all: Estimate;
  events: Estimate[];
}

/** The view of the network stack's parts, summed up over all CPUs. */
export class Parts {
  readonly element: HTMLElement;
  private report?: Report;
  private readonly table = new Table<PartRow>(
    "Parts of the stack, all CPUs",
    [
      { title: "part", value: (part) => part.name },
      { title: "share", value: (part) => part.all.share, text: (part) => estimate(part.all), basis: (part) => basis(part.all), share: true },
      ...EVENTS.map(
        (event, at): Column<PartRow> => ({
          title: event,
          value: (part) => part.events[at]?.share ?? 0,
          text: (part) => (this.report && measures(this.report, event) ? estimate(part.events[at] ?? new Estimate(), false) : "?"),
          basis: (part) => basis(part.events[at] ?? new Estimate()),
        }),
      ),
      { title: "samples", value: (part) => part.all.samples },
    ],
    "No part was sampled in this time.",
    true,
  );
  private readonly others = new Table<{ name: string; event: string; of: Estimate }>(
    "Functions of the part “other”",
    [
      { title: "function", value: (row) => row.name },
      { title: "event", value: (row) => row.event },
      { title: "share", value: (row) => row.of.share, text: (row) => estimate(row.of), basis: (row) => basis(row.of), share: true },
      { title: "samples", value: (row) => row.of.samples },
    ],
    "Every sample had a part.",
  );

  constructor() {
    const few = `± is the error with 95 % confidence; point at a figure for its range. ~ marks figures of fewer than ${FEW} samples.`;
    this.element = h("div", {}, h("p", { class: "note" }, few), this.table.element, this.others.element);
  }

  show(report: Report): void {
    this.report = report;
    const parts = new Map<string, PartRow>();
    for (const of of report.cpus.flatMap((cpu) => cpu.events)) {
      const at = (EVENTS as readonly string[]).indexOf(of.event);
      if (at < 0) continue;
      for (const part of of.parts) {
        const row = parts.get(part.name) ?? { name: part.name, all: new Estimate(), events: EVENTS.map(() => new Estimate()) };
        for (const sum of [row.all, row.events[at]]) sum?.add(part.share, part.samples, part.interval);
        parts.set(part.name, row);
      }
    }
    this.table.show([...parts.values()].sort((a, b) => b.all.share - a.all.share));
    const rows = report.other.flatMap(({ event, functions }) =>
      functions.map(({ name, ns, samples, interval }) => ({ name, event, of: new Estimate().add(ns / report.period_ns, samples, interval) })),
    );
    this.others.show(rows.sort((a, b) => b.of.share - a.of.share));
  }
}

/** Returns the line of totals for the head of the page. */
export function summary(report: Report): string {
  const networking = report.cpus.reduce((sum, cpu) => ofCpu(cpu, sum), new Estimate());
  const all = report.cpus.reduce((sum, cpu) => sum + busy(cpu, report), 0);
  const cpus = report.cpus.length === 1 ? "1 CPU" : `${report.cpus.length} CPUs`;
  return (
    `networking ${networking.share === 0 ? percent(0) : estimate(networking)} of one CPU (${cpus}, ${percent(all)} busy); observer ${percent(report.observer.share)}` +
    (report.mode === "sampling" ? "; events sampled, not timed" : "")
  );
}
