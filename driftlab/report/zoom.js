// Zoom along the steps, in all figures at once; the heights follow. Part of the script of page.js.

// The drawn elements of a figure moved and widened to the steps that are seen and to the values there; labels of
// its axes made anew.
function zoomable(figure, svg, { at, place, box, scale }) {
  const [left, right, top, bottom] = box;
  const width = right - left, height = bottom - top;
  let from = left, to = right, high = top, low = bottom; // what is seen, in units of the whole drawing
  const wide = () => width / (to - from), tall = () => height / (low - high);
  const x = (p) => left + (p - from) * wide(), y = (p) => top + (p - high) * tall();
  const view = { place: x, shows: (p) => p >= left - 0.5 && p <= right + 0.5 };
  const whole = () => from <= left && to >= right;

  const clip = element(svg, "clipPath", { id: `${figure.id}-zoomed` });
  element(svg, "rect", { x: left, y: top - 1, width, height: height + 2 }, clip);
  const ticks = element(svg, "g", { class: "ticks" });
  const originals = svg.querySelectorAll('[id*="-xtick_"], [id*="-ytick_"]');
  const marks = [...svg.querySelectorAll('[data-part="end"] use')].map((use) => [use, ...["x", "y"].map((k) => Number(use.getAttribute(k)))]);
  const levels = [...svg.querySelectorAll('[id$="-level-line"]')].map((line) => {
    return [points(line)[0][0][1], line, svg.getElementById(line.id.replace(/line$/, "text"))];
  });
  const parts = [...svg.querySelectorAll('[data-arm]:not([data-part="end"])')].map((part) => moving(svg, part, clip.id));

  const draw = () => {
    fit();
    for (const { inner, upright } of parts) {
      const vertical = upright ? "0) scale(" + wide() + " 1)" : `${top - high * tall()}) scale(${wide()} ${tall()})`;
      if (whole()) inner.removeAttribute("transform");
      else inner.setAttribute("transform", `translate(${left - from * wide()} ${vertical}`);
    }
    for (const [use, px, py] of marks) {
      use.setAttribute("x", x(px));
      use.setAttribute("y", y(py));
      use.style.display = view.shows(x(px)) ? "" : "none";
    }
    for (const [level, ...drawn] of levels) {
      for (const each of drawn) {
        each.setAttribute("transform", `translate(0 ${y(level) - level})`);
        each.style.display = y(level) >= top - 0.5 && y(level) <= bottom + 0.5 ? "" : "none";
      }
    }
    for (const tick of originals) tick.style.display = whole() ? "" : "none";
    ticks.replaceChildren();
    if (!whole()) label();
    figure.toggleAttribute("data-zoomed", !whole());
    view.changed?.();
  };
  // The values that are to be seen between the two ends fill the height.
  const fit = () => {
    [high, low] = [top, bottom];
    if (whole()) return;
    let least = Infinity, greatest = -Infinity;
    for (const { part, upright, lines } of parts) {
      if (upright || getComputedStyle(part).display === "none") continue;
      for (const height of lines.flatMap((line) => between(line, from, to))) {
        least = Math.min(least, height);
        greatest = Math.max(greatest, height);
      }
    }
    if (least > greatest) return;
    const room = Math.max(0.06 * (greatest - least), height / 200);
    [high, low] = [Math.max(top, least - room), Math.min(bottom, greatest + room)];
  };
  const label = () => {
    let taken = -Infinity;
    at.forEach((step, i) => {
      const p = x(place[i]);
      if (!view.shows(p) || p - taken < 58) return;
      taken = p;
      element(svg, "line", { x1: p, x2: p, y1: bottom, y2: bottom + 3.5 }, ticks);
      element(svg, "text", { x: p, y: bottom + 15 }, ticks).textContent = step.toLocaleString("en");
    });
    for (const [text, p] of heights(scale, high, low)) {
      element(svg, "line", { x1: left, x2: right, y1: y(p), y2: y(p), class: "grid" }, ticks);
      element(svg, "line", { x1: left - 3.5, x2: left, y1: y(p), y2: y(p) }, ticks);
      element(svg, "text", { x: left - 6, y: y(p) + 3.5, class: "height" }, ticks).textContent = text;
    }
  };
  view.show = (first, last) => {
    [from, to] = [along(at, place, first), along(at, place, last)];
    if (first === -Infinity || to - from < width / 1000) [from, to] = [left, right]; // all, or none of it is drawn here
    draw();
  };
  // All figures go where this one is sent.
  const look = (start, end) => {
    const span = Math.min(width, Math.max(end - start, width / 200));
    const first = Math.min(Math.max(left, start), right - span);
    const all = span >= width;
    const steps = all ? [-Infinity, Infinity] : [along(place, at, first), along(place, at, first + span)];
    for (const other of views) other.show(...steps);
  };
  view.reveal = (p) => { if (!view.shows(x(p))) look(p - (to - from) / 2, p + (to - from) / 2); };
  views.push(view);

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
  for (const chosen of [figure, pick]) chosen?.addEventListener("change", draw);
  draggable(svg, box, (a, b) => look(from + ((a - left) / width) * span(), from + ((b - left) / width) * span()));
  return view;
}

// What is drawn of an arm, in a group that can be moved inside one that stands still and clips.
function moving(svg, part, clip) {
  const upright = part.dataset.part === "flip";
  const inner = document.createElementNS(svg.namespaceURI, "g");
  for (const clipped of part.querySelectorAll("[clip-path]")) clipped.removeAttribute("clip-path");
  inner.append(...part.childNodes);
  part.append(inner);
  part.setAttribute("clip-path", `url(#${clip})`);
  return { part, inner, upright, lines: points(part) };
}

// The lines of a group: lists of points. A band is drawn once, and put in its place by a <use>.
function points(group) {
  const offset = Number(group.querySelector("use")?.getAttribute("y") ?? 0);
  return [...group.querySelectorAll("path")].flatMap((path) =>
    path.getAttribute("d").split("M").slice(1).map((line) => {
      const numbers = (line.match(/-?[\d.]+/g) ?? []).map(Number);
      return Array.from({ length: numbers.length >> 1 }, (_, i) => [numbers[2 * i], numbers[2 * i + 1] + offset]);
    }));
}

// The heights of a line from one place to another: of its points there, and where it enters and leaves.
function between(line, from, to) {
  const found = line.filter(([p]) => p >= from && p <= to).map(([, h]) => h);
  for (let i = 1; i < line.length; i++) {
    const [[a, ha], [b, hb]] = [line[i - 1], line[i]];
    for (const end of [from, to]) if ((a - end) * (b - end) < 0) found.push(ha + ((end - a) / (b - a)) * (hb - ha));
  }
  return found;
}

// Where ``value`` of one ascending list lies in the other, on the straight line between its neighbours.
function along(list, other, value) {
  if (value <= list[0]) return other[0];
  const i = list.findIndex((v) => v >= value);
  if (i < 0) return other[other.length - 1];
  return other[i - 1] + ((value - list[i - 1]) / (list[i] - list[i - 1])) * (other[i] - other[i - 1]);
}

// Labels for the heights from ``high`` down to ``low``: powers of ten, or even steps where there are too few.
function heights({ anchors, zero }, high, low) {
  // from one anchor to the next the axis is linear, or logarithmic where it begins above 0
  const stretches = anchors.slice(1).map((end, i) => {
    const [begin, bend] = [anchors[i], anchors[i][0] > 0 ? Math.log10 : (v) => v];
    return { begin, end, bend, back: anchors[i][0] > 0 ? (v) => 10 ** v : (v) => v };
  });
  const height = (value) => {
    const { begin, end, bend } = stretches.find((s) => value <= s.end[0]) ?? stretches[stretches.length - 1];
    return begin[1] + ((bend(value) - bend(begin[0])) / (bend(end[0]) - bend(begin[0]))) * (end[1] - begin[1]);
  };
  const value = (p) => {
    const { begin, end, bend, back } = stretches.find((s) => p >= s.end[1]) ?? stretches[stretches.length - 1];
    return back(bend(begin[0]) + ((p - begin[1]) / (end[1] - begin[1])) * (bend(end[0]) - bend(begin[0])));
  };
  const least = value(low), greatest = value(high);
  const rising = stretches.find((s) => s.begin[0] > 0)?.begin[0] ?? Infinity;
  const found = [];
  if (greatest > 30 * Math.max(least, rising)) {
    if (least <= 0) found.push(0);
    const [first, last] = [Math.max(least, rising), greatest].map((v) => Math.log10(v));
    const every = Math.ceil((last - first) / 7);
    for (let n = Math.ceil(first - 1e-9); n <= last; n++) if (n % every === 0) found.push(10 ** n);
  } else {
    const rough = (greatest - least) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((n) => n * power >= rough);
    for (let n = Math.ceil(least / step); n * step <= greatest; n++) found.push(n * step);
  }
  if (zero !== null && least <= zero * 1.01) found.unshift(zero);
  return found.map((v) => [v === zero ? "0" : written(v), height(v)]);
}

// In few letters: 0.25, 10⁻⁹, 1.5e5.
function written(value) {
  const exact = Number(value.toPrecision(6));
  if (exact === 0 || (Math.abs(exact) >= 1e-2 && Math.abs(exact) < 1e4)) return String(exact);
  const [digits, power] = exact.toExponential().split("e").map(Number);
  return digits === 1 ? "10" + [...String(power)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("") : `${digits}e${power}`;
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
