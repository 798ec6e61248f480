// Values under the pointer or the arrow keys, seeds one by one, zoom along the steps. The page says all it has to say
// without this.
for (const figure of document.querySelectorAll("[data-drawing]")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector(":scope > svg");
  const view = figure.querySelector(".zoom") ? zoomable(figure, svg, data) : { place: (p) => p, shows: () => true };
  readable(figure, svg, data, view);
}

function element(svg, name, attributes, parent = svg) {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

// Where an event lies, in units of the drawing.
function inside(svg, event, along) {
  const box = svg.getBoundingClientRect();
  const { width, height } = svg.viewBox.baseVal;
  return along === "x" ? ((event.clientX - box.left) / box.width) * width : ((event.clientY - box.top) / box.height) * height;
}

function readable(figure, svg, { axis, at, place, box, arms }, view) {
  const along = axis === "step" ? "x" : "y";
  const across = along === "x" ? "y" : "x";
  const ends = along === "x" ? box.slice(2) : box;
  const cursor = element(svg, "line", { class: "cursor", [across + 1]: ends[0], [across + 2]: ends[1] });
  const readout = figure.querySelector(".readout");
  let current = null;

  const say = (text) => {
    const part = document.createElement("span");
    part.textContent = text;
    readout.append(part, " ");
  };
  const value = (arm) => {
    const seed = document.querySelector("#pick")?.value;
    const own = arms[arm];
    if (seed && own.seeds) return own.seeds[seed]?.[current] ?? "—";
    const middle = own.median[current] ?? "—";
    return own.low && middle !== "—" ? `${middle} (${own.low[current] ?? "—"} to ${own.high[current] ?? "—"})` : middle;
  };
  const show = () => {
    const here = current === null ? null : view.place(place[current]);
    cursor.style.visibility = here !== null && view.shows(here) ? "visible" : "hidden";
    readout.textContent = "";
    if (current === null) return;
    cursor.setAttribute(along + 1, here);
    cursor.setAttribute(along + 2, here);
    say(`${axis} ${at[current]}`);
    for (const box of figure.querySelectorAll(".legend input:checked")) say(`${box.value} ${value(box.value)}`);
  };
  const nearest = (position) => {
    let best = 0;
    place.forEach((p, i) => { if (Math.abs(view.place(p) - position) < Math.abs(view.place(place[best]) - position)) best = i; });
    return best;
  };
  svg.addEventListener("pointermove", (event) => { current = nearest(inside(svg, event, along)); show(); });
  svg.addEventListener("pointerleave", () => { current = null; show(); });
  svg.addEventListener("blur", () => { current = null; show(); });
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => {
    const last = at.length - 1;
    const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -at.length, End: at.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    current = Math.max(0, Math.min(last, (current ?? (moves[event.key] > 0 ? -1 : at.length)) + moves[event.key]));
    view.reveal?.(place[current]);
    show();
  });
  figure.addEventListener("change", show);
  document.querySelector("#pick")?.addEventListener("change", show);
  view.changed = show;
}

// The drawn elements of a figure moved and widened along its steps; labels of its axis made anew.
function zoomable(figure, svg, { at, place, box }) {
  const [left, right, top, bottom] = box;
  const width = right - left;
  let from = left, to = right; // what is seen, in units of the whole drawing
  const scale = () => width / (to - from);
  const view = { place: (p) => left + (p - from) * scale(), shows: (p) => p >= left - 0.5 && p <= right + 0.5 };

  const clip = element(svg, "clipPath", { id: `${figure.id}-zoomed` });
  element(svg, "rect", { x: left, y: top - 1, width, height: bottom - top + 2 }, clip);
  const ticks = element(svg, "g", { class: "ticks" });
  const originals = svg.querySelectorAll('[id*="-xtick_"]');
  const paths = svg.querySelectorAll("[data-arm] > path");
  const marks = [...svg.querySelectorAll("[data-arm] use")].map((use) => [use, Number(use.getAttribute("x"))]);
  // a clip moves with what it clips: it has to sit on what stands still
  for (const path of paths) {
    path.parentNode.setAttribute("clip-path", `url(#${clip.id})`);
    path.removeAttribute("clip-path");
  }

  const draw = () => {
    const whole = from <= left && to >= right;
    for (const path of paths) {
      if (whole) path.removeAttribute("transform");
      else path.setAttribute("transform", `translate(${left - from * scale()} 0) scale(${scale()} 1)`);
    }
    for (const [use, x] of marks) {
      use.setAttribute("x", view.place(x));
      use.style.display = view.shows(view.place(x)) ? "" : "none";
    }
    for (const tick of originals) tick.style.display = whole ? "" : "none";
    ticks.replaceChildren();
    if (!whole) label();
    figure.toggleAttribute("data-zoomed", !whole);
    view.changed?.();
  };
  const label = () => {
    const seen = at.map((step, i) => [step, view.place(place[i])]).filter(([, p]) => view.shows(p));
    let taken = -Infinity;
    for (const [step, p] of seen) {
      if (p - taken < 58) continue;
      taken = p;
      element(svg, "line", { x1: p, x2: p, y1: bottom, y2: bottom + 3.5 }, ticks);
      element(svg, "text", { x: p, y: bottom + 15 }, ticks).textContent = step.toLocaleString("en");
    }
  };
  const look = (start, end) => {
    const span = Math.min(width, Math.max(end - start, width / 200));
    from = Math.min(Math.max(left, start), right - span);
    to = from + span;
    draw();
  };
  view.reveal = (p) => { if (!view.shows(view.place(p))) look(p - (to - from) / 2, p + (to - from) / 2); };

  const span = () => to - from;
  const moves = {
    in: () => look(from + span() / 4, to - span() / 4),
    out: () => look(from - span() / 2, to + span() / 2),
    left: () => look(from - span() / 2, to - span() / 2),
    right: () => look(from + span() / 2, to + span() / 2),
    all: () => look(left, right),
  };
  const tools = figure.querySelector(".zoom");
  for (const button of tools.children) button.addEventListener("click", moves[button.dataset.zoom]);
  svg.addEventListener("keydown", (event) => {
    const asked = { "+": "in", "=": "in", "-": "out", 0: "all", Escape: "all" }[event.key];
    if (asked) { event.preventDefault(); moves[asked](); }
  });
  svg.addEventListener("dblclick", moves.all);
  draggable(svg, box, (a, b) => look(from + ((a - left) / width) * span(), from + ((b - left) / width) * span()));
  return view;
}

// With a mouse or a pen; a finger scrolls the page, and reads.
function draggable(svg, [left, right, top, bottom], chosen) {
  const band = element(svg, "rect", { class: "band", y: top, height: bottom - top });
  let start = null;
  const at = (event) => Math.min(right, Math.max(left, inside(svg, event, "x")));
  const mark = (a, b) => { band.setAttribute("x", Math.min(a, b)); band.setAttribute("width", Math.abs(a - b)); };
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button) return;
    start = at(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => { if (start !== null) mark(start, at(event)); });
  svg.addEventListener("pointerup", (event) => {
    if (start !== null && Math.abs(at(event) - start) > 4) chosen(Math.min(start, at(event)), Math.max(start, at(event)));
    start = null;
    mark(0, 0);
  });
}

const pick = document.querySelector("#pick");
if (pick) {
  pick.addEventListener("change", () => {
    const seed = pick.value;
    document.querySelector("#figures").toggleAttribute("data-picked", seed !== "");
    for (const part of document.querySelectorAll('[data-part^="seed="]')) {
      part.classList.toggle("picked", part.dataset.part === `seed=${seed}`);
    }
  });
}
for (const tools of document.querySelectorAll("[data-script]")) tools.hidden = false;
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
