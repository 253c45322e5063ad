"use strict";
// Tokens lie branch after branch: those of branch b are [b.first, b.last).
const D = JSON.parse(document.getElementById("data").textContent);
const CHUNK = 1500; // tokens drawn at once
const SHORT = 60; // context of at most so many tokens starts open
const MOST = 5000; // hits that are counted
const LOOKS = 8; // times that a hit is looked for in the window

function spread(runs) {
  const out = [];
  for (let i = 0; i < runs.length; i += 2) {
    for (let n = runs[i + 1]; n > 0; n--) out.push(runs[i]);
  }
  return out;
}
const CALL = spread(D.call);
const VERSION = spread(D.version);
const TIMES = spread(D.times);
const ADVANTAGE = spread(D.advantage); // class, "" where nothing was sampled

const text = (i) => D.vocab[D.tokens[i]];
const element = (name, className, words) => {
  const out = document.createElement(name);
  if (className) out.className = className;
  if (words !== undefined) out.textContent = words;
  return out;
};
const count = (n) => n.toLocaleString("en") + (n === 1 ? " token" : " tokens");

// Colours are classes; which of them shows is an attribute of the page.
function logprobClass(i) {
  const at = D.bounds.findIndex((b) => D.logprob[i] >= b * 1000);
  return "l" + (at < 0 ? D.bounds.length : at);
}
function classes(i) {
  let out = "t";
  const words = text(i);
  if (words.includes("\n")) out += " nl";
  if (words === "") out += " part";
  if (D.special[D.tokens[i]]) out += " special";
  if (CALL[i] < 0) return out;
  out += " s " + logprobClass(i) + " v" + (D.versions.indexOf(VERSION[i]) % 8);
  if (ADVANTAGE[i]) out += " " + ADVANTAGE[i];
  if (TIMES[i] > 1) out += " m";
  return out;
}
function token(i) {
  const out = element("span", classes(i), text(i));
  out.dataset.i = i;
  if (TIMES[i] > 1) out.dataset.m = TIMES[i];
  return out;
}

// Where other branches leave: token -> names.
const SPLITS = new Map();
D.branches.forEach((b) => {
  if (b.at < 0) return;
  if (!SPLITS.has(b.at)) SPLITS.set(b.at, []);
  SPLITS.get(b.at).push(b);
});
function splits(i, into) {
  for (const b of SPLITS.get(i) || []) {
    const out = element("a", "split", "↳ " + b.name);
    out.href = "#branch-" + b.name;
    out.title = b.why;
    into.append(out);
  }
}

function draw(into, first, last, folds) {
  let fold = 0;
  while (fold < folds.length && folds[fold][1] <= first) fold++;
  for (let i = first; i < last; ) {
    splits(i, into);
    if (fold < folds.length && folds[fold][0] === i) {
      const [start, stop, kind, title] = folds[fold++];
      into.append(foldable(start, stop, kind, title));
      i = stop;
    } else {
      into.append(token(i++));
    }
  }
}
function foldable(start, stop, kind, title) {
  const out = element("details", "foldable");
  out.dataset.first = start;
  out.dataset.last = stop;
  const said = kind + ", " + count(stop - start) + ": " + title;
  out.append(element("summary", "", said));
  out.fill = () => {
    if (out.filled) return;
    out.filled = true;
    for (let i = start; i < stop; i++) {
      if (i > start) splits(i, out);
      out.append(token(i));
    }
  };
  out.addEventListener("toggle", () => out.open && out.fill());
  return out;
}

// A chunk is drawn when it comes near the window.
const near = new IntersectionObserver(
  (entries) => {
    for (const e of entries) if (e.isIntersecting) e.target.fill();
  },
  { rootMargin: "800px" },
);
function chunks(body, block) {
  const folds = block.folds;
  for (let first = block.first; first < block.last; ) {
    let last = Math.min(first + CHUNK, block.last);
    // Not through a fold.
    for (const f of folds) if (f[0] < last && f[1] > last) last = f[1];
    const out = element("span", "chunk");
    const [a, b] = [first, last];
    out.dataset.first = a;
    out.dataset.last = b;
    out.style.display = "block";
    out.style.minHeight = Math.ceil((b - a) / 20) * 1.5 + "em";
    out.fill = () => {
      if (out.filled) return;
      out.filled = true;
      near.unobserve(out);
      out.style.minHeight = out.style.display = "";
      draw(out, a, b, folds);
    };
    body.append(out);
    near.observe(out);
    first = last;
  }
}
function block(b) {
  const out = element("details", "block " + b.kind.replace(" ", "-"));
  out.dataset.first = b.first;
  out.dataset.last = b.last;
  const head = element("summary");
  const what = b.kind === "tool result" ? b.kind : b.role;
  head.append(element("span", "role", what));
  head.append(element("span", "count", count(b.last - b.first)));
  head.append(element("span", "title", b.title));
  const body = element("div", "tokens");
  out.append(head, body);
  out.fill = () => {
    if (out.filled) return;
    out.filled = true;
    chunks(body, b);
  };
  out.addEventListener("toggle", () => out.open && out.fill());
  const short = b.last - b.first <= SHORT && b.kind !== "tool result";
  out.starts = b.kind === "sampled" || short;
  if (out.starts) {
    out.open = true;
    out.fill();
  }
  return out;
}

const sections = [...document.querySelectorAll("section.branch")];
D.branches.forEach((b, n) => {
  const into = sections[n].querySelector(".blocks");
  for (const [first, last, role, kind, title, folds] of b.blocks) {
    into.append(block({ first, last, role, kind, title, folds }));
  }
});

// Folding.
function all(open) {
  for (const d of document.querySelectorAll(".block")) {
    if (open) d.fill();
    d.open = open || false;
  }
  for (const d of document.querySelectorAll(".foldable")) d.open = open;
}
document.getElementById("unfold").addEventListener("click", () => all(true));
document.getElementById("fold").addEventListener("click", () => all(false));

// Which colour, which theme.
const KNOWN = [...document.querySelectorAll("#colours input")];
function colour(name) {
  const found = KNOWN.find((r) => r.value === name && !r.disabled);
  if (!found) return;
  found.checked = true;
  document.body.dataset.colour = name;
}
document.getElementById("colours").addEventListener("change", (e) => {
  colour(e.target.value);
  remember();
});
document.getElementById("theme").addEventListener("change", (e) => {
  document.documentElement.dataset.theme = e.target.value;
});

// Every token that is drawn for i, opening what hides it.
function show(i) {
  const of = (list) =>
    [...list].find((e) => +e.dataset.first <= i && i < +e.dataset.last);
  const block = of(document.querySelectorAll(".block"));
  if (!block) return null;
  block.open = true;
  block.fill();
  const chunk = of(block.querySelectorAll(".chunk"));
  chunk.fill();
  const fold = of(chunk.querySelectorAll(".foldable"));
  if (fold) {
    fold.open = true;
    fold.fill();
  }
  return chunk.querySelector('.t[data-i="' + i + '"]');
}

// Search: over the joined text of each branch, so that a hit may span tokens.
let texts = null;
let hits = [];
let at = -1;
function index() {
  texts = D.branches.map((b) => {
    const ends = [];
    let whole = "";
    for (let i = b.first; i < b.last; i++) {
      whole += text(i);
      ends.push(whole.length);
    }
    const lower = whole.toLowerCase();
    return { first: b.first, ends, text: lower.length === whole.length ? lower : whole };
  });
}
function tokenAt(ends, offset) {
  let [low, high] = [0, ends.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}
function search(query) {
  for (const e of document.querySelectorAll(".hit, .now")) {
    e.classList.remove("hit", "now");
  }
  hits = [];
  at = -1;
  const wanted = query.toLowerCase();
  if (wanted) {
    if (!texts) index();
    for (const t of texts) {
      for (let k = t.text.indexOf(wanted); k >= 0 && hits.length < MOST; ) {
        const from = t.first + tokenAt(t.ends, k);
        const to = t.first + tokenAt(t.ends, k + wanted.length - 1);
        hits.push([from, to]);
        k = t.text.indexOf(wanted, k + wanted.length);
      }
    }
  }
  tell();
}
function tell() {
  const out = document.getElementById("hits");
  const most = hits.length === MOST ? "+" : "";
  const query = document.getElementById("query").value;
  out.textContent = !query ? "" : hits.length ? at + 1 + " / " + hits.length + most : "none";
}
// What lies above may still be drawn and move it: looks again until it stays.
function bring(e, times) {
  const { top, bottom } = e.getBoundingClientRect();
  if (top < 0 || bottom > innerHeight || times === LOOKS) {
    e.scrollIntoView({ block: "center" });
  }
  const wanted = hits[at] && hits[at][0] === +e.dataset.i;
  if (times > 0 && wanted) setTimeout(bring, 50, e, times - 1);
}
function go(step) {
  if (!hits.length) return;
  at = (at + step + hits.length) % hits.length;
  for (const e of document.querySelectorAll(".now")) e.classList.remove("now");
  let first = null;
  for (let i = hits[at][0]; i <= hits[at][1]; i++) {
    const e = show(i);
    if (!e) continue;
    e.classList.add("hit", "now");
    first = first || e;
  }
  if (first) bring(first, LOOKS);
  tell();
}
const query = document.getElementById("query");
let searched = "";
function again() {
  if (query.value === searched) return false;
  searched = query.value;
  search(searched);
  remember();
  return true;
}
document.getElementById("search").addEventListener("submit", (e) => {
  e.preventDefault();
  again();
  go(1);
});
query.addEventListener("input", again);
document.getElementById("previous").addEventListener("click", () => {
  again();
  go(at < 0 ? 0 : -1);
});

// What a token is.
const panel = document.getElementById("token");
function samples(i) {
  const more = D.samples[i];
  const own = [[CALL[i], D.logprob[i] / 1000, VERSION[i]]];
  return (more || own).map(([c, p, v]) => {
    const chance = (100 * Math.exp(p)).toPrecision(3);
    return "call " + D.calls[c] + ": " + p.toFixed(3) + " (" + chance + "%), weights " + v;
  });
}
function describe(i) {
  const n = D.branches.findIndex((b) => b.first <= i && i < b.last);
  const b = D.branches[n];
  const rows = [
    ["text", JSON.stringify(text(i))],
    ["id", String(D.ids[D.tokens[i]])],
    ["branch", b.name],
    ["position", (b.depth + i - b.first).toLocaleString("en")],
  ];
  if (CALL[i] < 0) rows.push(["kind", "context, not sampled"]);
  else {
    samples(i).forEach((s) => rows.push(["log-probability", s]));
    const words = D.advantages[ADVANTAGE[i]];
    if (words) rows.push(["training", words]);
  }
  return rows;
}
document.querySelector("main").addEventListener("click", (e) => {
  const found = e.target.closest(".t[data-i]");
  if (!found) return;
  const list = panel.querySelector("dl");
  list.replaceChildren();
  for (const [name, value] of describe(+found.dataset.i)) {
    const row = element("div");
    row.append(element("dt", "", name), element("dd", "", value));
    list.append(row);
  }
  panel.hidden = false;
});
document.getElementById("close").addEventListener("click", () => {
  panel.hidden = true;
});

// The address keeps colour and search, so that a view can be sent on.
function remember() {
  const state = new URLSearchParams({ colour: document.body.dataset.colour });
  if (query.value) state.set("q", query.value);
  try {
    history.replaceState(null, "", "#" + state);
  } catch {
    // A page in a frame without an address keeps nothing.
  }
}
const asked = new URLSearchParams(location.hash.slice(1));
colour(asked.get("colour"));
if (asked.get("q")) {
  query.value = asked.get("q");
  again();
  go(1);
}
if (matchMedia("(max-width: 760px)").matches) {
  document.getElementById("outline").open = false;
}
document.body.dataset.ready = "1";
