// Values under the pointer or the arrow keys, seeds one by one, zoom along the steps in all figures. The page says all it has to say
// without this.
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
const views = []; // of all figures along the steps: they zoom together
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

for (const tools of document.querySelectorAll("[data-script]")) tools.hidden = false;
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
