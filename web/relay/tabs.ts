// Tabs that screen readers and keyboards can use (the WAI-ARIA pattern "tabs with automatic activation").

import { byId, h } from "../src/dom";

/** The list of tabs. The page contains the panel of each tab as the element `panel-NAME`. */
export class Tabs<Name extends string> {
  readonly #tabs: Map<Name, HTMLButtonElement>;

  /** `chosen` is called after a mouse click or key press. */
  constructor(
    place: HTMLElement,
    titles: Record<Name, string>,
    readonly chosen: (name: Name) => void,
  ) {
    const tab = (name: Name) => {
      const attributes = { id: `tab-${name}`, type: "button", role: "tab", "aria-controls": `panel-${name}` };
      return h("button", { ...attributes, onclick: () => chosen(name) }, titles[name]);
    };
    const names = Object.keys(titles) as Name[];
    this.#tabs = new Map(names.map((name) => [name, tab(name)]));
    place.append(...this.#tabs.values());
    place.addEventListener("keydown", (event) => this.#key(event));
  }

  show(name: Name) {
    for (const [each, tab] of this.#tabs) {
      const isShown = each === name;
      tab.setAttribute("aria-selected", String(isShown));
      // Only the shown tab is reachable with the Tab key. The arrow keys move on from there, as WAI-ARIA asks.
      tab.tabIndex = isShown ? 0 : -1;
      byId(`panel-${each}`).hidden = !isShown;
    }
  }

  #key(event: KeyboardEvent) {
    const names = [...this.#tabs.keys()];
    const at = names.findIndex((name) => this.#tabs.get(name) === event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (at < 0 || to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const name = names[(to + names.length) % names.length] as Name;
    this.chosen(name);
    this.#tabs.get(name)?.focus();
  }
}
