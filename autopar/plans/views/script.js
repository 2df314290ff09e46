"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const axisNumber = Object.fromEntries(data.axes.map((axis, i) => [axis.name, i % 6]));
let filter = null;

// -- words and elements

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function drawn(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function seconds(value) {
  if (value >= 1) return value.toFixed(2) + " s";
  if (value >= 1e-3) return (value * 1e3).toFixed(value >= 0.1 ? 0 : 2) + " ms";
  return (value * 1e6).toFixed(0) + " µs";
}

function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return (value / size).toFixed(value >= 100 * size ? 0 : 1) + " " + unit;
  return value.toFixed(0) + " B";
}

function share(value) {
  const percent = value * 100;
  if (percent > 0 && percent < 0.001) return "< 0.001 %";
  return (percent === 0 ? "0" : percent.toFixed(percent >= 10 ? 1 : percent >= 0.1 ? 2 : 4)) + " %";
}

const words = (text) => text.replaceAll("_", "-");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function tipped(element, text) {
  element.addEventListener("pointermove", (event) => tip(event, text));
  element.addEventListener("pointerleave", () => tip(null));
  return element;
}

function tip(event, text) {
  const box = at("tip");
  box.style.display = event ? "block" : "none";
  if (!event) return;
  box.textContent = text;
  const right = event.clientX + 14 + box.offsetWidth > innerWidth;
  box.style.left = Math.max(4, right ? event.clientX - box.offsetWidth - 10 : event.clientX + 14) + "px";
  box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 4) + "px";
}

function axes(names) {
  return names.flatMap((name, i) => [i ? "*" : "", make("span", { class: "axis-" + axisNumber[name] }, name)]);
}

function table(id, head, rows) {
  const numeric = (i) => (head[i].startsWith("#") ? "number" : null);
  at(id).append(
    make("thead", {}, make("tr", {}, head.map((text, i) => make("th", { class: numeric(i) }, text.replace("#", ""))))),
    make("tbody", {}, rows.map(({ cells, over }) => {
      const row = make("tr", {}, cells.map((cell, i) => make("td", { class: numeric(i) }, cell)));
      if (over) row.dataset.axes = over.join(" ");
      return row;
    })),
  );
}

// -- the head

function likely(range) {
  return `range that held ${share(range.share)} of ${range.runs} measured runs (${range.like})${range.extrapolated.length ? ", extrapolated" : ""}`;
}

function head() {
  const devices = data.axes.reduce((product, axis) => product * axis.size, 1);
  const mesh = data.axes.flatMap((axis, i) => [i ? ", " : "", axes([axis.name]), "=" + axis.size]).flat();
  at("where").append(`${devices} devices of ${data.cluster}, mesh `, ...mesh);
  if (data.precision) at("where").append(`; ${data.precision}`);
  const { costs, memory } = data;
  const gap = data.gap === null ? [] : [[share(data.gap), (data.within_layout ? "at most from the best plan within the layout" : "at most from the best plan") + (data.claimed ? ", as its file claims" : "")]];
  const range = data.range === null ? [] : [[`${seconds(data.range.low_seconds)} to ${seconds(data.range.high_seconds)}`, likely(data.range)]];
  const facts = [
    [seconds(costs.step_seconds), "predicted step time"],
    ...range,
    [share(costs.mfu), "of the devices' peak"],
    [bytes(memory.peak_bytes), `of ${bytes(memory.limit_bytes)} per device${memory.peak_bytes > memory.limit_bytes ? ": does not fit" : ""}`],
    ...gap,
  ];
  at("facts").append(...facts.map(([number, what]) => make("div", { class: "fact" }, make("b", {}, number), make("span", {}, what))));
  at("notes").append(...data.notes.map((text) => make("li", {}, text)));
  for (const name of [null, ...data.axes.map((axis) => axis.name)]) {
    const button = make("button", { "aria-pressed": String(name === filter), class: name ? "axis-" + axisNumber[name] : null }, name || "all axes");
    button.addEventListener("click", () => show(name));
    button.dataset.axis = name || "";
    at("filter").append(button);
  }
}

function show(axis) {
  filter = axis;
  for (const button of at("filter").children) button.setAttribute("aria-pressed", String(button.dataset.axis === (axis || "")));
  for (const element of document.querySelectorAll("[data-axes]"))
    element.classList.toggle("faded", axis !== null && !element.dataset.axes.split(" ").includes(axis));
  timeline.draw();
}

function dims() {
  const rows = data.dims.map((dim) => {
    const places = Object.entries(dim.over).sort((a, b) => b[1] - a[1]);
    const over = places.filter(([names]) => names !== "none").flatMap(([names]) => names.split("*"));
    const cells = places.flatMap(([names, count], i) => [
      i ? ", " : "", names === "none" ? "whole" : axes(names.split("*")), ` (${count})`,
    ]).flat();
    return { cells: [dim.name, dim.sizes.map((size) => size.toLocaleString("en")).join(", "), make("span", {}, cells)], over };
  });
  table("dims", ["dim", "size", "split over (number of tensors)"], rows);
}

// -- time

function parts() {
  const tones = ["--compute", "--computed-back", null, "--axis-5", "--axis-1", "--accent", "--axis-3", "--axis-4", "--held-3"];
  const shown = Object.entries(data.costs.parts).map(([name, value], i) => [name, value, tones[i]]).filter(([, value, tone]) => value > 0 && tone);
  const again = data.costs.parts["recompute"];
  at("parts").append(
    make("div", { class: "bar" }, shown.map(([name, value, tone]) =>
      tipped(make("span", { style: `width:${(100 * value) / data.costs.step_seconds}%;background:var(${tone})` }), `${name}: ${seconds(value)}`))),
    make("div", { class: "legend" }, shown.map(([name, value, tone]) =>
      make("span", {}, make("i", { style: `background:var(${tone})` }), `${name} ${seconds(value)}`)),
      again > 0 ? make("span", {}, `recompute, as part of the backward: ${seconds(again)}`) : null),
  );
  const rows = data.costs.communication.map((one) => ({
    cells: [make("span", { class: "whole" }, words(one.kind)), make("span", {}, axes(one.axes)), one.direction, one.of, one.count.toLocaleString("en"), bytes(one.bytes), seconds(one.seconds)],
    over: one.axes,
  }));
  if (rows.length) table("communication", ["collective", "over", "direction", "of", "#count", "#bytes", "#time"], rows);
  else at("communication").replaceWith("No communication.");
  const waiting = data.costs.parts["waiting for the host"];
  const drawnSeconds = data.timeline.seconds, off = data.costs.step_seconds - waiting;
  const host = waiting > 0 ? `The timeline shows the work of the device; it also waits ${seconds(waiting)} for its host to start kernels. ` : "";
  const differs = Math.abs(drawnSeconds - off) > 0.02 * off ? `This is one possible order, of ${seconds(drawnSeconds)}; the predicted time, ${seconds(off)}, takes the overlap of compute and communication from a formula. ` : "";
  const stages = data.timeline.streams[0].startsWith("stage") ? "Each row is a stage of the pipeline; its tasks include the waits for the host. " : "";
  at("host").textContent = stages || host + differs;
}

function stages() {
  const { head, rows: [names, ...rows] } = data.stages;
  if (!rows.length) return at("stages-section").remove();
  at("schedule").textContent = head;
  table("stages", names.map((name, i) => (i < 2 ? name : "#" + name)), rows.map((cells) => ({ cells })));
}

function beside() {
  const { rows: [names, ...rows], differing } = data.beside;
  if (!rows.length) return at("beside-section").remove();
  table("beside", names.map((name, i) => (i ? "#" + name : name)), rows.map((cells) => ({ cells: cells.map((cell) => cell.trim()) })));
  for (const { name, rows, rest } of differing) {
    const kinds = `${rows.length} kinds of tensors are sharded otherwise under ${name}`;
    at("differing").append(make("h3", {}, rows.length ? kinds : `The shardings under ${name} are the same${rest}`));
    if (!rows.length) continue;
    const id = "differing-" + name;
    at("differing").append(make("div", { class: "wide" }, make("table", { id })));
    table(id, ["tensor", "this plan", name], rows.map(([tensor, ...both]) => ({ cells: [make("code", {}, tensor), ...both] })));
  }
}

function rivals() {
  if (!data.rivals.length) return at("rivals-section").remove();
  const all = [{ name: "this plan", step_seconds: data.costs.step_seconds, memory_bytes: data.memory.peak_bytes, fits: data.memory.peak_bytes <= data.memory.limit_bytes, ours: true }, ...data.rivals];
  const most = Math.max(...all.map((one) => one.step_seconds));
  at("rivals").append(...all.sort((a, b) => a.step_seconds - b.step_seconds).map((one) =>
    make("div", { class: "rival" + (one.ours ? " ours" : "") + (one.fits ? "" : " too-large") },
      make("span", {}, one.name),
      make("div", {}, make("span", { style: `width:${(100 * one.step_seconds) / most}%` })),
      make("span", {}, `${seconds(one.step_seconds)}, ${bytes(one.memory_bytes)}${one.fits ? "" : ": does not fit"}${one.within_noise ? ", within the noise" : ""}`))));
}

// -- memory

// Round numbers of one unit, from 0 to the most.
function ticks(most) {
  const [size, unit] = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]].find(([size]) => most >= size) || [1, "B"];
  const least = most / size / 5, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least * 0.999);
  const count = Math.floor(most / size / step);
  return Array.from({ length: count + 1 }, (_, i) => [i * step * size, i ? `${+(i * step).toFixed(3)} ${unit}` : "0"]);
}

function memory() {
  const { kinds, moments, limit_bytes: limit, peak_bytes: peak, peak_at: where } = data.memory;
  const width = Math.max(at("memory").clientWidth, 240), height = 220, left = 62, top = 12;
  const most = Math.max(limit < 2.5 * peak ? limit : 0, peak) * 1.06;
  const x = (i) => left + ((width - left - 8) * i) / Math.max(1, moments.length - 1);
  const y = (value) => top + (height - top - 18) * (1 - value / most);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "memory over the step, by kind" });
  for (const [value, text] of ticks(most)) {
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), stroke: "var(--line)" }));
    svg.append(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  // From below: bytes of the whole step, gradients, then the rest at that moment.
  const always = ["parameters", "copies of parameters", "optimizer", "inputs"].filter((kind) => kinds[kind] > 0);
  const held = moments.map(([, all, gradients]) => {
    const parts = [...always.map((kind) => [kind, kinds[kind]]), ["gradients", gradients]];
    const rest = all - parts.reduce((sum, [, value]) => sum + value, 0);
    return [...parts, ["saved for the backward, and temporary", Math.max(0, rest)]];
  });
  let below = moments.map(() => 0);
  for (let k = 0; moments.length && k < held[0].length; k++) {
    const above = held.map((parts, i) => below[i] + parts[k][1]);
    const there = above.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
    const back = below.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).reverse();
    svg.append(drawn("polygon", { class: "held", points: [...there, ...back].join(" "), fill: `var(--held-${kindNumber[held[0][k][0]]})` }));
    below = above;
  }
  if (limit <= most) {
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: y(limit), y2: y(limit), stroke: "var(--axis-1)", "stroke-dasharray": "6 4" }));
    svg.append(drawn("text", { x: width - 12, y: y(limit) - 4, "text-anchor": "end" }, "limit " + bytes(limit)));
  }
  const turn = moments.findIndex(([name]) => name.startsWith("the backward"));
  if (turn > 0) {
    svg.append(drawn("line", { x1: x(turn), x2: x(turn), y1: top, y2: y(0), stroke: "var(--soft)", "stroke-dasharray": "2 3" }));
    svg.append(drawn("text", { x: x(turn) + 4, y: height - 4 }, "backward"));
    svg.append(drawn("text", { x: left, y: height - 4 }, "forward"));
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const i = Math.round((((event.clientX - box.left) / box.width) * width - left) / (width - left - 8) * (moments.length - 1));
    if (!moments[i]) return tip(null);
    const parts = held[i].filter(([, value]) => value > 0).map(([kind, value]) => `${kind} ${bytes(value)}`);
    tip(event, `${moments[i][0]}: ${bytes(moments[i][1])}: ${parts.join(", ")}`);
  });
  svg.addEventListener("pointerleave", () => tip(null));
  const listed = Object.entries(kinds).filter(([, value]) => value > 0);
  at("memory").append(
    make("p", { class: "note" }, `The peak is ${bytes(peak)}, at ${where}. The legend shows saved tensors at the end of the forward and gradients at the end of the backward; point at the picture to see one moment.`), svg,
    make("div", { class: "legend" }, listed.map(([name, value]) =>
      make("span", {}, make("i", { style: `background:var(--held-${kindNumber[name]})` }), `${name} ${bytes(value)}`))),
  );
}

const kindNumber = { "parameters": 0, "copies of parameters": 1, "optimizer": 2, "inputs": 3, "gradients": 4, "saved for the backward": 5, "saved for the backward, and temporary": 5 };

// -- the timeline

const timeline = {
  from: 0, to: 1, drag: null, shown: [],
  begin() {
    this.canvas = at("timeline");
    this.end = Math.max(data.timeline.seconds * 1e6, 1e-6);
    this.whole();
    at("zoom-in").onclick = () => this.zoom(0.5, 0.5);
    at("zoom-out").onclick = () => this.zoom(2, 0.5);
    at("zoom-all").onclick = () => this.whole();
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.share(event));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => { this.drag = event.clientX; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.drag = null; });
    this.canvas.addEventListener("pointerleave", () => tip(null));
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("keydown", (event) => {
      const step = (this.to - this.from) * 0.2;
      if (event.key === "ArrowLeft") this.shift(-step);
      if (event.key === "ArrowRight") this.shift(step);
      if (event.key === "+") this.zoom(0.5, 0.5);
      if (event.key === "-") this.zoom(2, 0.5);
    });
    addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  },
  share(event) { const box = this.canvas.getBoundingClientRect(); return (event.clientX - box.left) / box.width; },
  whole() { this.from = 0; this.to = this.end; this.draw(); },
  zoom(factor, share) {
    const middle = this.from + (this.to - this.from) * share;
    const length = Math.min(this.end, Math.max((this.to - this.from) * factor, 1));
    this.from = Math.min(Math.max(0, middle - length * share), this.end - length);
    this.to = this.from + length;
    this.draw();
  },
  shift(by) {
    const length = this.to - this.from;
    this.from = Math.min(Math.max(0, this.from + by), this.end - length);
    this.to = this.from + length;
    this.draw();
  },
  moved(event) {
    const box = this.canvas.getBoundingClientRect();
    if (this.drag !== null) {
      this.shift(((this.drag - event.clientX) / box.width) * (this.to - this.from));
      this.drag = event.clientX;
      return tip(null);
    }
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const hit = this.shown.find((one) => x >= one.x - 1 && x <= one.x + one.width + 1 && y >= one.y && y <= one.y + one.height);
    if (hit) tip(event, `${data.timeline.names[hit.event[3]]}: ${seconds(hit.event[2] * 1e-6)}`);
    else tip(null);
  },
  draw() {
    const canvas = this.canvas, scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * scale; canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const lane = (height - 18) / data.timeline.streams.length;
    const tones = data.axes.map((_, i) => colour("--axis-" + (i % 6))), forward = colour("--compute"), back = colour("--computed-back"), soft = colour("--soft");
    this.shown = [];
    const perUnit = width / (this.to - this.from);
    for (const event of data.timeline.events) {
      const [stream, start, length, , backward, over] = event;
      if (start + length < this.from || start > this.to) continue;
      const x = (start - this.from) * perUnit, drawnWidth = Math.max(length * perUnit, 0.6), y = stream * lane + 15;
      const dim = filter !== null && over.length && !over.some((axis) => data.axes[axis].name === filter);
      pen.globalAlpha = dim ? 0.15 : 1;
      pen.fillStyle = over.length ? tones[over[0]] : backward ? back : forward;
      pen.fillRect(x, y, drawnWidth, lane - 20);
      if (drawnWidth > 1.5) this.shown.push({ x, y, width: drawnWidth, height: lane - 20, event });
    }
    pen.globalAlpha = 1;
    pen.fillStyle = soft;
    data.timeline.streams.forEach((name, i) => pen.fillText(name, 2, i * lane + 11));
    pen.fillText(seconds(this.from * 1e-6), 2, height - 4);
    pen.textAlign = "right";
    pen.fillText(seconds(this.to * 1e-6), width - 2, height - 4);
    pen.textAlign = "left";
  },
};

// -- shards by device

function piece(size, cuts) {
  let start = 0;
  for (const [count, index] of cuts) {
    const step = Math.ceil(size / count), offset = Math.min(index * step, size);
    start += offset;
    size = Math.min(step, size - offset);
  }
  return [start, size];
}

function mesh(number) {
  const tensor = data.tensors[number], sizes = data.axes.map((axis) => axis.size);
  const devices = sizes.reduce((product, size) => product * size, 1), columns = sizes.length ? sizes[sizes.length - 1] : 1;
  const most = 256, grid = make("div", { class: "mesh", style: `grid-template-columns:repeat(${columns},auto)` });
  for (let rank = 0; rank < Math.min(devices, most); rank++) {
    let rest = rank;
    const here = {};
    for (let i = data.axes.length - 1; i >= 0; i--) { here[data.axes[i].name] = rest % sizes[i]; rest = Math.floor(rest / sizes[i]); }
    let atom = 0;
    const lines = tensor.dims.map((dim, i) => {
      const held = [];
      for (let k = 0; k < tensor.members[i]; k++, atom++) {
        const [size, over] = tensor.atoms[atom];
        const [start, length] = piece(size, over.map((axis) => [data.axes.find((one) => one.name === axis).size, here[axis]]));
        held.push(length === size ? "all" : length ? `${start}–${start + length - 1}` : "none");
      }
      return make("div", {}, dim.name + " ", make("span", { class: dim.axes.length ? "axis-" + axisNumber[dim.axes[0]] : null }, held.every((text) => text === "all") ? "all" : held.join(" × ")));
    });
    grid.append(make("div", { class: "device" }, make("b", {}, data.axes.map((axis) => `${axis.name} ${here[axis.name]}`).join(", ")), lines.length ? lines : "one number"));
  }
  const states = Object.entries(tensor.states).map(([axis, state]) => `${axis}: ${state}`).join(", ");
  at("mesh").replaceChildren(
    make("p", { class: "note" }, `${tensor.name}: ${tensor.dtype} [${tensor.shape.join(", ")}], on each device [${tensor.local.join(", ")}]; ${states}` + (devices > most ? `; the first ${most} devices` : "")), grid);
  at("tensor").value = String(number);
}

function chosen() {
  const order = data.tensors.map((tensor, i) => [i, tensor]).sort((a, b) => (b[1].kind === "param") - (a[1].kind === "param"));
  at("tensor").append(...order.map(([i, tensor]) => make("option", { value: i }, `${tensor.name} (${tensor.dims.map((dim) => dim.name + (dim.axes.length ? " → " + dim.axes.join("*") : "")).join(", ") || "one number"})`)));
  at("tensor").addEventListener("change", (event) => mesh(Number(event.target.value)));
  const split = order.find(([, tensor]) => tensor.dims.some((dim) => dim.axes.length));
  if (order.length) mesh((split || order[0])[0]);
}

// -- the model

function chip(number) {
  const tensor = data.tensors[number];
  const marks = Object.entries(tensor.states).filter(([, state]) => state === "partial" || state === "broadcast");
  const over = [...tensor.dims.flatMap((dim) => dim.axes), ...marks.map(([axis]) => axis)];
  const element = make("button", { class: "tensor", onclick: () => { mesh(number); at("mesh").scrollIntoView({ block: "center" }); } },
    tensor.dims.flatMap((dim, i) => [i ? " " : "", make("span", { class: dim.axes.length ? "dim split axis-" + axisNumber[dim.axes[0]] : "dim" }, dim.name)]),
    tensor.dims.length ? "" : "·",
    marks.map(([axis, state]) => make("span", { class: "axis-" + axisNumber[axis] }, state === "partial" ? " ∑" : " ∂")));
  return tipped(element, `${tensor.name} [${tensor.shape.join(", ")}], on each device [${tensor.local.join(", ")}]; ${over.length ? over.join(", ") : "whole on every device"}`);
}

function sent(one) {
  const element = make("span", { class: "send axis-" + axisNumber[one.axes[0]] }, `${words(one.kind)} ${one.axes.join("*")}`);
  element.dataset.axes = one.axes.join(" ");
  return tipped(element, `${one.direction}: ${describe(one)}${one.beside ? ", overlapped with compute" : ""}`);
}

function describe(one) {
  const price = `over ${one.axes.join("*")}, ${bytes(one.bytes)}, ${seconds(one.seconds)}`;
  const all = one.together > 1 ? `, in one bucket of ${one.together} parameters:` : "";
  return `${words(one.kind)} of ${one.tensor}${all} ${price}`;
}

function op(one) {
  const taken = one.operands.map(chip), given = one.results.map(chip);
  const ways = ["forward", "backward"].map((way) => [way, one.sends.filter((each) => each.direction === way)]).filter(([, found]) => found.length);
  return make("details", { class: "op" },
    make("summary", {}, make("code", {}, one.name), taken, "→", given, ways.flatMap(([, found]) => found.map(sent))),
    make("div", { class: "more" }, make("div", {}, "rule ", make("code", {}, one.rule)), make("div", {}, "choice: " + one.choice),
      ways.map(([way, found]) => make("div", {}, `${way}: ` + found.map(describe).join("; ")))));
}

function model() {
  at("model").append(...data.sections.map((section) => make("div", { class: "stack" + (section.count > 1 ? " many" : "") },
    section.count > 1 ? make("h3", {}, `${section.title} × ${section.count}`) : null, section.ops.map(op))));
}

head(); dims(); parts(); stages(); beside(); rivals(); memory(); timeline.begin(); chosen(); model();
addEventListener("resize", () => { at("memory").replaceChildren(); memory(); });
