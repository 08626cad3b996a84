/** A function called by a certain chain of callers: a frame of the flame graph. */
export class Node {
  ns = 0;
  readonly children = new Map<string, Node>();
  private order?: Node[];

  constructor(
    readonly name: string,
    readonly parent?: Node,
  ) {}

  /** Returns the children by name, so that frames keep their places when figures change. */
  sorted(): Node[] {
    this.order ??= [...this.children.values()].sort((a, b) => a.name.localeCompare(b.name));
    return this.order;
  }

  child(name: string): Node {
    let child = this.children.get(name);
    if (!child) {
      child = new Node(name, this);
      this.children.set(name, child);
      this.order = undefined;
    }
    return child;
  }
}

/** Name of a frame whose address belongs to no known function. */
const UNKNOWN = "[unknown]";

/** Adds a stack, outermost function first. */
export function insert(tree: Node, names: string[], ns: number): void {
  let node = tree;
  node.ns += ns;
  // Programs without frame pointers give any number of unknown functions in a row, which are merged into one.
  for (const name of names.filter((name, at) => name !== UNKNOWN || names[at - 1] !== UNKNOWN)) {
    node = node.child(name);
    node.ns += ns;
  }
}

/** Returns the names from below the root to `node`. */
export function path(node: Node): string[] {
  return node.parent ? [...path(node.parent), node.name] : [];
}

/** Returns each function's own time, and its time with callees. A recursive call is not counted again. */
export function leaves(tree: Node): { name: string; self: number; total: number }[] {
  const functions = new Map<string, { name: string; self: number; total: number }>();
  const callers = new Set<string>();
  const visit = (node: Node, depth: number): void => {
    let self = node.ns;
    for (const child of node.children.values()) self -= child.ns;
    const outermost = !callers.has(node.name);
    // Depth 0 is the root and depth 1 the events; functions begin below them.
    if (depth >= 2) {
      const of = functions.get(node.name) ?? { name: node.name, self: 0, total: 0 };
      of.self += self;
      if (outermost) of.total += node.ns;
      functions.set(node.name, of);
      callers.add(node.name);
    }
    for (const child of node.children.values()) visit(child, depth + 1);
    if (outermost) callers.delete(node.name);
  };
  visit(tree, 0);
  return [...functions.values()];
}
