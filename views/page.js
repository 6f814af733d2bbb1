"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const SLO = data.slo_s ?? Infinity, EVERY = 256, MOST_LIVE = 20000, NOWHERE = 1e15;
const WAIT = 0, PREFILL = 1, DECODE = 2, STALL = 3;  // kinds of bars in a lane

// ---- A run: what the records say, and what can be counted from them -----------------------------

class Run {
  constructor(name, settings) {
    Object.assign(this, {name, settings, iterations: [], requests: new Map(), bars: new Map()});
    this.ttfts = [], this.tbts = [];  // [iteration, seconds], in order; a gap: [..., id, since]
    this.checkpoints = [];  // of each EVERY-th iteration: the state before it
    this.born = new Map();  // iteration -> the requests that are first seen there
    this.state = {k: 0, of: new Map()};  // before iteration k: request id -> its counters
    this.shown = null;
  }
  get end() { return this.iterations.at(-1)?.end ?? 0; }
  get begin() { return this.first ?? this.iterations[0]?.start ?? 0; }

  apply(record) {
    if (record.live) {
      Object.assign(this.settings, record.settings);
      for (const r of record.live) this.arrive(r, r);
    } else if (record.request) this.arrive(record.request);
    else this.iterate(record);
  }
  arrive(r, progress) {
    this.requests.set(r.id, r);
    this.bars.set(r.id, []);
    this.first = Math.min(this.first ?? r.arrival, r.arrival);
    const k = this.iterations.length;
    this.born.has(k) ? this.born.get(k).push(r) : this.born.set(k, [r]);
    const its = fresh(r);
    if (progress) {
      const [first, last] = progress.times, {num_computed: computed, output, pages} = progress;
      const since = last ?? r.arrival;  // if it waits, then not for longer
      Object.assign(its, {first, last, since, computed, output, pages: [...pages]});
      its.waits = !pages.length;
    }
    this.state.of.set(r.id, its);
  }
  iterate(its) {
    const k = this.iterations.length, of = this.state.of;
    this.state.k = k;
    if (k % EVERY === 0) this.checkpoints.push(copy(this.state));
    its.prefill = its.chunks.reduce((sum, [, , n]) => sum + n, 0);
    its.tokens = its.prefill + its.decodes.length;
    const before = this.iterations[k - 1];
    its.preemptions = its.preempted.length + (before?.preemptions ?? 0);  // so far
    this.iterations.push(its);
    for (const id of its.preempted) of.get(id) && (of.get(id).since = its.start);
    for (const [id] of its.chunks) {
      const r = of.get(id), bars = this.bars.get(id);
      if (r.waits || its.preempted.includes(id)) {
        if (its.start > r.since) bars.push([r.since, its.start, WAIT, k]);
      }
      bars.push([its.start, its.end, PREFILL, k]);
    }
    begin(this.state, its);
    its.cached = its.found.reduce((sum, [, n]) => sum + n, before?.cached ?? 0);  // so far
    finish(this.state, its, this.requests, (id, since, until, first) => {
      if (first) return void this.ttfts.push([k, until - this.requests.get(id).arrival]);
      this.tbts.push([k, until - since, id, since]);
      const bars = this.bars.get(id), stall = until - since > SLO, last = bars.at(-1);
      // the gap holds what was drawn since the last token: a stall covers it, chunks lie on it
      if (!stall && last && last[2] === DECODE && last[1] === since) last[1] = until;
      else bars.push([since, until, stall ? STALL : DECODE, k]);
    });
  }
  // the state as iteration k was decided: counters before it, pages with those it was given
  at(k) {
    if (this.shown?.k === k) return this.shown;
    let state = this.shown && this.shown.k < k && k - this.shown.k < EVERY ? this.shown : null;
    if (state) finish(state, this.iterations[state.k], this.requests), state.k++;
    else state = copy(this.checkpoints[Math.floor(k / EVERY)]);
    for (;; state.k++) {
      const its = this.iterations[state.k];
      for (const r of this.born.get(state.k) ?? [])
        if (!state.of.has(r.id)) state.of.set(r.id, fresh(r));
      begin(state, its);
      if (state.k === k) return this.shown = state;
      finish(state, its, this.requests);
    }
  }
  waiting(state, its) {
    const there = [...state.of.values()].filter(
      r => r.waits && !r.ended && this.requests.get(r.id).arrival <= its.start);
    const place = new Map(its.queue.map((id, i) => [id, i])), of = r => place.get(r.id) ?? 1e9;
    return there.sort((a, b) => of(a) - of(b) || a.id - b.id);
  }
  // all up to and with iteration k, in seconds, sorted
  so_far(k) {
    const until = pairs => {
      const length = search(pairs.length, i => pairs[i][0] > k);
      return Float64Array.from({length}, (_, i) => pairs[i][1]).sort();
    };
    return {ttft: until(this.ttfts), tbt: until(this.tbts)};
  }
}

const fresh = ({id, arrival: since}) =>
  ({id, since, computed: 0, found: 0, output: 0, pages: [], waits: true, ended: null});

function copy({k, of}) {  // who has ended is not needed again
  const alive = [...of].filter(([, r]) => !r.ended);
  return {k, of: new Map(alive.map(([id, r]) => [id, {...r, pages: [...r.pages]}]))};
}

function search(n, test) {  // the first of 0 ... n - 1 that passes, all after it do; or n
  let a = 0, b = n;
  while (a < b) {
    const middle = (a + b) >> 1;
    if (test(middle)) b = middle;
    else a = middle + 1;
  }
  return a;
}

// what is decided: who loses pages, who gets some; and `found`, [[request, tokens]]: where the first
// chunk begins behind what was computed, pages with the tokens before it were found in the cache
function begin(state, its) {
  for (const id of its.preempted) {
    const r = state.of.get(id);
    if (r) Object.assign(r, {computed: 0, found: 0, pages: [], waits: true});
  }
  for (const [id, first, ...pages] of its.pages) {
    const r = state.of.get(id);
    r.pages.length = first;
    r.pages.push(...pages);
    r.micro = its.micro_batch;
    r.waits = false;
  }
  its.found = [];
  for (const [id, start] of its.chunks) {
    const r = state.of.get(id);
    if (start <= r.computed) continue;
    r.computed = r.found = start;
    its.found.push([id, start]);
  }
}
// what it did: counters move on, tokens appear
function finish(state, its, requests, on_token = () => {}) {
  const token = r => {
    on_token(r.id, r.last, its.end, r.first === undefined);
    r.first ??= its.end;
    r.last = its.end;
    r.output++;
  };
  for (const [id, start, n] of its.chunks) {
    const r = state.of.get(id);
    r.computed = start + n;
    if (r.computed === requests.get(id).prompt_len + r.output) token(r);
  }
  for (const id of its.decodes) {
    const r = state.of.get(id);
    r.computed++;
    token(r);
  }
  for (const [id, reason] of its.ended) {
    const r = state.of.get(id);
    if (r) Object.assign(r, {ended: reason ?? "abort", pages: [], waits: false});
  }
}

// as numpy's: linear between the neighbours
function quantile(sorted, q) {
  if (!sorted.length) return null;
  const last = sorted.length - 1, at = last * q, low = Math.floor(at);
  const high = Math.min(low + 1, last);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low);
}

// ---- Words --------------------------------------------------------------------------------------

const count = n => n.toLocaleString("en");
const many = (n, one, more = one + "s") => `${count(n)} ${n === 1 ? one : more}`;
const names = ids =>
  ids.length > 4 ? `${ids.slice(0, 3).join(", ")} and ${ids.length - 3} more` : ids.join(", ");
function seconds(s) {
  if (s === null) return "–";
  if (s >= 100) return `${s.toFixed(0)} s`;
  return s < 0.1 ? `${(1e3 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
}

// why the policy did this, from the facts that were recorded
function explain(run, k) {
  const its = run.iterations[k], state = run.at(k), said = [];
  const prompt_len = id => run.requests.get(id).prompt_len;
  if (its.preempted.length) {
    const lost = `request ${names(its.preempted)} lost its pages and will be computed again`;
    said.push(`no page was free: ${lost}`);
  }
  said.push(explain_batch(its, id => prompt_len(id) + state.of.get(id).output));

  const batch = new Set([...its.decodes, ...its.chunks.map(chunk => chunk[0])]);
  const left_out = [...state.of.values()].filter(
    r => r.pages.length && r.micro === its.micro_batch && !batch.has(r.id));
  const decodes = r => r.output > 0 && r.computed + 1 === prompt_len(r.id) + r.output;
  const held = left_out.filter(decodes), begun = left_out.filter(r => !decodes(r)).map(r => r.id);
  if (held.length) {
    const wait = many(held.length, "running decode waits", "running decodes wait");
    said.push(`${wait}: this batch is of prefill alone`);
  }
  if (begun.length) {
    const none_left = its.budget !== null && its.tokens >= its.budget;
    const why = none_left ? "no budget left" : "this policy does not go on with it here";
    said.push(`request ${names(begun)} has begun its prompt and waits: ${why}`);
  }
  if (its.why) {
    const behind = its.waiting > 1 ? `, and ${its.waiting - 1} behind it` : "";
    said.push(`request ${its.queue[0]} waits${behind}: ${explain_why(...its.why)}`);
  }
  const text = said.join("; ");
  return text[0].toUpperCase() + text.slice(1) + ".";
}
function explain_batch(its, known) {  // `known`: how many tokens of a request there are
  const said = [], of = its.budget === null ? "" : ` of ${count(its.budget)}`;
  const found = new Map(its.found);
  if (its.decodes.length) {
    const alone = its.chunks.length ? " first" : " and no prefill";
    said.push(many(its.decodes.length, "decode") + alone);
  }
  for (const [id, start, n] of its.chunks.slice(0, 3)) {
    const place = `its ${count(start)} to ${count(start + n - 1)} of ${count(known(id))}`;
    const before = found.has(id) ? `; ${many(start, "token")} found in the cache` : "";
    const part = n === known(id) ? "its whole prompt" : place + before;
    said.push(`${said.length ? "then " : ""}${count(n)}${of} tokens for request ${id} (${part})`);
  }
  if (its.chunks.length > 3) said.push(`and chunks of ${its.chunks.length - 3} more`);
  return said.join(", ");
}
function explain_why(what, a, b) {  // see why_head_waits in schedule_page.py
  switch (what) {
    case "batch":
      return `${many(a, "request runs", "requests run")} already, the most at once`;
    case "pages": {
      const kept = a <= b ? ", which are kept for who runs" : "";
      return `it needs ${many(a, "page")} and ${b} ${b === 1 ? "is" : "are"} free${kept}`;
    }
    case "budget":
      if (!a) return "no budget left";
      return `its prompt, ${many(b, "token")} to compute, is not cut, and ${count(a)} are left of the budget`;
    default:
      return "this policy lets in nobody more in this iteration";
  }
}

// ---- Lanes --------------------------------------------------------------------------------------

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const is_dark = () => document.documentElement.dataset.theme === "dark";
const hue = id => `hsl(${(id * 137.508) % 360} 62% ${is_dark() ? 60 : 45}%)`;
const LEFT = 44, BARS = 64, AXIS = 22, RIGHT = 8;  // pixels
const MOST_LANES = 60;  // with a request each

class Lanes {
  constructor(run) {
    this.run = run;
    this.box = document.createElement("div");
    this.box.className = "run";
    this.box.innerHTML = `<strong></strong> <span class="soft"></span>
      <canvas class="over"></canvas><canvas role="img"></canvas>`;
    [this.name, this.says, this.over, this.canvas] = this.box.children;
    $("runs").append(this.box);
    let drag = null;  // where it began, and the view there
    this.canvas.onpointerdown = event => {
      drag = {x: event.clientX, moved: false, ...view};
      this.canvas.setPointerCapture(event.pointerId);
    };
    this.canvas.onpointermove = event => {
      if (!drag) return;
      const by = (drag.x - event.clientX) / this.width * (drag.to - drag.from);
      drag.moved ||= Math.abs(drag.x - event.clientX) > 4;
      if (drag.moved) look(drag.from + by, drag.to + by);
    };
    this.canvas.onpointerup = event => {
      if (drag && !drag.moved) {
        focus(this);
        go(this.run, index_at(this.run, this.time_at(event.offsetX)));
      }
      drag = null;
    };
    this.canvas.onpointercancel = () => { drag = null; };
    this.canvas.onwheel = event => {
      if (!event.ctrlKey) return;  // the page scrolls; a pinch has it, too
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 300), this.time_at(event.offsetX));
    };
  }
  get width() { return this.canvas.clientWidth - LEFT - RIGHT; }
  x(t) { return LEFT + (t - view.from) / (view.to - view.from) * this.width; }
  time_at(x) { return view.from + (x - LEFT) / this.width * (view.to - view.from); }

  layout() {  // a lane for each; or, where there are many, one for several that follow each other
    const ids = [...this.run.requests.keys()].sort((a, b) => a - b), ends = [];
    this.lane = new Map();
    for (const id of ids) {
      const {arrival} = this.run.requests.get(id), last = this.run.bars.get(id).at(-1);
      let free = ids.length > MOST_LANES ? ends.findIndex(end => end < arrival) : -1;
      if (free < 0) free = ends.push(0) - 1;
      ends[free] = this.run.state.of.get(id).ended === null ? Infinity : last?.[1] ?? 0;
      this.lane.set(id, free);
    }
    this.lanes = Math.max(1, ends.length);
    const fits = 400 / this.lanes;  // pixels
    this.each = fits < 2 ? fits : Math.min(14, Math.floor(fits));
    this.base = this.lanes * this.each + 6 + BARS;  // where the bars of the batches stand
    this.height = this.base + AXIS;
    this.laid = ids.length;
  }
  draw() {
    const {run, canvas} = this, scale = devicePixelRatio || 1, wide = canvas.clientWidth;
    if (data.live || run.requests.size !== this.laid) this.layout();
    for (const its of [canvas, this.over]) {
      its.width = wide * scale, its.height = this.height * scale;
      its.style.height = this.height + "px";
    }
    this.over.style.top = canvas.offsetTop + "px";
    const pen = canvas.getContext("2d"), step = (view.to - view.from) / this.width;
    const colors = ["--wait", "--prefill", "--decode", "--stall"].map(css);
    const thick = this.each > 3 ? this.each - 1 : this.each;
    pen.scale(scale, scale);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width, this.height);
    pen.clip();
    for (const kind of [WAIT, DECODE, STALL, PREFILL]) {
      pen.fillStyle = colors[kind];
      const thin = kind === STALL ? 1.5 : 0.7;
      for (const [id, bars] of run.bars) {
        const y = this.lane.get(id) * this.each;
        // ends are in order, but for who waited until a bar began
        let i = Math.max(0, search(bars.length, i => bars[i][1] >= view.from) - 2);
        for (let drawn = -Infinity; i < bars.length; i++) {
          const [from, to, its] = bars[i];
          if (its !== kind || from > view.to || to < view.from) continue;
          if (to < drawn + step / 2) continue;  // nothing is drawn twice on one pixel
          this.fill(pen, from, to, y, thick, thin);
          drawn = to;
        }
        const {waits, ended, since} = run.state.of.get(id);
        if (kind === WAIT && waits && !ended) this.fill(pen, since, run.end, y, thick, 0);
      }
    }
    this.draw_batches(pen, step);
    pen.restore();
    this.draw_axes(pen);
  }
  fill(pen, from, to, y, thick, thin) {  // a bar, with a gap behind it if there is room
    const a = Math.max(this.x(from), LEFT), b = Math.min(this.x(to), LEFT + this.width);
    pen.fillRect(a, y, Math.max(b - a > 4 ? b - a - 1 : b - a, thin), thick);
  }
  draw_batches(pen, step) {
    const its = this.run.iterations, first = index_at(this.run, view.from);
    const last = search(its.length, i => its[i].start >= view.to), budget = new Path2D();
    let tokens = 1, highest = 0;
    for (let i = first; i < last; i++) {
      tokens = Math.max(tokens, its[i].tokens);
      highest = Math.max(highest, its[i].budget ?? 0);
    }
    // a budget that is far from used up is not shown, or nobody could see the bars
    this.most = Math.max(tokens, Math.min(2 * tokens, highest));
    const y = n => this.base - n / this.most * (BARS - 6);
    const [decodes, prefills, both] = ["--decode", "--prefill", "--hybrid"].map(css);
    for (let i = first, high = 0, drawn = -Infinity; i < last; i++) {
      const {start, end, tokens, prefill} = its[i];
      high = Math.max(high, tokens);
      if (end < drawn + step / 2) continue;
      pen.fillStyle = !prefill ? decodes : prefill === tokens ? prefills : both;
      const x = this.x(start), wide = Math.max(this.x(end) - x, 0.7);
      pen.fillRect(x, y(high), wide > 4 ? wide - 1 : wide, this.base - y(high));
      if (its[i].budget !== null && its[i].budget <= this.most) {
        budget.moveTo(x, y(its[i].budget));
        budget.lineTo(x + wide, y(its[i].budget));
      }
      drawn = end, high = 0;
    }
    pen.strokeStyle = css("--ink");
    pen.stroke(budget);
  }
  draw_axes(pen) {
    pen.fillStyle = css("--soft");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillText(count(this.most), LEFT - 4, this.base - BARS + 14);
    pen.fillText("0", LEFT - 4, this.base);
    const every = Math.ceil(12 / this.each);
    for (const [id, lane] of this.laid > MOST_LANES ? [] : this.lane)
      if (lane % every === 0) pen.fillText(id, LEFT - 4, (lane + 0.5) * this.each + 4);
    pen.textAlign = "center";
    const rough = (view.to - view.from) / Math.max(2, this.width / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    for (let t = Math.ceil(view.from / unit) * unit; t <= view.to; t += unit) {
      pen.fillRect(this.x(t), this.base + 2, 1, 4);
      const x = Math.min(this.x(t), LEFT + this.width - 12);
      pen.fillText(`${+t.toFixed(6)} s`, x, this.base + 17);
    }
  }
  mark(its) {  // the cursor: the iteration that is looked at
    const pen = this.over.getContext("2d"), scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.over.width, this.over.height);
    if (!its) return;
    const a = Math.max(LEFT, this.x(its.start)), b = Math.min(this.x(its.end), LEFT + this.width);
    if (b < LEFT || a > LEFT + this.width) return;
    pen.globalAlpha = 0.22;
    pen.fillStyle = css("--ink");
    pen.fillRect(a, 0, Math.max(b - a, 1), this.height - AXIS);
    pen.globalAlpha = 1;
    pen.fillStyle = css("--accent");
    pen.fillRect(a, 0, 1.5, this.height - AXIS);
  }
}
function index_at(run, time) {  // the last iteration that had begun
  const {iterations} = run;
  return Math.max(0, search(iterations.length, i => iterations[i].start > time) - 1);
}

// ---- What is looked at --------------------------------------------------------------------------

const view = {from: 0, to: 1};
let panes = [], focused = null;  // Lanes: one, or two to compare; whose iterations are stepped
let cursor = 0, moment = 0;  // the iteration that is looked at, and the time that was chosen
let playing = false, follow = Boolean(data.live);
let dirty = true;  // true, "mark" or false: what is to be drawn
let told = 0, settling = 0;  // when numbers were written, and a timer to do so

function range() {  // of all that can be seen, in seconds
  const runs = panes.map(pane => pane.run), low = Math.min(...runs.map(run => run.begin));
  return [low, Math.max(...runs.map(run => run.end), low + 1e-3)];
}
function look(from, to) {
  const [low, high] = range();
  const span = Math.min(to - from, (high - low) * 1.02) || 1;
  view.from = Math.max(low, Math.min(from, low + (high - low) * 1.02 - span));
  view.to = view.from + span;
  dirty = true;
}
function zoom(factor, around = time_now()) {
  const span = Math.max((view.to - view.from) * factor, 1e-3);
  const share = (around - view.from) / (view.to - view.from);
  look(around - span * share, around + span * (1 - share));
}
const time_now = () => focused?.run.iterations[cursor]?.start ?? 0;
function go(run, k, chosen = true) {
  if (!run || !run.iterations.length) return;
  cursor = Math.max(0, Math.min(k, run.iterations.length - 1));
  const {start, end} = run.iterations[cursor], span = view.to - view.from;
  if (chosen) moment = start;
  if (start < view.from || end > view.to) look(start - span * 0.3, start + span * 0.7);
  dirty = dirty || "mark";
}
function step(by) { pause(); follow = false; go(focused?.run, cursor + by); }
function pause() {
  playing = false;
  $("why").setAttribute("aria-live", "polite");
  $("play").textContent = "play";
}
function play() {
  if (!focused) return;
  if (cursor >= focused.run.iterations.length - 1) cursor = 0;
  playing = true, follow = false;
  $("why").setAttribute("aria-live", "off");
  $("play").textContent = "pause";
}
function focus(pane) {
  focused = pane;
  for (const its of panes) its.box.classList.toggle("focused", its === pane && panes.length > 1);
  go(pane.run, index_at(pane.run, moment), false);
  $("scrub").max = pane.run.iterations.length - 1;
}

// ---- Panels -------------------------------------------------------------------------------------

function fill(table, rows) {  // the first row is the head
  const row = (cells, tag) => `<tr>${cells.map(its => `<${tag}>${its}</${tag}>`).join("")}</tr>`;
  table.innerHTML = rows.map((cells, i) => row(cells, i ? "td" : "th")).join("");
}
function fill_chips(box, chips, most) {  // chips: [request id, text]
  const key = id => `<span class="key" style="background:${hue(id)}"></span>`;
  const shown = chips.slice(0, most).map(([id, text]) => `<span>${key(id)}${id}: ${text}</span>`);
  const more = chips.length > most ? [`<span>and ${count(chips.length - most)} more</span>`] : [];
  box.innerHTML = [...shown, ...more].join("");
}

function details() {
  const {run} = focused, its = run.iterations[cursor], {settings} = run, state = run.at(cursor);
  const k = `iteration ${count(cursor + 1)} of ${count(run.iterations.length)}`;
  $("where").textContent = `${k}, at ${its.start.toFixed(3)} s`;
  $("why").textContent = explain(run, cursor);
  const took = [its.end - its.start, its.launch - its.start, its.end - its.launch].map(seconds);
  $("time").textContent = `took ${took[0]}: ${took[1]} to decide and prepare, ` +
    `${took[2]} to compute and fetch the tokens`;
  draw_batch(its, id => state.of.get(id).computed);

  const line = run.waiting(state, its);
  $("linename").textContent = `The line: ${many(line.length, "request waits", "requests wait")}`;
  fill_chips($("line"), line.map(({id}) => {
    const {prompt_len, arrival} = run.requests.get(id);
    return [id, `${many(prompt_len, "token")}, for ${seconds(its.start - arrival)}`];
  }), 30);

  const running = [...state.of.values()].filter(r => r.pages.length).sort((a, b) => a.id - b.id);
  const most = settings.max_batch * settings.micro_batches;
  $("runningname").textContent = `Running: ${running.length} of at most ${most}`;
  const rows = running.slice(0, 32).map(r => {
    const {prompt_len} = run.requests.get(r.id);
    const [found, all] = [r.found, r.computed].map(n => 100 * Math.min(1, n / prompt_len));
    const key = `<span class="key" style="background:${hue(r.id)}"></span>${r.id}`;
    const bar = `<span class="bar"><i class="found" style="width:${found}%"
      title="${many(r.found, "token")} found in the cache"></i><i style="width:${all - found}%">` +
      "</i></span>";
    return [key, count(r.computed), bar, count(prompt_len), count(r.output), r.pages.length];
  });
  if (running.length > 32) rows.push([`and ${running.length - 32} more`]);
  const head = running.some(r => r.found) ? "light: found" : "";
  fill($("running"), [["request", "computed", head, "of prompt", "output", "pages"], ...rows]);
  draw_pages(running, settings);
  clearTimeout(settling);  // to sort all gaps takes as long as a frame
  if (performance.now() - told > 250) numbers(run, its);
  else settling = setTimeout(() => numbers(run, its), 100);
}
function draw_batch(its, computed) {  // blocks as wide as they have tokens, up to the budget
  const budget = its.budget === null ? ", no budget" : ` of a budget of ${count(its.budget)}`;
  $("batchname").textContent = `The batch: ${many(its.tokens, "token")}${budget}`;
  const room = Math.max(its.budget ?? 0, its.tokens), left = room - its.tokens;
  const block = (n, look, text) =>
    `<div style="flex:${n / room * 1e4} 0 0;${look}" title="${text}">${text}</div>`;
  const green = "background:var(--decode)", blue = "background:var(--prefill)";
  $("blocks").innerHTML = [
    ...its.decodes.map(id => block(1, green, room < 40 ? id : "")),
    ...its.chunks.map(([id, , n]) => block(n, blue, `request ${id}: ${count(n)}`)),
    left > 0 ? block(left, "color:var(--soft)", `${count(left)} left`) : "",
  ].join("");
  const part = (start, n) => `tokens ${count(start)} to ${count(start + n - 1)}, prefill`;
  const found = new Map(its.found.map(([id, n]) => [id, `, ${count(n)} found in the cache`]));
  fill_chips($("chips"), [
    ...its.chunks.map(([id, start, n]) => [id, part(start, n) + (found.get(id) ?? "")]),
    ...its.decodes.map(id => [id, `token ${count(computed(id))}, decode`]),
  ], 60);
}
function numbers(run, its) {
  told = performance.now();
  const found = run.so_far(cursor), over = i => found.tbt[i] > SLO;
  const gaps = found.tbt.length - search(found.tbt.length, over);
  const row = (name, key) => [name, ...[0.5, 0.99, 1].map(
    q => `<span data-k="${key}-${q}">${seconds(quantile(found[key], q))}</span>`)];
  fill($("numbers"), [
    ["", "P50", "P99", "longest"],
    row("TTFT, arrival to first token", "ttft"),
    row("TBT, token to token", "tbt"),
    ...SLO < Infinity ? [[`gaps longer than ${seconds(SLO)}`, "", "", count(gaps)]] : [],
    ["requests with a first token", "", "", count(found.ttft.length)],
    ["preemptions", "", "", count(its.preemptions)],
    ...its.cached ? [["tokens found in the cache", "", "", count(its.cached)]] : [],
  ]);
}
function draw_pages(running, {pages, page_size, micro_batches}) {
  const canvas = $("pages"), pen = canvas.getContext("2d"), scale = devicePixelRatio || 1;
  const wide = canvas.parentElement.clientWidth - 24, fits = Math.sqrt(wide * 150 / pages);
  const size = Math.max(2, Math.min(18, Math.floor(fits))), inner = size > 4 ? size - 1 : size;
  const columns = Math.max(1, Math.floor(wide / size)), high = Math.ceil(pages / columns) * size;
  canvas.width = wide * scale, canvas.height = high * scale;
  canvas.style.width = wide + "px", canvas.style.height = high + "px";
  pen.scale(scale, scale);
  const cell = page => [page % columns * size, Math.floor(page / columns) * size];
  pen.fillStyle = css("--free");
  for (let page = 0; page < pages; page++) pen.fillRect(...cell(page), inner, inner);
  const readers = new Map();  // page -> [[request, how full the page is]]
  for (const r of running) {
    const first = (r.micro ?? 0) * Math.floor(pages / micro_batches);
    r.pages.forEach((page, i) => {
      const full = Math.max(0, Math.min(1, r.computed / page_size - i));
      if (!readers.has(first + page)) readers.set(first + page, []);
      readers.get(first + page).push([r.id, full]);
    });
  }
  for (const [page, its] of readers) {  // a stripe for each who reads it
    const [x, y] = cell(page), high = inner / its.length;
    its.forEach(([id, full], i) => {
      pen.fillStyle = hue(id);
      pen.globalAlpha = 0.3;
      pen.fillRect(x, y + i * high, inner, high);
      pen.globalAlpha = 1;
      pen.fillRect(x, y + i * high, inner * full, high);
    });
  }
  const shared = [...readers.values()].filter(its => its.length > 1).length;
  const striped = shared ? `, ${count(shared)} by several requests, striped` : "";
  $("pagesname").textContent = `The KV cache: ${count(readers.size)} of ${many(pages, "page")} ` +
    `taken${striped}, of ${many(page_size, "token")} each; pale: not yet written`;
}

// ---- The tour -----------------------------------------------------------------------------------

function most(list, value) {  // the index of the largest value above 0, or null
  let best = null, high = 0;
  list.forEach((its, i) => { if (value(its) > high) best = i, high = value(its); });
  return best;
}
function longest_gap(run) {  // its seconds, and the iteration in it with most of prefill
  const [last, seconds] = run.tbts[most(run.tbts, gap => gap[1])] ?? [];
  if (last === undefined) return null;
  const first = index_at(run, run.iterations[last].end - seconds);
  const k = first + (most(run.iterations.slice(first, last + 1), its => its.prefill) ?? 0);
  return {k, seconds};
}
// `find` says which iteration shows it, null: none; `at` which choices do, on a page with sliders
const TOUR = [
  {
    name: "What stalls", at: {policy: "vllm"},
    find: run => longest_gap(run)?.k ?? null,
    wide: run => longest_gap(run).seconds,
    text: (run, k) => [
      "Every lane is a request: grey while it waits, then its prompt is computed (prefill), then",
      "each green piece leads from one token to the next (decode).",
      k === null ? "" : `Here is the longest gap, ${seconds(longest_gap(run).seconds)}.`,
      "If somebody else's prompt is computed in between, all who decode must wait for it: a",
      "generation stall, red if it is longer than the SLO."],
  },
  {
    name: "What a chunk is", at: {policy: "sarathi-serve"},
    find: run => most(run.iterations, its =>
      its.chunks.some(([id, , n]) => n < run.requests.get(id).prompt_len)),
    text: (run, k) => [
      k === null ? "No prompt is cut in this run: each is computed whole."
        : "Here only a part of a prompt is computed, its next chunk.",
      "A request is a list of tokens and one counter: how many of them are computed. A chunk",
      "moves the counter on, and the last one yields the first token. The result is the same, to",
      "rounding."],
  },
  {
    name: "What rides along", at: {policy: "sarathi-serve"},
    find: run => most(run.iterations, its => its.chunks.length && its.decodes.length),
    text: (run, k) => [
      k === null ? "In this run no decode shares a batch with a prefill."
        : `Decodes beside a chunk: here ${run.iterations[k].decodes.length} of them.`,
      "A batch of decodes alone reads all weights of the model to compute a few rows. Beside a",
      "chunk the weights are read anyway, and a decode costs a fraction of that."],
  },
  {
    name: "What the budget does", at: {policy: "sarathi-serve"},
    find: run => most(run.iterations, its => its.why?.[0] === "budget" && its.tokens),
    text: (run, k) => [
      k === null ? "Nobody waits for budget in this run."
        : "Here the budget is used up and somebody waits for the next iteration.",
      "The token budget, the line over the bars, bounds how much is computed at once, and so how",
      "long a decode waits for its next token. Small: even steps, slow prompts. Large: the other",
      "way round."],
  },
  {
    name: "Memory and preemption", at: {policy: "sarathi-serve", memory: "tight", load: "heavy"},
    find: run => most(run.iterations, its => its.preempted.length)
      ?? most(run.iterations, its => 1 / (1 + its.free_pages)),
    text: (run, k) => [
      k === null || !run.iterations[k].preempted.length
        ? "Nobody is preempted in this run; here memory is fullest."
        : "Here a decode needed a page, none was free, and request " +
          `${run.iterations[k].preempted[0]} lost its own. It will be computed again.`,
      "Keys and values of all tokens stay in the cache, in pages. A request is admitted when its",
      "prompt fits, and takes a page more as it grows."],
  },
  {
    name: "Load and capacity", at: {policy: "vllm", load: "heavy"},
    find: run => most(run.iterations, its => its.waiting),
    text: (run, k) => [
      k === null ? "Nobody ever waits in this run."
        : `Here the line is longest: ${many(run.iterations[k].waiting, "request")}.`,
      "If more arrives than is computed, the line grows for ever. The capacity is the highest rate",
      "at which it does not, and the gaps between tokens still meet the SLO."],
  },
  {
    name: "Try it yourself", at: {policy: "sarathi-serve"},
    find: () => null,
    text: () => [
      "Space plays, ← and → step (ten with Shift), Home and End go to the ends, + and − zoom,",
      "0 shows all, d is for dark, t for this tour, s saves a trace for ui.perfetto.dev.",
      data.choices ? "Move the sliders: another policy, another chunk size, more load, less memory."
        : "If there are several runs, choose two above, and compare; o goes to the other.",
      "Ask of each red bar: who caused it? The sentence above the lanes says why each batch is as",
      "it is."],
  },
];
let stop_number = -1;
async function tour(n) {
  if (n < 0 || n >= TOUR.length) {
    $("tour").hidden = true;
    stop_number = -1;
    $("guide").focus();
    return;
  }
  stop_number = n;
  pause();
  follow = false;
  const stop = TOUR[n];
  if (data.choices) await choose({chunk: "256", memory: "ample", load: "steady", ...stop.at});
  const entry = data.choices ? null : data.runs.find(({name}) => name === stop.at.policy);
  if (entry && focused.run.name !== entry.name) await show([entry]);
  if (stop_number !== n) return;  // it was left meanwhile
  const {run} = focused, k = stop.find(run);
  $("stop").textContent = `${n + 1} of ${TOUR.length}: ${stop.name}`;
  $("told").textContent = stop.text(run, k).filter(Boolean).join(" ");
  $("tour").hidden = false;
  if (k === null) {
    look(-Infinity, Infinity);
    go(run, 0);
  } else {
    const {start, end} = run.iterations[k];
    const half = Math.max((end - start) * 7, (run.end - run.begin) / 80, stop.wide?.(run) ?? 0);
    go(run, k);
    look(start - half, start + half);
  }
  $("tournext").focus();
}

// ---- Choosing runs ------------------------------------------------------------------------------

const loaded = new Map();
let shows = 0;
async function load(entry) {
  if (loaded.has(entry)) return loaded.get(entry);
  const bytes = Uint8Array.from(atob(entry.data), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const run = new Run(entry.name, entry.settings);
  for (const record of await new Response(stream).json()) run.apply(record);
  loaded.set(entry, run);
  return run;
}
async function show(entries) {
  const turn = ++shows, runs = [];
  for (const entry of entries) runs.push(await load(entry));
  if (turn !== shows) return;  // something else was chosen meanwhile
  const [low, high] = range(), whole = !panes.length || view.from <= low && view.to >= high;
  const kept = whole ? {from: -Infinity, to: Infinity} : {...view};
  $("runs").innerHTML = "";
  panes = runs.map(run => new Lanes(run));
  for (const pane of panes) {
    const {ttft, tbt} = pane.run.so_far(Infinity), {run} = pane;
    pane.name.textContent = run.name.split(" | ").filter(part => part !== "*").join(", ");
    const [first, p99, longest] = [[ttft, 0.5], [tbt, 0.99], [tbt, 1]].map(its => quantile(...its));
    pane.says.textContent = `TTFT P50 ${seconds(first)}, TBT P99 ${seconds(p99)}, longest gap ` +
      `${seconds(longest)}; ${many(run.requests.size, "request")}, ${seconds(run.end - run.begin)}`;
    pane.canvas.setAttribute("aria-label", `timeline of ${run.name}`);
  }
  $("other").hidden = panes.length < 2;
  focus(panes[0]);
  look(kept.from, kept.to);
}
let choose = async () => {};  // show what the sliders say; or {name: value}, and set them so
function pickers() {
  if (data.choices) return sliders();
  if (data.runs.length < 2) return show(data.runs);
  const listed = data.runs.map(run => run.name);
  const one = select("run", listed), other = select("beside", ["nothing", ...listed]);
  other.selectedIndex = 2;
  const chosen = () => [data.runs[one.selectedIndex], data.runs[other.selectedIndex - 1]];
  one.oninput = other.oninput = () => show([...new Set(chosen().filter(Boolean))]);
  return one.oninput();
}
function sliders() {
  const axes = Object.entries(data.choices), beside = select("beside", ["nothing", ...axes[0][1]]);
  const inputs = axes.map(([name, values], i) => {
    const label = document.createElement("label"), middle = i && (values.length - 1) >> 1;
    label.innerHTML = `${name} <input type="range" min="0" max="${values.length - 1}"
      value="${middle}" id="choose-${name}"><output></output>`;
    beside.parentElement.before(label);
    return label.querySelector("input");
  });
  const part_of = (part, value) => part === "*" || part === value;
  choose = (wanted = {}) => {
    const at = axes.map(([name, values], i) => {
      const place = values.findIndex(value => wanted[name] && value.startsWith(wanted[name]));
      if (place >= 0) inputs[i].value = place;
      const value = values[inputs[i].value];
      inputs[i].nextElementSibling.textContent = value;
      inputs[i].setAttribute("aria-valuetext", value);
      return value;
    });
    const find = policy => data.runs.find(({name}) =>
      name.split(" | ").every((part, i) => part_of(part, i ? at[i] : policy)));
    const found = find(at[0]);
    inputs.forEach((input, i) => { input.disabled = found.name.split(" | ")[i] === "*"; });
    return show([found, find(beside.value)].filter(Boolean));
  };
  for (const its of [...inputs, beside]) its.oninput = () => choose();
  return choose();
}
function select(name, values) {
  const label = document.createElement("label"), box = document.createElement("select");
  box.id = name;
  box.append(...values.map(value => new Option(value)));
  label.append(name + " ", box);
  $("save").before(label);
  return box;
}

// ---- Live ---------------------------------------------------------------------------------------

async function connect() {  // ask for what is new, 4 times a second
  let run, place = NOWHERE;  // from there on; without a place, a snapshot of what is
  for (;; await new Promise(end => setTimeout(end, 250))) {
    const asked = fetch(`${data.live}/${place}`).then(answer => answer.json());
    const answer = await asked.catch(() => null);
    if (!answer) $("why").textContent = "The server does not answer; trying again.";
    else if (!run?.iterations.length) $("why").textContent = "Nothing yet: send a request.";
    for (const record of answer?.records ?? []) {
      if (record.live) run = new Run(data.title, {});  // begins anew, and forgets
      run.apply(record);
    }
    if (answer?.records.length) show_live(run);
    place = run?.iterations.length > MOST_LIVE ? NOWHERE : answer?.place ?? place;
  }
}
function show_live(run) {
  if (panes[0]?.run !== run) {
    $("runs").innerHTML = "";
    panes = [new Lanes(run)];
    panes[0].name.textContent = run.settings.policy;
    cursor = 0;
    focus(panes[0]);
  }
  $("scrub").max = run.iterations.length - 1;
  if (follow) cursor = Math.max(0, run.iterations.length - 1), look(run.end - 20, run.end + 0.4);
  dirty = true;
}

// ---- A trace for ui.perfetto.dev: Chrome's Trace Event Format -----------------------------------

const us = seconds => Math.round(1e6 * seconds);  // both ends of a slice alike: none can overlap
const slice = (pid, lane, name, from, to, args) =>
  ({name, pid, tid: lane + 1, ph: "X", ts: us(from), dur: us(to) - us(from), args});
const instant = (pid, lane, name, at, args) =>
  ({name, pid, tid: lane + 1, ph: "i", s: "t", ts: us(at), args});

function trace(runs) {  // as text, an event a line; those of the same time stay as they come
  const events = runs.flatMap((run, i) =>
    [...trace_batches(run, 2 * i + 1), ...trace_requests(run, 2 * i + 2)]);
  events.sort((a, b) => a.pid - b.pid || (a.ts ?? -1) - (b.ts ?? -1));
  const lines = events.map(event => JSON.stringify(event)).join(",\n");
  return `{"displayTimeUnit": "ms", "traceEvents": [\n${lines}\n]}\n`;
}
function labels(pid, name, lanes) {  // of a process and its lanes, [lane, name], in their order
  const label = (kind, name, tid) => [
    {ph: "M", name: `${kind}_name`, pid, tid, args: {name}},
    {ph: "M", name: `${kind}_sort_index`, pid, tid, args: {sort_index: tid ?? pid}}];
  const of_lanes = lanes.flatMap(([lane, name]) => label("thread", name, lane + 1));
  return [...label("process", name), ...of_lanes];
}
function* trace_batches({name, iterations, settings: {micro_batches: length}}, pid) {
  const lane = n => [n, length > 1 ? `micro-batch ${n}` : "iterations"], last = {};
  yield* labels(pid, `${name}: engine`, Array.from({length}, (_, n) => lane(n)));
  for (const {start, end, micro_batch: micro, prefill, tokens, budget, ...its} of iterations) {
    const kind = !prefill ? "decode" : prefill === tokens ? "prefill" : "hybrid";
    yield slice(pid, micro, kind, start, end);
    const curves = {  // which step
      tokens: {prefill, decode: tokens - prefill}, "free pages": {pages: its.free_pages},
      requests: {running: its.running, waiting: its.waiting},
      "token budget": budget === null ? last["token budget"] : {tokens: budget}};
    for (const [name, args] of Object.entries(curves))
      if (JSON.stringify(args) !== JSON.stringify(last[name]))
        yield {name, pid, ph: "C", ts: us(start), args: last[name] = args};
  }
}
function* trace_requests(run, pid) {
  const {iterations, bars} = run, rows = new Map();  // request -> its slice of decodes in a row
  yield* labels(pid, `${run.name}: requests`, [...bars.keys()].map(id => [id, `request ${id}`]));
  const micros = new Map(iterations.flatMap(
    ({chunks, micro_batch}) => chunks.map(([id]) => [id, micro_batch])));
  for (const [k, , id, since] of run.tbts) {  // stalls first: a slice comes before what it holds
    const {start, end, chunks, micro_batch: micro} = iterations[k], row = rows.get(id);
    const others = prefill_of_others(iterations, since, end, id, micros.get(id) ?? micro);
    const cause = others[most(others, ([, n]) => n)]?.[0];
    const prefill_tokens = others.reduce((sum, [, n]) => sum + n, 0);
    if (prefill_tokens)
      yield slice(pid, id, `stall, caused by ${cause}`, since, end, {prefill_tokens});
    if (prefill_tokens || chunks.some(([who]) => who === id)) rows.delete(id);
    else if (row) row.dur = us(end) - row.ts, row.args.tokens++;
    else yield rows.set(id, slice(pid, id, "decodes", start, end, {tokens: 1})).get(id);
  }
  for (const {start, end, chunks, preempted, found} of iterations) {
    for (const id of preempted) yield instant(pid, id, "preempted", start);
    for (const [id, n] of found)
      yield instant(pid, id, `${many(n, "token")} found in the cache`, start, {tokens: n});
    for (const [id, , n] of chunks) yield slice(pid, id, `prefill chunk of ${n}`, start, end);
  }
  for (const [id, its] of bars) {
    for (const [from, to, kind] of its)
      if (kind === WAIT) yield slice(pid, id, "waiting", from, to);
    const {ended: reason, waits, since} = run.state.of.get(id);
    const last = Math.max(since, its.at(-1)?.[1] ?? since);  // nobody wrote down when it ended
    const name = reason === "abort" ? "aborted" : "finished";
    if (reason) yield instant(pid, id, name, last, {reason});
    else if (waits && since < run.end) yield slice(pid, id, "waiting", since, run.end);
  }
}
// [[request, tokens]] of prefill between two tokens of `own`, in micro-batch `of`: an iteration
// counts if it begins there, as in find_stalls of experiments/metrics.py
function prefill_of_others(iterations, since, until, own, of) {
  const tokens = new Map(), first = search(iterations.length, i => iterations[i].start >= since);
  for (let i = first; iterations[i]?.start < until; i++)
    for (const [id, , n] of iterations[i].micro_batch === of ? iterations[i].chunks : [])
      if (id !== own) tokens.set(id, (tokens.get(id) ?? 0) + n);
  return [...tokens];
}
function save() {
  const link = document.createElement("a"), text = trace(panes.map(pane => pane.run));
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = `${data.title}.trace.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// ---- Keys, buttons, and one picture per frame ---------------------------------------------------

const actions = {
  first: () => step(-Infinity), back: () => step(-1), next: () => step(1),
  last: () => { step(Infinity); follow = Boolean(data.live); },
  play: () => playing ? pause() : play(),
  in: () => zoom(0.6), out: () => zoom(1.7), fit: () => look(-Infinity, Infinity),
  theme: () => theme(is_dark() ? "light" : "dark"),
  other: () => focus(panes.find(pane => pane !== focused) ?? focused),
  guide: () => tour(stop_number < 0 ? 0 : -1), tourback: () => tour(Math.max(0, stop_number - 1)),
  tournext: () => tour(stop_number + 1), tourend: () => tour(-1), save,
};
for (const [id, action] of Object.entries(actions))
  $(id).onclick = () => { if (focused) action(); };  // not before there is something to see
const KEYS = {
  " ": "play", ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", "+": "in",
  "=": "in", "-": "out", "0": "fit", o: "other", t: "guide", d: "theme", s: "save",
  Escape: "tourend",
};
document.addEventListener("keydown", event => {
  const {key, target} = event, big = event.shiftKey && {ArrowLeft: -10, ArrowRight: 10}[key];
  const own = target.matches("select") || target.matches("button") && key === " "
    || target.matches("input") && /^(Arrow|Home|End)/.test(key);  // what has the focus knows these
  if (own || event.ctrlKey || event.metaKey || event.altKey || !focused || !(key in KEYS)) return;
  if (key === "Escape" && stop_number < 0) return;
  event.preventDefault();
  if (big) step(big);
  else actions[KEYS[key]]();
});
$("scrub").oninput = () => { pause(); follow = false; go(focused.run, +$("scrub").value); };
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "light" : "dark";
  dirty = true;
}
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
addEventListener("resize", () => { dirty = true; });

let before = 0, owed = 0;
function frame(now) {
  requestAnimationFrame(frame);  // first: whatever goes wrong below, there is a next one
  if (playing) {
    owed += (now - before) / 1e3 * $("speed").value;
    if (owed >= 1) go(focused.run, cursor + Math.floor(owed)), owed %= 1;
    if (cursor >= focused.run.iterations.length - 1) pause();
  }
  before = now;
  if (dirty && focused?.run.iterations.length) {
    if (dirty === true) for (const pane of panes) pane.draw();
    for (const pane of panes) {
      const k = pane === focused ? cursor : index_at(pane.run, moment);
      pane.mark(pane.run.iterations[k]);
    }
    dirty = false;
    $("scrub").value = cursor;
    details();
  }
}
$("title").textContent = data.title;
$("machine").textContent = data.machine;
$("slo").textContent = SLO < Infinity ? seconds(SLO) : "an SLO";
$("scrub").max = 0;
(data.live ? Promise.resolve(void connect()) : pickers()).then(() => requestAnimationFrame(frame));
