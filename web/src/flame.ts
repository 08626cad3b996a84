import { cssVariable, duration, figure, h, percent } from "./dom";
import { EVENTS, type Stacks } from "./model";
import type { Store } from "./store";
import { Table } from "./table";
import { Node, insert, leaves, path } from "./tree";

const ROW = 19;
/** Smallest width of a frame that is drawn, in pixels. */
const NARROWEST = 0.6;
const REFRESH_MS = 5000;
/** Smallest number of letters to which a name is cut. A name with less room is not drawn. */
const FEWEST = 3;
/** Number of functions listed below the graph. */
const FUNCTIONS = 50;
/** Name of the root of an empty graph. */
const NOTHING = "nothing";
/** Largest number of processes whose PIDs are in the root's name. */
const NAMED = 2;

interface Box {
  node: Node;
  x: number;
  y: number;
  width: number;
}

/** A flame graph: events and chosen processes are on top, innermost functions at the bottom. */
export class Flame {
  readonly element: HTMLElement;
  private tree = new Node(NOTHING);
  private zoomed: Node = this.tree;
  private focused: Node = this.tree;
  private boxes: Box[] = [];
  /** Total time of the graph in nanoseconds. Time of a chosen process inside of events counts once. */
  private taken = 0;
  private stacks: Stacks | null = null;
  private pattern: RegExp | null = null;
  private visible = false;
  private asked = "";
  private askedAt = 0;
  private readonly canvas = h("canvas", {
    tabindex: 0,
    role: "application",
    "aria-label": "Flame graph. Arrow keys go from frame to frame, Enter zooms in, Escape zooms out.",
    onclick: (event: MouseEvent) => this.zoomAt(event),
    onmousemove: (event: MouseEvent) => this.hover(event),
    onmouseleave: () => this.tip.classList.remove("shown"),
    onkeydown: (event: KeyboardEvent) => this.key(event),
    onfocus: () => this.draw(),
    onblur: () => this.draw(),
  });
  private readonly tip = h("div", { class: "tip", role: "status" });
  private readonly found = h("span", { class: "note" });
  private readonly about = h("span", { class: "note" });
  private readonly reset = h("button", { type: "button", onclick: () => this.zoom(this.tree) }, "Zoom out");
  private readonly cpu = h("select", { "aria-label": "CPU", onchange: () => void this.load(true) });
  private readonly search = h("input", {
    type: "search",
    id: "flame-search",
    placeholder: "Search functions (regular expression)",
    "aria-label": "Search functions",
    oninput: () => this.find(),
  });
  private readonly top = new Table<{ name: string; self: number; total: number }>(
    "Functions",
    [
      { title: "function", value: (row) => row.name },
      { title: "self", value: (row) => row.self / this.period, text: (row) => figure(row.self / this.period), share: true },
      { title: "with callees", value: (row) => row.total / this.period, text: (row) => figure(row.total / this.period) },
    ],
    "No stack was sampled in this time.",
    true,
    FUNCTIONS,
  );

  constructor(private readonly store: Store) {
    this.element = h(
      "div",
      { class: "flame" },
      h("div", { class: "bar" }, this.search, this.found, this.cpu, this.reset, this.about),
      h("div", { class: "canvas" }, this.canvas, this.tip),
      this.top.element,
    );
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement as HTMLElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Sets whether the graph is visible. Data is requested only if it is. */
  show(visible: boolean): void {
    const appears = visible && !this.visible;
    this.visible = visible;
    if (!visible) return;
    this.listCpus();
    void this.load(appears);
  }

  restyle(): void {
    this.draw();
  }

  private listCpus(): void {
    const { cpus } = this.store;
    if (this.cpu.options.length === cpus.length + 1) return;
    this.cpu.replaceChildren(
      h("option", { value: "" }, "all CPUs"),
      ...cpus.map((cpu) => h("option", { value: cpu }, `CPU ${cpu}`)),
    );
  }

  private async load(always: boolean): Promise<void> {
    const range = this.store.stacksRange();
    if (!range) return;
    const cpu = this.cpu.value === "" ? null : Number(this.cpu.value);
    const live = !this.store.range;
    const wanted = live ? `live ${cpu}` : `${range.from} ${range.to} ${cpu}`;
    const due = live ? !this.store.paused && Date.now() - this.askedAt >= REFRESH_MS : false;
    if (!always && wanted === this.asked && !due) return;
    [this.asked, this.askedAt] = [wanted, Date.now()];
    const stacks = await this.store.stacks(range, cpu).catch(() => null);
    if (this.asked !== wanted) return;
    this.take(stacks);
  }

  private take(stacks: Stacks | null): void {
    const [zoomed, focused] = [path(this.zoomed), path(this.focused)];
    this.stacks = stacks;
    this.taken = 0;
    this.tree = new Node(stacks ? this.rootName(stacks) : NOTHING);
    for (const stack of stacks?.stacks ?? []) {
      const names = stack.frames.map((frame) => stacks?.functions[frame] ?? "?");
      // Stacks of a chosen process inside of an event are also among the event's stacks, so they are not added twice.
      const outermost = stack.pid === undefined ? (stack.event ?? "none") : `process ${stack.pid}`;
      insert(this.tree, [outermost, ...names], stack.ns);
      if (stack.pid === undefined || stack.event === undefined) this.taken += stack.ns;
    }
    this.zoomed = descend(this.tree, zoomed);
    this.focused = descend(this.tree, focused);
    const what = stacks === null ? "The server has no stacks of that time." : stacks.frequency_hz === 0 ? "No stacks are sampled (--frequency 0)." : `${duration(stacks.period_ns)} observed`;
    this.about.textContent = what;
    this.top.show(leaves(this.tree).sort((a, b) => b.self - a.self));
    this.find();
  }

  /** Returns a name for the root that describes its contents. */
  private rootName({ stacks }: Stacks): string {
    const pids = [...new Set(stacks.flatMap(({ pid }) => pid ?? []))].sort((a, b) => a - b);
    const what = stacks.some(({ pid }) => pid === undefined) ? ["networking"] : [];
    if (pids.length > NAMED) what.push(`${pids.length} processes`);
    else what.push(...pids.map((pid) => `process ${pid}`));
    if (what.length === 0) return NOTHING;
    const where = this.cpu.value === "" ? "all CPUs" : `CPU ${this.cpu.value}`;
    return `${what.join(" and ")}, ${where}`;
  }

  /** Nanoseconds of one CPU that correspond to 100 %. */
  private get period(): number {
    return Math.max(1, this.stacks?.period_ns ?? 1);
  }

  private ofGraph(ns: number): string {
    return `${percent(ns / Math.max(1, this.tree.ns))} of the graph`;
  }

  private find(): void {
    try {
      this.pattern = this.search.value ? new RegExp(this.search.value, "i") : null;
      this.search.setCustomValidity("");
    } catch {
      this.pattern = null;
      this.search.setCustomValidity("not a regular expression");
    }
    const matched = this.pattern ? matching(this.tree, this.pattern) : 0;
    this.found.textContent = this.pattern ? `matches: ${this.ofGraph(matched)}` : "";
    this.draw();
  }

  private zoom(node: Node): void {
    this.zoomed = node;
    this.focused = node;
    this.draw();
  }

  private draw(): void {
    this.reset.disabled = this.zoomed === this.tree;
    const width = this.canvas.parentElement?.clientWidth ?? 0;
    if (width === 0) return;
    this.layout(width);
    const height = Math.max(3, ...this.boxes.map((box) => box.y / ROW + 1)) * ROW;
    const ratio = devicePixelRatio;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    if (!context) return;
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const box of this.boxes) this.drawBox(context, box);
  }

  /** Computes the places of frames. Ancestors of the zoomed frame keep the whole width. */
  private layout(width: number): void {
    this.boxes = [];
    const ancestors: Node[] = [];
    for (let node = this.zoomed.parent; node; node = node.parent) ancestors.unshift(node);
    ancestors.forEach((node, depth) => this.boxes.push({ node, x: 0, y: depth * ROW, width }));
    const scale = width / Math.max(1, this.zoomed.ns);
    const place = (node: Node, x: number, depth: number): void => {
      const box = { node, x, y: depth * ROW, width: node === this.zoomed ? width : node.ns * scale };
      if (box.width < NARROWEST) return;
      this.boxes.push(box);
      let at = x;
      for (const child of node.sorted()) {
        place(child, at, depth + 1);
        at += child.ns * scale;
      }
    };
    place(this.zoomed, 0, ancestors.length);
  }

  private drawBox(context: CanvasRenderingContext2D, { node, x, y, width }: Box): void {
    const matches = this.pattern?.test(node.name) ?? false;
    context.fillStyle = matches ? cssVariable("--match") : color(node);
    context.globalAlpha = this.pattern && !matches ? 0.45 : 1;
    context.fillRect(x, y, Math.max(0.5, width - 0.7), ROW - 1);
    context.globalAlpha = 1;
    if (node === this.focused && document.activeElement === this.canvas) {
      context.strokeStyle = cssVariable("--text");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, Math.max(1, width - 2.7), ROW - 3);
    }
    if (width < 26) return;
    context.fillStyle = matches ? "#ffffff" : cssVariable(isGrey(node) ? "--text" : "--flame-text");
    context.fillText(fitting(context, node.name, width - 8), x + 4, y + ROW / 2);
  }

  private at(event: MouseEvent): Box | undefined {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    return this.boxes.find((box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + ROW);
  }

  private zoomAt(event: MouseEvent): void {
    const box = this.at(event);
    if (box) this.zoom(box.node);
  }

  private hover(event: MouseEvent): void {
    const box = this.at(event);
    this.tip.classList.toggle("shown", box !== undefined);
    if (!box) return;
    const { left, top, width } = this.canvas.getBoundingClientRect();
    this.describe(box.node, Math.min(event.clientX - left + 12, width - 260), event.clientY - top + 16);
  }

  private describe(node: Node, x: number, y: number): void {
    const taken = node === this.tree ? this.taken : node.ns;
    this.tip.textContent = `${node.name}: ${percent(taken / this.period)} of one CPU, ${this.ofGraph(node.ns)}`;
    this.tip.style.left = `${Math.max(0, x)}px`;
    this.tip.style.top = `${y}px`;
  }

  private key(event: KeyboardEvent): void {
    const siblings = this.focused.parent?.sorted() ?? [];
    const at = siblings.indexOf(this.focused);
    const next: Record<string, Node | undefined> = {
      ArrowDown: this.focused.sorted()[0],
      ArrowUp: this.focused.parent,
      ArrowLeft: siblings[at - 1],
      ArrowRight: siblings[at + 1],
    };
    if (event.key === "Enter") this.zoom(this.focused);
    else if (event.key === "Escape") this.zoom(this.zoomed.parent ?? this.tree);
    else if (next[event.key]) {
      this.focused = next[event.key] as Node;
      this.draw();
    } else return;
    event.preventDefault();
    const box = this.boxes.find((box) => box.node === this.focused);
    this.tip.classList.toggle("shown", box !== undefined);
    if (box) this.describe(this.focused, box.x + 8, box.y + ROW + 4);
  }
}

function descend(tree: Node, names: string[]): Node {
  let node = tree;
  for (const name of names) {
    const child = node.children.get(name);
    if (!child) break;
    node = child;
  }
  return node;
}

/** Returns the part of a name that fits into `width` pixels, with an ellipsis if it is cut. */
function fitting(context: CanvasRenderingContext2D, name: string, width: number): string {
  const all = context.measureText(name).width;
  if (all <= width) return name;
  let letters = Math.floor((name.length * width) / all);
  while (letters > 0 && context.measureText(`${name.slice(0, letters)}…`).width > width) letters -= 1;
  return letters >= FEWEST ? `${name.slice(0, letters)}…` : "";
}

/** Returns the time of matching frames. A match below another match is not counted again. */
function matching(node: Node, pattern: RegExp): number {
  if (pattern.test(node.name) && node.parent) return node.ns;
  let sum = 0;
  for (const child of node.children.values()) sum += matching(child, pattern);
  return sum;
}

/** Reports whether a node is the root or a chosen process. */
function isGrey(node: Node): boolean {
  return !node.parent || (!node.parent.parent && !EVENTS.some((event) => event === node.name));
}

/** Returns a node's colour. Events have the colours of the other views, BPF programs stand out, and a function has the
    same colour everywhere. */
function color(node: Node): string {
  if (!node.parent) return cssVariable("--line");
  if (!node.parent.parent) return cssVariable(isGrey(node) ? "--rest" : `--${node.name}`);
  let hash = 0;
  for (const letter of node.name) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  const light = Number(cssVariable("--flame-light")) - (hash % 7);
  if (node.name.startsWith("bpf:")) return `hsl(${285 + (hash % 25)} 55% ${light}%)`;
  return `hsl(${22 + (hash % 32)} 82% ${light}%)`;
}
