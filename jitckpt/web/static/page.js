// The page of a job: shows what the server sends, and asks it for nothing but that. All text goes in as text.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (name, text, className) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const drawn = (name, fields, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [field, value] of Object.entries(fields)) made.setAttribute(field, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
// The order is that of the legend. A rank shows its number where there is room, else its state's letter.
const STATES = {
  training: "#", done: "=", starting: ".", loading: "l", late: "L", held: "h", saving: "s", saved: "S",
  failed: "X", ended: "-",
};
const CAUSES = {
  useful: "useful steps", starting: "starting", died: "a rank died", hang: "a hang", nccl_error: "an NCCL error",
  host: "a lost host", hosts: "hosts that were taken in", signal: "a signal", device: "a device", late: "waiting for late ranks",
  done_again: "minibatches done again", ending: "ending",
};
const MANY = 128; // ranks; more are shown smaller
const SHOWN_LANES = 34;
const LANE = 20; // pixels
const NAMES = 74; // pixels for the names of lanes
let job = null;
let lanes = [];
let meanings = {};
let lanesFor = "";
let chosen = null; // a rank
let view = null; // [begin, end] in seconds; null: all
let cells = new Map();

function inWords(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function show(document_) {
  const before = job && job.state;
  job = document_.job;
  const problem = document_.problem
    || (document_.silent !== null ? `The agent has not been heard for ${inWords(document_.silent)}.` : "")
    || (job === null ? "No job has written an event here yet." : "");
  $("lost").hidden = !problem;
  if ($("lost").textContent !== problem) $("lost").textContent = problem;
  if (job === null) return;
  document.title = `${job.state}: jitckpt`;
  $("directory").textContent = job.checkpoint_dir;
  if (before !== job.state) {
    const last = job.recoveries.at(-1);
    $("said").textContent = `The job is ${job.state}.` + (job.state === "recovering" && last ? ` ${last.text}.` : "");
  }
  showNow();
  showRanks();
  showProtection();
  showMemory();
  showRecoveries();
  showHangs();
  showCost();
  const warnings = JSON.stringify(job.warnings);
  if ($("warnings").dataset.shown !== warnings) {
    $("warnings").dataset.shown = warnings;
    $("warnings").replaceChildren(...(job.warnings.length ? job.warnings : ["none"]).map((text) => make("li", text)));
  }
  const state = `${job.started} ${job.recoveries.length} ${job.recoveries.map((one) => one.outcome)}`;
  if (state !== lanesFor) {
    lanesFor = state;
    fetchLanes();
  }
  drawTimeline();
}

function showNow() {
  const facts = [
    ["State", job.state, job.state],
    ["Step", job.step === null ? "not told yet" : String(job.step)],
    ["A step takes", job.step_seconds === null ? "not known yet" : `${job.step_seconds.toPrecision(3)} s`],
    ["Whole on the disk", job.safe_step === null ? "no step" : `step ${job.safe_step}`],
    ["Ranks with a replica", job.outcome === null ? percent(job.protected) : "the job is over"],
    ["Useful time", job.goodput === null ? "none yet" : percent(job.goodput)],
    [job.outcome === null ? "Running for" : "Ran for", inWords(job.seconds)],
    ["Restarts", `${job.restart} of ${job.max_restarts}`],
  ];
  const now = $("now");
  if (now.children.length !== facts.length) {
    now.replaceChildren(...facts.map(() => {
      const one = make("div");
      one.append(make("dt"), make("dd"));
      return one;
    }));
  }
  facts.forEach(([name, value, className], index) => {
    const one = now.children[index];
    one.className = className && /^[a-z]+$/.test(className) ? className : "";
    if (one.children[0].textContent !== name) one.children[0].textContent = name;
    if (one.children[1].textContent !== value) one.children[1].textContent = value;
  });
}

// Ranks.

function dimensions() {
  const found = new Map();
  if (job.shards.length) found.set("shard", job.shards.map((one) => [`shard ${one.number}`, one.ranks]));
  for (const [name, ranks] of job.groups) {
    if (!found.has(name)) found.set(name, []);
    found.get(name).push([`${name} ${found.get(name).length}`, ranks]);
  }
  const all = job.ranks.map((one) => one.rank);
  const rows = [];
  for (let begin = 0; begin < all.length; begin += 8) {
    const ranks = all.slice(begin, begin + 8);
    rows.push([ranks.length > 1 ? `${ranks[0]} to ${ranks.at(-1)}` : `${ranks[0]}`, ranks]);
  }
  found.set("rank", all.length > MANY ? [["all", all]] : rows);
  return found;
}

function showRanks() {
  const found = dimensions();
  const select = $("dimension");
  const names = [...found.keys()];
  if (select.dataset.names !== names.join("\n")) {
    const before = select.value;
    select.dataset.names = names.join("\n");
    select.replaceChildren(...names.map((name) => new Option(name === "rank" ? "by number" : `by ${name}`, name)));
    if (names.includes(before)) select.value = before;
  }
  const rows = found.get(select.value) || [];
  const shape = JSON.stringify([select.value, rows, job.ranks.length]);
  if ($("ranks").dataset.shape !== shape) {
    $("ranks").dataset.shape = shape;
    layRanks(rows);
  }
  const counts = {};
  for (const one of job.ranks) {
    counts[one.state] = (counts[one.state] || 0) + 1;
    const cell = cells.get(one.rank);
    if (!cell) continue;
    const label = `rank ${one.rank}: ${one.state}` + (one.step === null ? "" : `, step ${one.step}`);
    if (cell.className !== one.state) {
      cell.className = one.state;
      cell.textContent = job.ranks.length > MANY ? STATES[one.state] : `${one.rank} ${STATES[one.state]}`;
    }
    if (cell.getAttribute("aria-label") !== label) {
      cell.setAttribute("aria-label", label);
      cell.title = label;
    }
  }
  const told = JSON.stringify(counts);
  if ($("legend").dataset.told !== told) {
    $("legend").dataset.told = told;
    $("legend").replaceChildren(...Object.keys(STATES).filter((state) => counts[state]).map((state) =>
      make("span", `${STATES[state]} ${counts[state]} ${state}`, state)));
  }
  showChosen();
}

function layRanks(rows) {
  const focused = cells.size && document.activeElement && document.activeElement.dataset.rank;
  cells = new Map();
  $("ranks").classList.toggle("many", job.ranks.length > MANY);
  $("ranks").replaceChildren(...rows.map(([name, ranks]) => {
    const row = make("div", undefined, "row");
    const label = make("span", name);
    label.title = name;
    const places = make("div", undefined, "cells");
    for (const rank of ranks) {
      const cell = make("button");
      cell.type = "button";
      cell.dataset.rank = rank;
      cell.tabIndex = -1;
      cell.setAttribute("aria-pressed", String(rank === chosen));
      if (!cells.has(rank)) cells.set(rank, cell);
      places.append(cell);
    }
    row.append(label, places);
    return row;
  }));
  const first = cells.get(Number(focused)) || cells.get(chosen) || cells.values().next().value;
  if (first) first.tabIndex = 0;
  if (focused && first) first.focus();
}

function showChosen() {
  const one = job.ranks.find((rank) => rank.rank === chosen);
  let text = "";
  if (one) {
    const shard = job.shards.find((each) => each.ranks.includes(one.rank));
    const others = shard ? shard.living.filter((rank) => rank !== one.rank) : [];
    text = `Rank ${one.rank} is ${one.state}` + (one.step === null ? "" : ` at step ${one.step}`)
      + (one.late > 0 ? `; the others have waited ${inWords(one.late)} for it` : "")
      + (shard ? `. It holds shard ${shard.number}; ` + (others.length
        ? `${others.length === 1 ? "rank" : "ranks"} ${few(others)} would save it.` : job.memory_step !== null ? `the memory tier has it after step ${job.memory_step}.` : "nobody else has it now.") : ".");
  }
  if ($("chosen").textContent !== text) $("chosen").textContent = text;
  showMemory();
}

const few = (ranks) => ranks.slice(0, 8).join(", ") + (ranks.length > 8 ? ` and ${ranks.length - 8} more` : "");

$("ranks").addEventListener("click", (event) => {
  const cell = event.target.closest("button");
  if (!cell) return;
  const rank = Number(cell.dataset.rank);
  chosen = chosen === rank ? null : rank;
  for (const [number, each] of cells) each.setAttribute("aria-pressed", String(number === chosen));
  turnTo(cell);
  showChosen();
});
$("ranks").addEventListener("keydown", (event) => {
  const all = [...cells.values()];
  const at = all.indexOf(event.target);
  if (at < 0) return;
  const next = {
    ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1,
    ArrowDown: inNextLine(all, at, 1), ArrowUp: inNextLine(all, at, -1),
  }[event.key];
  if (next === undefined || !all[next]) return;
  event.preventDefault();
  turnTo(all[next]);
  all[next].focus();
});

function turnTo(cell) {
  for (const each of cells.values()) each.tabIndex = -1;
  cell.tabIndex = 0;
}

function inNextLine(all, at, way) {
  const here = all[at].getBoundingClientRect();
  let line = null;
  let best = -1;
  for (let index = at + way; all[index]; index += way) {
    const there = all[index].getBoundingClientRect();
    if (Math.abs(there.top - here.top) < 2) continue;
    if (line !== null && Math.abs(there.top - line) > 2) break;
    line = there.top;
    if (best < 0 || Math.abs(there.left - here.left) < Math.abs(all[best].getBoundingClientRect().left - here.left)) {
      best = index;
    }
  }
  return best < 0 ? undefined : best;
}

$("dimension").addEventListener("change", showRanks);

function showProtection() {
  const bare = job.shards.filter((one) => !one.protected);
  let text = job.in_place
    ? "Failures of devices are recovered from in place; after the loss of a process the job begins at step 0, as no "
      + "rank has called jitckpt.init."
    : "No rank has called jitckpt.init: nothing is protected yet.";
  if (job.outcome !== null) {
    text = "The job is over; no rank holds its state any more.";
  } else if (job.shards.length) {
    const fewest = Math.min(...job.shards.map((one) => one.living.length));
    text = bare.length
      ? `${job.shards.length === 1 ? "The state has" : `${bare.length} of ${job.shards.length} shards have`} no second `
        + "living copy: a failure now goes back to "
        + (job.safe_step === null ? "step 0." : `step ${job.safe_step} or what was saved last.`)
      : `${job.shards.length === 1 ? "The state" : `Each of ${job.shards.length} shards`} is held by ${fewest} or more `
        + "ranks: any one may fail, and at most the minibatch under way is done again.";
    if (job.memory_step !== null) {
      text = `The memory tier has step ${job.memory_step} of all ranks: a failure goes back to it, or to a later one.`;
    }
  }
  if (job.outcome !== null || job.shards.length) {
    text += job.safe_step === null ? " No step lies whole on the disk." : ` Step ${job.safe_step} lies whole on the disk.`;
  }
  for (const one of job.suspects) text += ` Device ${one.device} of ${one.host} is suspect (rank ${one.rank}).`;
  if ($("protection").textContent !== text) $("protection").textContent = text;
  const shards = job.outcome === null ? job.shards : [];
  const told = JSON.stringify([shards, job.memory_step !== null]);
  if ($("placement").dataset.told === told) return;
  $("placement").dataset.told = told;
  $("placement").replaceChildren(...shards.map((one) => make("span",
    `shard ${one.number}: ${one.living.length} of ${one.ranks.length} copies` + (one.ranks.length > 8 ? "" : ` (${one.living.length === 1 ? "rank" : "ranks"} ${few(one.living)})`),
    one.protected || job.memory_step !== null ? "kept" : "bare")));
}

// The memory tier: a box a host, with a square for each host whose ranks' state its memory has, and below these
// a mark for each of its ranks: how far its snapshots are. The order is that of the legend.

const HOST = { width: 172, height: 78, gap: 8, square: 17, most: 6, mark: 14, marks: 9 };
const IN_MEMORY = {
  completed: ["=", "the newest snapshot is whole on all hosts that are to have it"],
  snap: ["~", "a snapshot is on its way to memory"],
  healthy: ["#", "memory has a step of it"],
  unhealthy: ["!", "its program has failed; its host's memory still has its snapshots"],
  offline: ["X", "its host is lost, with what that had in memory"],
};

function showMemory() {
  const hosts = job.memory_step === null ? [] : job.memory_hosts;
  const box = $("memory");
  box.hidden = !hosts.length;
  const width = Math.max(280, box.clientWidth);
  const owner = hosts.findIndex((one) => one.ranks.includes(chosen));
  const states = new Map(job.ranks.filter((one) => one.memory_state in IN_MEMORY).map((one) => [one.rank, one.memory_state]));
  const told = JSON.stringify([hosts, owner, width, [...states]]);
  if (box.dataset.told === told) return;
  box.dataset.told = told;
  const keeps = hosts.map(() => []);
  hosts.forEach((one, host) => [...one.kept_by, ...one.in_parts_on].forEach((by) => keeps[by].push(host)));
  const across = Math.max(1, Math.floor((width + HOST.gap) / (HOST.width + HOST.gap)));
  const height = Math.ceil(hosts.length / across) * (HOST.height + HOST.gap);
  const fewest = Math.min(...hosts.map((one) => one.kept_by.length));
  const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${hosts.length} hosts keep each other's state in memory, that of each rank on ${fewest} or more` });
  hosts.forEach((one, host) => {
    const group = drawn("g", { transform:
      `translate(${(host % across) * (HOST.width + HOST.gap)} ${Math.floor(host / across) * (HOST.height + HOST.gap)})` });
    const theirs = owner >= 0 && (hosts[owner].kept_by.includes(host) || hosts[owner].in_parts_on.includes(host));
    group.append(drawn("title", {}, `${one.host} has ranks ${few(one.ranks)}, and keeps the state of hosts ${few(keeps[host])}`));
    group.append(drawn("rect", { x: 1.5, y: 1.5, width: HOST.width - 3, height: HOST.height - 3, rx: 6, class: theirs ? "host keeps" : "host" }));
    group.append(drawn("text", { x: 8, y: 16 }, `host ${host}`));
    const ranks = one.ranks.length > 1 ? `ranks ${one.ranks[0]} to ${one.ranks.at(-1)}` : `rank ${one.ranks[0]}`;
    group.append(drawn("text", { x: HOST.width - 8, y: 16, "text-anchor": "end", class: "name" }, ranks));
    const shown = keeps[host].slice(0, HOST.most);
    shown.forEach((each, place) => {
      const x = 8 + place * (HOST.square + 4);
      const className = each === host ? "own" : hosts[each].in_parts_on.includes(host) ? "other part" : "other";
      group.append(drawn("rect", { x, y: 28, width: HOST.square, height: HOST.square, rx: 3, class: className }));
      group.append(drawn("text", { x: x + HOST.square / 2, y: 40.5, "text-anchor": "middle", class: className }, String(each)));
    });
    if (keeps[host].length > shown.length) {
      group.append(drawn("text", { x: HOST.width - 8, y: 40.5, "text-anchor": "end" }, `+${keeps[host].length - shown.length}`));
    }
    const marked = one.ranks.filter((rank) => states.has(rank));
    marked.slice(0, HOST.marks).forEach((rank, place) => {
      const state = states.get(rank);
      const x = 8 + place * (HOST.mark + 2);
      const mark = drawn("g", { class: state });
      mark.append(drawn("title", {}, `rank ${rank}: ${state}; ${IN_MEMORY[state][1]}`));
      mark.append(drawn("rect", { x, y: 54, width: HOST.mark, height: HOST.mark, rx: HOST.mark / 2 }));
      mark.append(drawn("text", { x: x + HOST.mark / 2, y: 65, "text-anchor": "middle" }, IN_MEMORY[state][0]));
      group.append(mark);
    });
    if (marked.length > HOST.marks) {
      group.append(drawn("text", { x: HOST.width - 4, y: 65, "text-anchor": "end" }, `+${marked.length - HOST.marks}`));
    }
    svg.append(group);
  });
  const counts = make("p", undefined, "marks");
  counts.append(...Object.keys(IN_MEMORY).map((state) => [state, [...states].filter(([, one]) => one === state).map(([rank]) => rank)])
    .filter(([, ranks]) => ranks.length).map(([state, ranks]) => {
      const of = ["unhealthy", "offline"].includes(state) ? ` (${ranks.length === 1 ? "rank" : "ranks"} ${few(ranks)})` : "";
      const one = make("span", `${IN_MEMORY[state][0]} ${ranks.length} ${state}${of}`, state);
      one.title = IN_MEMORY[state][1];
      return one;
    }));
  const parts = hosts.some((one) => one.in_parts_on.length);
  const legend = make("p", "A box is a host's memory; a square is the state of the ranks of the host with that number: filled, its own"
    + (parts ? "; broken, a part of it." : ".") + (states.size ? " A round mark is a rank of that host, and how far its snapshots are." : "")
    + (owner >= 0 ? ` Framed: the hosts that have rank ${chosen}'s.` : " Choose a rank above to see which hosts have its state."), "none");
  box.replaceChildren(svg, counts, legend);
}

// Timeline.

async function fetchLanes() {
  try {
    const answer = await fetch("timeline.json");
    if (!answer.ok) throw new Error(String(answer.status));
    ({ recoveries: lanes, meanings } = await answer.json());
    drawTimeline();
  } catch (error) {
    lanesFor = ""; // asked for again with the next news
  }
}

const range = () => view || [0, Math.max(job.seconds, 0.001)];

function drawTimeline() {
  const [begin, end] = range();
  const box = $("timeline");
  const width = Math.max(280, box.clientWidth);
  const scale = (width - NAMES - 8) / (end - begin);
  const x = (seconds) => NAMES + (Math.min(Math.max(seconds, begin), end) - begin) * scale;
  const rows = [["job", job.segments.map(([cause, from, to]) => [cause, from, to])]];
  const shown = mostVisible(begin, end);
  const failures = [];
  if (shown) {
    for (const lane of shown.lanes.slice(0, SHOWN_LANES)) {
      if (lane.failed !== null) failures.push([rows.length, shown.at + lane.failed]);
      rows.push([lane.name, lane.phases.map((one) => [one.name, shown.at + one.begin, shown.at + one.end])]);
    }
  }
  const height = rows.length * LANE + 26;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `From ${begin.toFixed(1)} to ${end.toFixed(1)} seconds of the job` + (shown ? `: ${shown.title}` : "") });
  rows.forEach(([name, parts], index) => {
    svg.append(drawn("text", { x: 6, y: index * LANE + 15, class: "name" }, name));
    for (const [what, from, to] of parts) {
      if (to < begin || from > end) continue;
      const rect = drawn("rect", { x: x(from), y: index * LANE + 3, width: Math.max(1, x(to) - x(from)), height: LANE - 6,
        class: `c-${what.replaceAll(" ", "-")}`, "data-phase": what });
      rect.append(drawn("title", {}, `${name}: ${CAUSES[what] || meanings[what] || what}, ${inWords(to - from)}`));
      svg.append(rect);
    }
  });
  for (const [row, at] of failures) {
    if (at < begin || at > end) continue;
    svg.append(drawn("text", { x: x(at) - 4, y: row * LANE + 14 }, "✕"));
  }
  const bottom = rows.length * LANE;
  svg.append(drawn("line", { x1: NAMES, x2: width - 8, y1: bottom + 2, y2: bottom + 2, class: "axis" }));
  for (const tick of ticks(begin, end, Math.max(2, Math.floor(width / 130)))) {
    svg.append(drawn("line", { x1: x(tick), x2: x(tick), y1: 0, y2: bottom + 6, class: "axis" }));
    svg.append(drawn("text", { x: x(tick) + 3, y: bottom + 18, class: "name" }, shortTime(tick, end - begin)));
  }
  box.replaceChildren(svg);
  const more = shown && shown.left_out ? ` (${shown.left_out} more ranks)` : "";
  $("range").textContent = `${inWords(begin)} to ${inWords(end)}` + (shown ? `: ${shown.title}${more}` : "");
  const used = new Set(rows.flatMap(([, parts]) => parts.map(([what]) => what)));
  const told = [...used].join();
  if ($("phases").dataset.told !== told) {
    $("phases").dataset.told = told;
    $("phases").replaceChildren(...[...used].map((what) => {
      const one = make("span");
      const sample = drawn("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" });
      sample.append(drawn("rect", { width: 12, height: 12, rx: 2, class: `c-${what.replaceAll(" ", "-")}` }));
      one.append(sample, CAUSES[what] || meanings[what] || what);
      return one;
    }));
  }
}

function extent(one) {
  const edges = one.lanes.flatMap((lane) => lane.phases.flatMap((phase) => [phase.begin, phase.end]));
  return [one.at + Math.min(0, ...edges), one.at + Math.max(0.001, ...edges)];
}

// The lanes of a recovery take room: those of the one of which most is seen, if it is wide enough to read.
function mostVisible(begin, end) {
  let best = null;
  let most = 0.06 * (end - begin);
  for (const one of lanes) {
    const [from, to] = extent(one);
    const seen = Math.min(to, end) - Math.max(from, begin);
    if (seen > most) [best, most] = [one, seen];
  }
  return best;
}

function ticks(begin, end, count) {
  const rough = (end - begin) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(begin / step) * step; tick <= end; tick += step) found.push(tick);
  return found;
}

function shortTime(seconds, width) {
  if (width < 10) return `${seconds.toFixed(2)} s`;
  if (width < 600) return `${seconds.toFixed(0)} s`;
  return width < 36000 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function look(from, to) {
  const all = Math.max(job.seconds, 0.001);
  const width = Math.min(Math.max(to - from, 0.01), all);
  const begin = Math.min(Math.max(from, 0), all - width);
  view = width >= all ? null : [begin, begin + width];
  drawTimeline();
}

function zoom(how, at) {
  if (job === null) return;
  const [begin, end] = range();
  const width = end - begin;
  const middle = at === undefined ? (begin + end) / 2 : at;
  const ways = {
    in: () => look(middle - (middle - begin) / 2, middle + (end - middle) / 2),
    out: () => look(middle - (middle - begin) * 2, middle + (end - middle) * 2),
    left: () => look(begin - width / 4, end - width / 4),
    right: () => look(begin + width / 4, end + width / 4),
    all: () => look(0, job.seconds),
  };
  ways[how]();
}

for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => zoom(button.dataset.zoom));
}
$("timeline").addEventListener("keydown", (event) => {
  const how = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
  if (!how || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  zoom(how);
});
const under = (event) => {
  const box = $("timeline").getBoundingClientRect();
  const [begin, end] = range();
  return begin + (Math.max(0, event.clientX - box.left - NAMES) / Math.max(1, box.width - NAMES - 8)) * (end - begin);
};
$("timeline").addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey) return; // the page's own scrolling
  event.preventDefault();
  zoom(event.deltaY < 0 ? "in" : "out", under(event));
}, { passive: false });
let dragged = null;
$("timeline").addEventListener("pointerdown", (event) => {
  dragged = { at: under(event), range: range() };
});
window.addEventListener("pointermove", (event) => {
  if (!dragged || event.buttons === 0) return;
  const by = dragged.at - under(event);
  const [begin, end] = range();
  if (Math.abs(by) > (end - begin) / 400) look(begin + by, end + by);
});
window.addEventListener("pointerup", () => { dragged = null; });
window.addEventListener("resize", () => job && drawTimeline());

// Recoveries, hangs, cost.

function table(heads, rows) {
  const made = make("table");
  const head = make("tr");
  for (const [text, className] of heads) {
    const cell = make("th", text, className);
    cell.scope = "col";
    head.append(cell);
  }
  const top = make("thead");
  top.append(head);
  const body = make("tbody");
  for (const row of rows) {
    const line = make("tr");
    row.forEach((cell, index) => {
      const made_ = make("td", undefined, heads[index][1]);
      made_.append(cell);
      line.append(made_);
    });
    body.append(line);
  }
  made.append(top, body);
  return made;
}

function showRecoveries() {
  const told = JSON.stringify(job.recoveries);
  const place = $("recoveries");
  if (place.dataset.told === told) return;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
  place.dataset.told = told;
  if (!job.recoveries.length) {
    place.replaceChildren(make("p", "none", "none"));
    return;
  }
  const rows = job.recoveries.slice(-50).reverse().map((one) => {
    const button = make("button", "Show");
    button.type = "button";
    button.dataset.at = one.at;
    button.setAttribute("aria-label", `Show the recovery at ${inWords(one.at)} in the timeline`);
    button.addEventListener("click", () => {
      const found = lanes.find((each) => Math.abs(each.at - one.at) < 0.5);
      const [from, to] = found ? extent(found) : [one.at, one.at + (one.seconds || 10)];
      look(from - 0.1 * (to - from), to + 0.1 * (to - from));
      $("timeline").focus();
    });
    const from = one.step === null ? one.outcome
      : `step ${one.step} (${one.tier.replaceAll("_", " ")}${one.redone ? `, ${one.redone} again` : ""})`;
    return [new Date(1000 * one.found).toLocaleTimeString(), one.text, from,
      one.seconds === null ? one.outcome : one.seconds.toFixed(2),
      Object.entries(one.phases).map(([name, seconds]) => `${name} ${seconds.toFixed(2)}`).join(", "), button];
  });
  place.replaceChildren(table([["Found"], ["What"], ["Went on from"], ["Seconds", "number"], ["Phases"], [""]].map(
    ([text, className]) => [text || "In the timeline", className]), rows));
  if (focused !== undefined) place.querySelector(`[data-at="${focused}"]`)?.focus();
}

function showHangs() {
  const told = JSON.stringify(job.hang_reports);
  if ($("hangs").dataset.told === told) return;
  $("hangs").dataset.told = told;
  if (!job.hang_reports.length) {
    $("hangs").replaceChildren(make("p", "none", "none"));
    $("report").hidden = true;
    return;
  }
  $("hangs").replaceChildren(...job.hang_reports.map((one, number) => {
    const button = make("button", `${inWords(one.at)}: ${one.text || one.path}`);
    button.type = "button";
    button.addEventListener("click", () => read(number));
    return button;
  }));
}

async function read(number) {
  let text;
  try {
    const answer = await fetch(`hang/${number}`);
    text = await answer.text();
  } catch (error) {
    text = "The report can't be fetched now.";
  }
  $("report").hidden = false;
  $("report").textContent = text;
  $("report").focus();
}

function showCost() {
  const price = Number($("price").value) || 0;
  const hours = (seconds) => (seconds * job.world_size) / 3600;
  const rows = Object.entries(job.spent).filter(([, seconds]) => seconds > 0)
    .sort(([one, first], [other, second]) => (other === "useful") - (one === "useful") || second - first)
    .map(([cause, seconds]) => {
      const meter = make("meter");
      meter.max = Math.max(job.seconds, 0.001);
      meter.value = seconds;
      meter.setAttribute("aria-label", `${CAUSES[cause] || cause}: ${percent(seconds / meter.max)}`);
      const row = [CAUSES[cause] || cause, meter, inWords(seconds), percent(seconds / meter.max), hours(seconds).toFixed(3)];
      return price ? [...row, (price * hours(seconds)).toFixed(2)] : row;
    });
  const heads = [["Cause"], ["Share"], ["Time", "number"], ["", "number"], ["Hours of ranks", "number"]];
  heads[3][0] = "Of all";
  if (price) heads.push(["Cost", "number"]);
  $("cost").replaceChildren(table(heads, rows));
}
$("price").addEventListener("input", () => job && showCost());

// Dark or light: the reader's system says, until the button does.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const told = (() => { try { return sessionStorage.getItem("theme"); } catch (error) { return null; } })();
if (told) document.documentElement.dataset.theme = told;
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { sessionStorage.setItem("theme", next); } catch (error) { /* private windows may refuse; it is for this page then */ }
});

const news = new EventSource("stream");
news.addEventListener("message", (event) => show(JSON.parse(event.data)));
news.addEventListener("error", () => {
  $("lost").hidden = false;
  $("lost").textContent = "The connection is lost; this is how the job was. It is tried again.";
});
