// Zoom and search in a flame graph. `millrace cost --flame` embeds this script in the SVG file.
(() => {
  "use strict";
  const svg = document.currentScript.closest("svg");
  const WIDTH = svg.viewBox.baseVal.width;
  /* Width of a character, and of the narrowest frame that is drawn, in units of the viewBox. */
  const [CHARACTER, NARROWEST] = [6.65, 0.1];
  const detail = svg.getElementById("detail");
  const hint = "Click or Enter zooms in, Escape out; arrow keys go from frame to frame; / searches.";
  const parents = [];
  // Callers precede their callees in the file, so the last frame one level up is a frame's caller.
  const frames = Array.from(svg.querySelectorAll("#frames > g"), (element) => {
    const [start, ns, depth] = element.dataset.at.split(" ").map(Number);
    const title = element.querySelector("title").textContent;
    const frame = { element, start, end: start + ns, ns, depth, title, parent: parents[depth - 1], width: 0 };
    frame.name = title.slice(0, title.lastIndexOf(": "));
    parents[depth] = frame;
    return frame;
  });
  const root = frames[0];
  let zoomed = root;
  let focused = root;

  const html = (tag, properties) => Object.assign(document.createElementNS("http://www.w3.org/1999/xhtml", tag), properties);
  const search = html("input", { type: "search", placeholder: "Search functions (/)", title: "A regular expression" });
  search.setAttribute("aria-label", "Search functions, a regular expression");
  const found = html("output", { id: "found" });
  const reset = html("button", { type: "button", textContent: "Reset", id: "reset" });
  const bar = html("div", { id: "bar" });
  bar.append(found, search, reset);
  const place = document.createElementNS(svg.namespaceURI, "foreignObject");
  for (const [name, value] of Object.entries({ x: WIDTH / 2, y: 4, width: WIDTH / 2 - 6, height: 28 })) place.setAttribute(name, value);
  place.append(bar);
  svg.append(place);
  Object.assign(svg.style, { width: "100%", height: "auto" });

  const holds = (outer, inner) => outer.start <= inner.start && inner.end <= outer.end;

  function zoom(to) {
    zoomed = to;
    for (const frame of frames) {
      const above = frame.depth <= to.depth && holds(frame, to);
      const below = frame.depth > to.depth && holds(to, frame);
      const scale = WIDTH / Math.max(1, to.ns);
      frame.width = above ? WIDTH : below ? frame.ns * scale : 0;
      frame.element.style.display = frame.width < NARROWEST ? "none" : "";
      frame.element.classList.toggle("caller", above && frame !== to);
      if (frame.width >= NARROWEST) draw(frame, above ? 0 : (frame.start - to.start) * scale);
    }
    enable();
  }

  function draw({ element, name, width }, x) {
    const rect = element.querySelector("rect");
    rect.setAttribute("x", x);
    rect.setAttribute("width", width);
    const room = Math.floor((width - 4) / CHARACTER);
    const letters = Array.from(name);
    let text = element.querySelector("text");
    if (!text && room >= 3) {
      text = element.appendChild(document.createElementNS(svg.namespaceURI, "text"));
      text.setAttribute("y", Number(rect.getAttribute("y")) + rect.height.baseVal.value / 2);
    }
    if (!text) return;
    text.setAttribute("x", x + 2);
    text.textContent = room < 3 ? "" : letters.length > room ? `${letters.slice(0, room - 1).join("")}…` : name;
  }

  /** Highlights frames that match the search. The time of a match inside another match counts once. */
  function find() {
    let pattern = null;
    search.setCustomValidity("");
    try {
      pattern = search.value ? new RegExp(search.value, "i") : null;
    } catch {
      search.setCustomValidity("not a regular expression");
    }
    let [ns, end] = [0, 0];
    for (const frame of frames) {
      const matches = pattern !== null && frame !== root && pattern.test(frame.name);
      frame.element.classList.toggle("match", matches);
      if (matches && frame.start >= end) [ns, end] = [ns + frame.ns, frame.end];
    }
    svg.classList.toggle("searched", pattern !== null);
    const share = `${((ns * 100) / Math.max(1, root.ns)).toFixed(2)} %`;
    found.textContent = search.validity.valid ? (pattern ? `matches: ${share} of the graph` : "") : search.validationMessage;
    enable();
  }

  function enable() {
    reset.disabled = zoomed === root && search.value === "";
  }

  function focus(frame) {
    focused.element.setAttribute("tabindex", -1);
    focused = frame;
    frame.element.setAttribute("tabindex", 0);
    frame.element.focus();
  }

  const byElement = new Map(frames.map((frame) => [frame.element, frame]));
  const at = (event) => byElement.get(event.target.closest("#frames > g"));
  const say = (frame) => (detail.textContent = frame ? frame.title : hint);
  const drawn = (frame) => frame && frame.width >= NARROWEST;

  function neighbour(frame, key) {
    const siblings = frames.filter((of) => of.parent === frame.parent && of.depth === frame.depth && drawn(of));
    const place = siblings.indexOf(frame);
    if (key === "ArrowUp") return frame.parent;
    if (key === "ArrowDown") return frames.find((of) => of.parent === frame && drawn(of));
    if (key === "ArrowLeft") return siblings[place - 1];
    if (key === "ArrowRight") return siblings[place + 1];
    return undefined;
  }

  for (const { element } of frames) {
    element.setAttribute("role", "button");
    element.setAttribute("tabindex", element === root.element ? 0 : -1);
  }
  const graph = svg.getElementById("frames");
  graph.addEventListener("click", (event) => {
    const frame = at(event);
    if (!frame) return;
    zoom(frame);
    focus(frame);
  });
  graph.addEventListener("mouseover", (event) => say(at(event)));
  graph.addEventListener("mouseleave", () => say(null));
  graph.addEventListener("focusin", (event) => say(at(event)));
  graph.addEventListener("focusout", () => say(null));
  graph.addEventListener("keydown", (event) => {
    const frame = at(event);
    const next = frame && neighbour(frame, event.key);
    if (next) focus(next);
    else if (frame && (event.key === "Enter" || event.key === " ")) zoom(frame);
    else if (event.key === "Escape") {
      zoom(zoomed.parent ?? root);
      focus(drawn(focused) ? focused : zoomed);
    } else return;
    event.preventDefault();
  });
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    search.value = "";
    find();
    focus(focused);
  });
  reset.addEventListener("click", () => {
    search.value = "";
    find();
    zoom(root);
    focus(root);
  });
  window.addEventListener("keydown", (event) => {
    const asked = event.key === "/" || (event.key === "f" && (event.ctrlKey || event.metaKey));
    if (!asked || event.target === search) return;
    search.focus();
    event.preventDefault();
  });
  detail.textContent = hint;
  zoom(root);
})();
