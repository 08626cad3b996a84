// The list of live broadcasts on the page, in alphabetical order.

import { type Connection, Path } from "@moq/net";

import { byId, h } from "../src/dom";

export class Broadcasts {
  readonly #items = new Map<string, HTMLLIElement>();
  #marked = "";

  constructor(
    readonly connection: Connection.Reload,
    readonly choose: (name: string) => void,
  ) {
    connection.status.watch(() => this.#show());
  }

  /** Lists the broadcasts that the relay announces, also after reconnecting. Calls `added` for each new one. */
  async follow(added: (name: string) => void) {
    const announced = this.connection.announced(Path.empty());
    for (let event = await announced.next(); event; event = await announced.next()) {
      if (!event.active) this.#remove(event.path);
      else {
        this.#add(event.path);
        added(event.path);
      }
    }
  }

  mark(name: string) {
    this.#marked = name;
    this.#show();
  }

  #add(name: string) {
    if (this.#items.has(name)) return;
    const item = h("li", {}, h("button", { type: "button", onclick: () => this.choose(name) }, name));
    this.#items.set(name, item);
    const after = [...this.#items.keys()].sort().find((other) => other > name);
    byId("broadcasts").insertBefore(item, (after !== undefined && this.#items.get(after)) || null);
    this.#show();
  }

  #remove(name: string) {
    this.#items.get(name)?.remove();
    this.#items.delete(name);
    this.#show();
  }

  #show() {
    byId("none").hidden = this.#items.size > 0 || this.connection.status.peek() !== "connected";
    for (const [name, item] of this.#items) {
      item.firstElementChild?.setAttribute("aria-current", String(name === this.#marked));
    }
  }
}
