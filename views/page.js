"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const SLO = data.slo_s ?? Infinity;
const CHECKPOINT_EVERY = 256;  // iterations
const MAX_LIVE_ITERATIONS = 20000;  // then a live page starts again from a snapshot
const NO_PLACE = 1e15;  // a place that no record has: the server answers with a snapshot
const WAIT = 0, PREFILL = 1, DECODE = 2, STALL = 3;  // kinds of bars in a lane

// ---- A run: its records, and the state of every request at every iteration ----------------------

class Run {
  constructor(name, settings) {
    this.name = name;
    this.settings = settings;
    this.iterations = [];
    this.requests = new Map();  // id -> the request as it arrived
    this.bars = new Map();  // request id -> [[start, end, kind, iteration]]
    this.ttfts = [];  // [iteration, seconds], in order
    this.tbts = [];  // [iteration, seconds, request id, start of the gap], in order
    this.checkpoints = [];  // the state before each CHECKPOINT_EVERY-th iteration
    this.arrivals = new Map();  // iteration -> the requests that are recorded first before it
    this.state = {k: 0, progress: new Map()};  // before iteration k: request id -> its progress
    this.shown_state = null;
  }
  get end() { return this.iterations.at(-1)?.end ?? 0; }
  get begin() { return this.first_arrival ?? this.iterations[0]?.start ?? 0; }

  apply(record) {
    if (record.live) {
      Object.assign(this.settings, record.settings);
      for (const request of record.live) this.add_request(request, request);
    } else if (record.request) {
      this.add_request(record.request);
    } else {
      this.add_iteration(record);
    }
  }
  // `snapshot` is given if the request has been served before the first record
  add_request(request, snapshot) {
    this.requests.set(request.id, request);
    this.bars.set(request.id, []);
    this.first_arrival = Math.min(this.first_arrival ?? request.arrival, request.arrival);
    const k = this.iterations.length;
    if (!this.arrivals.has(k)) this.arrivals.set(k, []);
    this.arrivals.get(k).push(request);
    const progress = new_progress(request);
    if (snapshot) {
      [progress.first, progress.last] = snapshot.times;
      progress.since = progress.last ?? request.arrival;  // if it waits, then not for longer
      progress.computed = snapshot.num_computed;
      progress.output = snapshot.output;
      progress.pages = [...snapshot.pages];
      progress.waits = !snapshot.pages.length;
    }
    this.state.progress.set(request.id, progress);
  }
  add_iteration(iteration) {
    const k = this.iterations.length, {progress} = this.state;
    const before = this.iterations[k - 1];
    this.state.k = k;
    if (k % CHECKPOINT_EVERY === 0) this.checkpoints.push(copy_state(this.state));
    iteration.prefill = iteration.chunks.reduce((sum, [, , length]) => sum + length, 0);
    iteration.tokens = iteration.prefill + iteration.decodes.length;
    iteration.preemptions = iteration.preempted.length + (before?.preemptions ?? 0);  // so far
    this.iterations.push(iteration);
    for (const id of iteration.preempted)
      if (progress.has(id)) progress.get(id).since = iteration.start;
    for (const [id] of iteration.chunks) {
      const {waits, since} = progress.get(id), bars = this.bars.get(id);
      const waited = waits || iteration.preempted.includes(id);
      if (waited && iteration.start > since) bars.push([since, iteration.start, WAIT, k]);
      bars.push([iteration.start, iteration.end, PREFILL, k]);
    }
    begin_iteration(this.state, iteration);
    const hits = iteration.cache_hits.reduce((sum, [, tokens]) => sum + tokens, 0);
    iteration.cached_tokens = hits + (before?.cached_tokens ?? 0);  // so far
    finish_iteration(this.state, iteration, this.requests, (id, since, until, is_first) => {
      if (is_first) this.ttfts.push([k, until - this.requests.get(id).arrival]);
      else this.add_gap(k, id, since, until);
    });
  }
  add_gap(k, id, since, until) {
    this.tbts.push([k, until - since, id, since]);
    const bars = this.bars.get(id), last = bars.at(-1);
    const is_stall = until - since > SLO;
    // the bars since the last token lie in this gap: a stall covers them, else chunks lie on it
    if (!is_stall && last && last[2] === DECODE && last[1] === since) last[1] = until;
    else bars.push([since, until, is_stall ? STALL : DECODE, k]);
  }
  // the state when iteration k had been decided: counters before it, and pages with the new ones
  at(k) {
    let state = this.shown_state;
    if (state?.k === k) return state;
    if (state && state.k < k && k - state.k < CHECKPOINT_EVERY) {
      finish_iteration(state, this.iterations[state.k], this.requests);
      state.k++;
    } else {
      state = copy_state(this.checkpoints[Math.floor(k / CHECKPOINT_EVERY)]);
    }
    for (;; state.k++) {
      const iteration = this.iterations[state.k];
      for (const request of this.arrivals.get(state.k) ?? [])
        if (!state.progress.has(request.id)) state.progress.set(request.id, new_progress(request));
      begin_iteration(state, iteration);
      if (state.k === k) {
        this.shown_state = state;
        return state;
      }
      finish_iteration(state, iteration, this.requests);
    }
  }
  // the progress of requests that wait as an iteration starts, in the order of the queue
  waiting(state, iteration) {
    const waiting = [...state.progress.values()].filter(({id, waits, ended}) =>
      waits && !ended && this.requests.get(id).arrival <= iteration.start);
    const places = new Map(iteration.queue.map((id, i) => [id, i]));
    const place_of = ({id}) => places.get(id) ?? 1e9;
    return waiting.sort((a, b) => place_of(a) - place_of(b) || a.id - b.id);
  }
  // all latencies up to and with iteration k, in seconds, sorted
  so_far(k) {
    const sorted_until = pairs => {
      const length = search(pairs.length, i => pairs[i][0] > k);
      return Float64Array.from({length}, (_, i) => pairs[i][1]).sort();
    };
    return {ttft: sorted_until(this.ttfts), tbt: sorted_until(this.tbts)};
  }
}

// `since`: when it began to wait; `cached`: tokens that were found in the cache at admission;
// `first` and `last`: when its first and its last token came, once there are any
function new_progress({id, arrival}) {
  return {
    id, since: arrival, computed: 0, cached: 0, output: 0, pages: [], waits: true, ended: null,
  };
}
function copy_state({k, progress}) {  // without requests that have ended
  const copy = new Map();
  for (const [id, request] of progress)
    if (!request.ended) copy.set(id, {...request, pages: [...request.pages]});
  return {k, progress: copy};
}

// the first of 0 ... n - 1 that passes a test which all after it pass, too; n if there is none
function search(n, passes) {
  let low = 0, high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (passes(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Apply what was decided: requests lose pages, and others get some. Sets iteration.cache_hits,
// [[request, tokens]]: if a first chunk begins behind the computed tokens, then pages with the
// tokens before it were found in the cache.
function begin_iteration({progress}, iteration) {
  for (const id of iteration.preempted) {
    const request = progress.get(id);
    if (request) Object.assign(request, {computed: 0, cached: 0, pages: [], waits: true});
  }
  for (const [id, first, ...pages] of iteration.pages) {
    const request = progress.get(id);
    request.pages.length = first;
    request.pages.push(...pages);
    request.micro_batch = iteration.micro_batch;
    request.waits = false;
  }
  iteration.cache_hits = [];
  for (const [id, start] of iteration.chunks) {
    const request = progress.get(id);
    if (start <= request.computed) continue;
    request.computed = start;
    request.cached = start;
    iteration.cache_hits.push([id, start]);
  }
}
// Apply what was computed: counters move on, and tokens appear.
// on_token(id, time of the token before, its own time, whether it is the first)
function finish_iteration({progress}, iteration, requests, on_token = () => {}) {
  const add_token = request => {
    on_token(request.id, request.last, iteration.end, request.first === undefined);
    request.first ??= iteration.end;
    request.last = iteration.end;
    request.output++;
  };
  for (const [id, start, length] of iteration.chunks) {
    const request = progress.get(id);
    request.computed = start + length;
    if (request.computed === requests.get(id).prompt_len + request.output) add_token(request);
  }
  for (const id of iteration.decodes) {
    const request = progress.get(id);
    request.computed++;
    add_token(request);
  }
  for (const [id, reason] of iteration.ended) {
    const request = progress.get(id);
    if (request) Object.assign(request, {ended: reason ?? "abort", pages: [], waits: false});
  }
}

// as numpy's: linear between the neighbours
function quantile(sorted, q) {
  if (!sorted.length) return null;
  const last = sorted.length - 1;
  const place = last * q, low = Math.floor(place), high = Math.min(low + 1, last);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

// ---- Numbers and sentences ----------------------------------------------------------------------

const format_count = n => n.toLocaleString("en");
function counted(n, singular, plural = singular + "s") {
  return `${format_count(n)} ${n === 1 ? singular : plural}`;
}
function list_ids(ids) {
  if (ids.length <= 4) return ids.join(", ");
  return `${ids.slice(0, 3).join(", ")} and ${ids.length - 3} more`;
}
function format_seconds(s) {
  if (s === null) return "–";
  if (s >= 100) return `${s.toFixed(0)} s`;
  return s < 0.1 ? `${(1e3 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
}

// why the policy made this batch, from the facts that were recorded
function explain(run, k) {
  const iteration = run.iterations[k], state = run.at(k), sentences = [];
  const length_of = id => run.requests.get(id).prompt_len + state.progress.get(id).output;
  if (iteration.preempted.length) {
    const ids = list_ids(iteration.preempted);
    sentences.push(`no page was free: request ${ids} lost its pages and will be computed again`);
  }
  sentences.push(explain_batch(iteration, length_of));

  const batch = new Set([...iteration.decodes, ...iteration.chunks.map(([id]) => id)]);
  const left_out = [...state.progress.values()].filter(({id, pages, micro_batch}) =>
    pages.length && micro_batch === iteration.micro_batch && !batch.has(id));
  const is_decoding = ({id, computed, output}) => output > 0 && computed + 1 === length_of(id);
  const decodes = left_out.filter(is_decoding);
  const prefills = left_out.filter(request => !is_decoding(request));
  if (decodes.length) {
    const wait = counted(decodes.length, "running decode waits", "running decodes wait");
    sentences.push(`${wait}: this batch is of prefill alone`);
  }
  if (prefills.length) {
    const no_budget = iteration.budget !== null && iteration.tokens >= iteration.budget;
    const reason = no_budget ? "no budget left" : "this policy does not go on with it here";
    const ids = list_ids(prefills.map(({id}) => id));
    sentences.push(`request ${ids} has begun its prompt and waits: ${reason}`);
  }
  if (iteration.why) {
    const behind = iteration.waiting > 1 ? `, and ${iteration.waiting - 1} behind it` : "";
    const reason = explain_waiting(...iteration.why);
    sentences.push(`request ${iteration.queue[0]} waits${behind}: ${reason}`);
  }
  const text = sentences.join("; ");
  return text[0].toUpperCase() + text.slice(1) + ".";
}
function explain_batch(iteration, length_of) {  // length_of(id): the tokens of a request
  const {budget, chunks, decodes} = iteration, parts = [];
  const cache_hits = new Map(iteration.cache_hits);
  if (decodes.length) {
    const order = chunks.length ? "first" : "and no prefill";
    parts.push(`${counted(decodes.length, "decode")} ${order}`);
  }
  for (const [id, start, n] of chunks.slice(0, 3)) {
    const length = length_of(id);
    let part = "its whole prompt";
    if (n !== length) {
      const last = format_count(start + n - 1);
      part = `its ${format_count(start)} to ${last} of ${format_count(length)}`;
      if (cache_hits.has(id)) part += `; ${counted(start, "token")} found in the cache`;
    }
    const then = parts.length ? "then " : "";
    const of_budget = budget === null ? "" : ` of ${format_count(budget)}`;
    parts.push(`${then}${format_count(n)}${of_budget} tokens for request ${id} (${part})`);
  }
  if (chunks.length > 3) parts.push(`and chunks of ${chunks.length - 3} more`);
  return parts.join(", ");
}
function explain_waiting(reason, a, b) {  // see why_head_waits in page.py
  switch (reason) {
    case "batch":
      return `${counted(a, "request runs", "requests run")} already, the most at once`;
    case "pages": {
      const are_free = b === 1 ? "is free" : "are free";
      const kept = a <= b ? ", which are kept for who runs" : "";
      return `it needs ${counted(a, "page")} and ${b} ${are_free}${kept}`;
    }
    case "budget": {
      if (!a) return "no budget left";
      const prompt = `its prompt, ${counted(b, "token")} to compute, is not cut`;
      return `${prompt}, and ${format_count(a)} are left of the budget`;
    }
    default:
      return "this policy lets in nobody more in this iteration";
  }
}

// ---- Lanes: a canvas with the bars of all requests, and of all batches --------------------------

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const is_dark = () => document.documentElement.dataset.theme === "dark";
const color_of = id => `hsl(${(id * 137.508) % 360} 62% ${is_dark() ? 60 : 45}%)`;
const LEFT = 44, BATCHES_HEIGHT = 64, AXIS_HEIGHT = 22, RIGHT = 8;  // pixels
const MAX_LANES = 60;  // with a request each

class Lanes {
  constructor(run) {
    this.run = run;
    this.box = document.createElement("div");
    this.box.className = "run";
    this.box.innerHTML = `<strong></strong> <span class="soft"></span>
      <canvas class="over"></canvas><canvas role="img"></canvas>`;
    [this.name, this.summary, this.over, this.canvas] = this.box.children;
    $("runs").append(this.box);
    this.listen();
  }
  listen() {
    const {canvas} = this;
    let drag = null;  // where it began, and the view there
    canvas.onpointerdown = event => {
      drag = {x: event.clientX, moved: false, ...view};
      canvas.setPointerCapture(event.pointerId);
    };
    canvas.onpointermove = event => {
      if (!drag) return;
      const pixels = drag.x - event.clientX;
      const seconds = pixels / this.width * (drag.to - drag.from);
      drag.moved ||= Math.abs(pixels) > 4;
      if (drag.moved) set_view(drag.from + seconds, drag.to + seconds);
    };
    canvas.onpointerup = event => {
      if (drag && !drag.moved) {
        focus(this);
        go(this.run, index_at(this.run, this.time_at(event.offsetX)));
      }
      drag = null;
    };
    canvas.onpointercancel = () => { drag = null; };
    canvas.onwheel = event => {
      if (!event.ctrlKey) return;  // the page scrolls; a pinch has it, too
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 300), this.time_at(event.offsetX));
    };
  }
  get width() { return this.canvas.clientWidth - LEFT - RIGHT; }
  x(t) { return LEFT + (t - view.from) / (view.to - view.from) * this.width; }
  time_at(x) { return view.from + (x - LEFT) / this.width * (view.to - view.from); }

  // A lane for each request; where there are many, one for several that follow each other.
  layout() {
    const ids = [...this.run.requests.keys()].sort((a, b) => a - b);
    const share = ids.length > MAX_LANES;
    const lane_ends = [];  // when the last request in a lane has ended
    this.lane_of = new Map();
    for (const id of ids) {
      const {arrival} = this.run.requests.get(id);
      let lane = share ? lane_ends.findIndex(end => end < arrival) : -1;
      if (lane < 0) lane = lane_ends.push(0) - 1;
      const {ended} = this.run.state.progress.get(id), last_bar = this.run.bars.get(id).at(-1);
      lane_ends[lane] = ended === null ? Infinity : last_bar?.[1] ?? 0;
      this.lane_of.set(id, lane);
    }
    const lanes = Math.max(1, lane_ends.length);
    const fitting = 400 / lanes;  // pixels
    this.lane_height = fitting < 2 ? fitting : Math.min(14, Math.floor(fitting));
    this.base = lanes * this.lane_height + 6 + BATCHES_HEIGHT;  // the lower end of the batches
    this.height = this.base + AXIS_HEIGHT;
    this.laid_out = ids.length;
  }
  draw() {
    const {run, canvas} = this;
    if (data.live || run.requests.size !== this.laid_out) this.layout();
    const scale = devicePixelRatio || 1, width = canvas.clientWidth;
    for (const layer of [canvas, this.over]) {
      layer.width = width * scale;
      layer.height = this.height * scale;
      layer.style.height = this.height + "px";
    }
    this.over.style.top = canvas.offsetTop + "px";
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width, this.height);
    pen.clip();
    this.draw_bars(pen, WAIT, css("--wait"));
    this.draw_bars(pen, DECODE, css("--decode"));
    this.draw_bars(pen, STALL, css("--stall"));
    this.draw_bars(pen, PREFILL, css("--prefill"));
    this.draw_batches(pen);
    pen.restore();
    this.draw_axes(pen);
  }
  get seconds_per_pixel() { return (view.to - view.from) / this.width; }
  draw_bars(pen, drawn_kind, color) {
    const {run} = this;
    const height = this.lane_height > 3 ? this.lane_height - 1 : this.lane_height;
    const min_width = drawn_kind === STALL ? 1.5 : 0.7;
    const half_pixel = this.seconds_per_pixel / 2;
    pen.fillStyle = color;
    for (const [id, bars] of run.bars) {
      const y = this.lane_of.get(id) * this.lane_height;
      // ends are in order, but for a wait, which ends where the next bar begins
      const first = Math.max(0, search(bars.length, i => bars[i][1] >= view.from) - 2);
      let drawn_to = -Infinity;
      for (let i = first; i < bars.length; i++) {
        const [from, to, kind] = bars[i];
        if (kind !== drawn_kind || from > view.to || to < view.from) continue;
        if (to < drawn_to + half_pixel) continue;  // nothing is drawn twice on one pixel
        this.fill_bar(pen, from, to, y, height, min_width);
        drawn_to = to;
      }
      const {waits, ended, since} = run.state.progress.get(id);
      if (drawn_kind === WAIT && waits && !ended)
        this.fill_bar(pen, since, run.end, y, height, 0);
    }
  }
  fill_bar(pen, from, to, y, height, min_width) {  // with a gap behind it if there is room
    const left = Math.max(this.x(from), LEFT), right = Math.min(this.x(to), LEFT + this.width);
    const width = right - left;
    pen.fillRect(left, y, Math.max(width > 4 ? width - 1 : width, min_width), height);
  }
  draw_batches(pen) {
    const {iterations} = this.run, half_pixel = this.seconds_per_pixel / 2;
    const first = index_at(this.run, view.from);
    const last = search(iterations.length, i => iterations[i].start >= view.to);
    const visible = iterations.slice(first, last);
    let max_tokens = 1, max_budget = 0;
    for (const {tokens, budget} of visible) {
      max_tokens = Math.max(max_tokens, tokens);
      max_budget = Math.max(max_budget, budget ?? 0);
    }
    // a budget that is far from used up is not shown, or the bars would be too low to see
    this.top_tokens = Math.max(max_tokens, Math.min(2 * max_tokens, max_budget));
    const y_of = n => this.base - n / this.top_tokens * (BATCHES_HEIGHT - 6);
    const [decodes, prefills, both] = ["--decode", "--prefill", "--hybrid"].map(css);
    const budget_line = new Path2D();
    let highest = 0, drawn_to = -Infinity;  // of the batches on one pixel the highest is drawn
    for (const {start, end, tokens, prefill, budget} of visible) {
      highest = Math.max(highest, tokens);
      if (end < drawn_to + half_pixel) continue;
      if (!prefill) pen.fillStyle = decodes;
      else pen.fillStyle = prefill === tokens ? prefills : both;
      const x = this.x(start), width = Math.max(this.x(end) - x, 0.7);
      pen.fillRect(x, y_of(highest), width > 4 ? width - 1 : width, this.base - y_of(highest));
      if (budget !== null && budget <= this.top_tokens) {
        budget_line.moveTo(x, y_of(budget));
        budget_line.lineTo(x + width, y_of(budget));
      }
      drawn_to = end;
      highest = 0;
    }
    pen.strokeStyle = css("--ink");
    pen.stroke(budget_line);
  }
  draw_axes(pen) {
    pen.fillStyle = css("--soft");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillText(format_count(this.top_tokens), LEFT - 4, this.base - BATCHES_HEIGHT + 14);
    pen.fillText("0", LEFT - 4, this.base);
    const label_every = Math.ceil(12 / this.lane_height);
    for (const [id, lane] of this.laid_out > MAX_LANES ? [] : this.lane_of)
      if (lane % label_every === 0) pen.fillText(id, LEFT - 4, (lane + 0.5) * this.lane_height + 4);
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
  draw_cursor(iteration) {  // the iteration that is looked at
    const pen = this.over.getContext("2d"), scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.over.width, this.over.height);
    if (!iteration) return;
    const left = Math.max(LEFT, this.x(iteration.start));
    const right = Math.min(this.x(iteration.end), LEFT + this.width);
    if (right < LEFT || left > LEFT + this.width) return;
    const height = this.height - AXIS_HEIGHT;
    pen.globalAlpha = 0.22;
    pen.fillStyle = css("--ink");
    pen.fillRect(left, 0, Math.max(right - left, 1), height);
    pen.globalAlpha = 1;
    pen.fillStyle = css("--accent");
    pen.fillRect(left, 0, 1.5, height);
  }
}
function index_at(run, time) {  // the last iteration that had begun
  const {iterations} = run;
  return Math.max(0, search(iterations.length, i => iterations[i].start > time) - 1);
}

// ---- The view: which seconds, and which iteration -----------------------------------------------

const view = {from: 0, to: 1};  // seconds
let panes = [];  // Lanes: one, or two to compare
let focused = null;  // the one whose iterations are stepped
let cursor = 0;  // the iteration that is looked at
let moment = 0;  // the time that was chosen
let playing = false, follow = Boolean(data.live);
let dirty = true;  // what is to be drawn: true, "cursor" or false

function range() {  // of all runs, in seconds
  const runs = panes.map(pane => pane.run), low = Math.min(...runs.map(run => run.begin));
  return [low, Math.max(...runs.map(run => run.end), low + 1e-3)];
}
function set_view(from, to) {
  const [low, high] = range(), length = (high - low) * 1.02;
  const span = Math.min(to - from, length) || 1;
  view.from = Math.max(low, Math.min(from, low + length - span));
  view.to = view.from + span;
  dirty = true;
}
function zoom(factor, around = time_now()) {
  const span = Math.max((view.to - view.from) * factor, 1e-3);
  const share = (around - view.from) / (view.to - view.from);
  set_view(around - span * share, around + span * (1 - share));
}
const time_now = () => focused?.run.iterations[cursor]?.start ?? 0;
function go(run, k, chosen = true) {
  if (!run || !run.iterations.length) return;
  cursor = Math.max(0, Math.min(k, run.iterations.length - 1));
  const {start, end} = run.iterations[cursor], span = view.to - view.from;
  if (chosen) moment = start;
  if (start < view.from || end > view.to) set_view(start - span * 0.3, start + span * 0.7);
  dirty = dirty || "cursor";
}
function step(count) {
  pause();
  follow = false;
  go(focused?.run, cursor + count);
}
function pause() {
  playing = false;
  $("why").setAttribute("aria-live", "polite");
  $("play").textContent = "play";
}
function play() {
  if (!focused) return;
  if (cursor >= focused.run.iterations.length - 1) cursor = 0;
  playing = true;
  follow = false;
  $("why").setAttribute("aria-live", "off");
  $("play").textContent = "pause";
}
function focus(pane) {
  focused = pane;
  for (const other of panes)
    other.box.classList.toggle("focused", other === pane && panes.length > 1);
  go(pane.run, index_at(pane.run, moment), false);
  $("scrub").max = pane.run.iterations.length - 1;
}

// ---- Panels: one iteration in numbers -----------------------------------------------------------

function fill_table(table, rows) {  // the first row is the head
  const row_html = (cells, tag) =>
    `<tr>${cells.map(cell => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  table.innerHTML = rows.map((cells, i) => row_html(cells, i ? "td" : "th")).join("");
}
const key_html = id => `<span class="key" style="background:${color_of(id)}"></span>`;
function fill_chips(box, chips, limit) {  // chips: [request id, text]
  const html = chips.slice(0, limit).map(([id, text]) =>
    `<span>${key_html(id)}${id}: ${text}</span>`);
  const hidden = chips.length - limit;
  if (hidden > 0) html.push(`<span>and ${format_count(hidden)} more</span>`);
  box.innerHTML = html.join("");
}

let numbers_written = 0, numbers_timer = 0;  // when that was, and a timer to do so
function show_details() {
  const {run} = focused, iteration = run.iterations[cursor], state = run.at(cursor);
  const number = `${format_count(cursor + 1)} of ${format_count(run.iterations.length)}`;
  $("position").textContent = `iteration ${number}, at ${iteration.start.toFixed(3)} s`;
  $("why").textContent = explain(run, cursor);
  const {start, launch, end} = iteration;
  $("time").textContent = `took ${format_seconds(end - start)}: ` +
    `${format_seconds(launch - start)} to decide and prepare, ` +
    `${format_seconds(end - launch)} to compute and fetch the tokens`;
  show_batch(iteration, id => state.progress.get(id).computed);
  show_queue(run, state, iteration);
  const running = [...state.progress.values()].filter(({pages}) => pages.length);
  running.sort((a, b) => a.id - b.id);
  show_running(run, running);
  show_pages(running, run.settings);
  clearTimeout(numbers_timer);  // to sort all gaps takes as long as a frame
  if (performance.now() - numbers_written > 250) show_numbers(run, iteration);
  else numbers_timer = setTimeout(() => show_numbers(run, iteration), 100);
}
// blocks as wide as they have tokens, up to the budget; computed(id): the tokens of a request
function show_batch({tokens, budget, decodes, chunks, cache_hits}, computed) {
  const of_budget = budget === null ? ", no budget" : ` of a budget of ${format_count(budget)}`;
  $("batchname").textContent = `The batch: ${counted(tokens, "token")}${of_budget}`;
  const room = Math.max(budget ?? 0, tokens), left = room - tokens;
  const block = (n, style, text) =>
    `<div style="flex:${n / room * 1e4} 0 0;${style}" title="${text}">${text}</div>`;
  const green = "background:var(--decode)", blue = "background:var(--prefill)";
  $("blocks").innerHTML = [
    ...decodes.map(id => block(1, green, room < 40 ? id : "")),
    ...chunks.map(([id, , n]) => block(n, blue, `request ${id}: ${format_count(n)}`)),
    left > 0 ? block(left, "color:var(--soft)", `${format_count(left)} left`) : "",
  ].join("");
  const hits = new Map(cache_hits);
  const describe_chunk = (id, start, n) => {
    const text = `tokens ${format_count(start)} to ${format_count(start + n - 1)}, prefill`;
    return hits.has(id) ? `${text}, ${format_count(hits.get(id))} found in the cache` : text;
  };
  fill_chips($("chips"), [
    ...chunks.map(([id, start, n]) => [id, describe_chunk(id, start, n)]),
    ...decodes.map(id => [id, `token ${format_count(computed(id))}, decode`]),
  ], 60);
}
function show_queue(run, state, iteration) {
  const queue = run.waiting(state, iteration);
  const count = counted(queue.length, "request waits", "requests wait");
  $("queuename").textContent = `The queue: ${count}`;
  fill_chips($("queue"), queue.map(({id}) => {
    const {prompt_len, arrival} = run.requests.get(id);
    const waited = format_seconds(iteration.start - arrival);
    return [id, `${counted(prompt_len, "token")}, for ${waited}`];
  }), 30);
}
function show_running(run, running) {
  const {max_batch, micro_batches} = run.settings;
  $("runningname").textContent =
    `Running: ${running.length} of at most ${max_batch * micro_batches}`;
  const rows = running.slice(0, 32).map(({id, computed, cached, output, pages}) => {
    const {prompt_len} = run.requests.get(id);
    const percent = n => 100 * Math.min(1, n / prompt_len);
    const bar = `<span class="bar"><i class="cached" style="width:${percent(cached)}%"
      title="${counted(cached, "token")} found in the cache"></i>` +
      `<i style="width:${percent(computed) - percent(cached)}%"></i></span>`;
    return [key_html(id) + id, format_count(computed), bar, format_count(prompt_len),
      format_count(output), pages.length];
  });
  if (running.length > 32) rows.push([`and ${running.length - 32} more`]);
  const bar_head = running.some(({cached}) => cached) ? "light: found" : "";
  const head = ["request", "computed", bar_head, "of prompt", "output", "pages"];
  fill_table($("running"), [head, ...rows]);
}
function show_numbers(run, {preemptions, cached_tokens}) {
  numbers_written = performance.now();
  const latencies = run.so_far(cursor), {ttft, tbt} = latencies;
  const row = (name, key) => [name, ...[0.5, 0.99, 1].map(q => {
    const text = format_seconds(quantile(latencies[key], q));
    return `<span data-k="${key}-${q}">${text}</span>`;
  })];
  const rows = [
    ["", "P50", "P99", "longest"],
    row("TTFT, arrival to first token", "ttft"),
    row("TBT, token to token", "tbt"),
  ];
  if (SLO < Infinity) {
    const stalls = tbt.length - search(tbt.length, i => tbt[i] > SLO);
    rows.push([`gaps longer than ${format_seconds(SLO)}`, "", "", format_count(stalls)]);
  }
  rows.push(["requests with a first token", "", "", format_count(ttft.length)]);
  rows.push(["preemptions", "", "", format_count(preemptions)]);
  if (cached_tokens) rows.push(["tokens found in the cache", "", "", format_count(cached_tokens)]);
  fill_table($("numbers"), rows);
}
function show_pages(running, {pages, page_size, micro_batches}) {
  const canvas = $("pages"), pen = canvas.getContext("2d"), scale = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth - 24;
  const size = Math.max(2, Math.min(18, Math.floor(Math.sqrt(width * 150 / pages))));
  const inner = size > 4 ? size - 1 : size;
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(pages / columns) * size;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  pen.scale(scale, scale);
  const corner = page => [page % columns * size, Math.floor(page / columns) * size];
  pen.fillStyle = css("--free");
  for (let page = 0; page < pages; page++) pen.fillRect(...corner(page), inner, inner);
  const readers = new Map();  // page -> [[request, how full the page is]]
  for (const {id, micro_batch, pages: table, computed} of running) {
    const first = (micro_batch ?? 0) * Math.floor(pages / micro_batches);
    table.forEach((page, i) => {
      const full = Math.max(0, Math.min(1, computed / page_size - i));
      if (!readers.has(first + page)) readers.set(first + page, []);
      readers.get(first + page).push([id, full]);
    });
  }
  for (const [page, requests] of readers) {  // a stripe for each request that reads it
    const [x, y] = corner(page), stripe = inner / requests.length;
    requests.forEach(([id, full], i) => {
      pen.fillStyle = color_of(id);
      pen.globalAlpha = 0.3;
      pen.fillRect(x, y + i * stripe, inner, stripe);
      pen.globalAlpha = 1;
      pen.fillRect(x, y + i * stripe, inner * full, stripe);
    });
  }
  const shared = [...readers.values()].filter(requests => requests.length > 1).length;
  const striped = shared ? `, ${format_count(shared)} by several requests, striped` : "";
  const taken = `${format_count(readers.size)} of ${counted(pages, "page")} taken${striped}`;
  $("pagesname").textContent =
    `The KV cache: ${taken}, of ${counted(page_size, "token")} each; pale: not yet written`;
}

// ---- The tour -----------------------------------------------------------------------------------

function index_of_largest(list, value) {  // of those with a value above 0, or null
  let best = null, largest = 0;
  list.forEach((item, i) => {
    if (value(item) <= largest) return;
    best = i;
    largest = value(item);
  });
  return best;
}
function longest_gap(run) {  // its seconds, and the iteration in it with the most prefill; or null
  const gap = index_of_largest(run.tbts, ([, seconds]) => seconds);
  if (gap === null) return null;
  const [last, seconds] = run.tbts[gap];
  const first = index_at(run, run.iterations[last].end - seconds);
  const iterations = run.iterations.slice(first, last + 1);
  return {k: first + (index_of_largest(iterations, ({prefill}) => prefill) ?? 0), seconds};
}
function largest_cut_chunk(run) {
  const is_cut = ([id, , length]) => length < run.requests.get(id).prompt_len;
  return index_of_largest(run.iterations, ({chunks}) => chunks.some(is_cut));
}
function fullest_memory(run) {
  return index_of_largest(run.iterations, ({preempted}) => preempted.length)
    ?? index_of_largest(run.iterations, ({free_pages}) => 1 / (1 + free_pages));
}
// `find` returns the iteration that shows a stop, or null; `at` are the choices that show it, on a
// page with sliders; `width` the seconds that must be in view
const TOUR = [
  {
    name: "What stalls", at: {policy: "vllm"},
    find: run => longest_gap(run)?.k ?? null,
    width: run => longest_gap(run).seconds,
    text: (run, k) => [
      "Every lane is a request: grey while it waits, then its prompt is computed (prefill), then",
      "each green piece leads from one token to the next (decode).",
      k === null ? "" : `Here is the longest gap, ${format_seconds(longest_gap(run).seconds)}.`,
      "If somebody else's prompt is computed in between, all who decode must wait for it: a",
      "generation stall, red if it is longer than the SLO."],
  },
  {
    name: "What a chunk is", at: {policy: "sarathi-serve"},
    find: largest_cut_chunk,
    text: (run, k) => [
      k === null ? "No prompt is cut in this run: each is computed whole."
        : "Here only a part of a prompt is computed, its next chunk.",
      "A request is a list of tokens and one counter: how many of them are computed. A chunk",
      "moves the counter on, and the last one yields the first token. The result is the same, to",
      "rounding."],
  },
  {
    name: "What rides along", at: {policy: "sarathi-serve"},
    find: run => index_of_largest(run.iterations, ({chunks, decodes}) =>
      chunks.length && decodes.length),
    text: (run, k) => [
      k === null ? "In this run no decode shares a batch with a prefill."
        : `Decodes beside a chunk: here ${run.iterations[k].decodes.length} of them.`,
      "A batch of decodes alone reads all weights of the model to compute a few rows. Beside a",
      "chunk the weights are read anyway, and a decode costs a fraction of that."],
  },
  {
    name: "What the budget does", at: {policy: "sarathi-serve"},
    find: run => index_of_largest(run.iterations, ({why, tokens}) =>
      why?.[0] === "budget" && tokens),
    text: (run, k) => [
      k === null ? "Nobody waits for budget in this run."
        : "Here the budget is used up and somebody waits for the next iteration.",
      "The token budget, the line over the bars, bounds how much is computed at once, and so how",
      "long a decode waits for its next token. Small: even steps, slow prompts. Large: the other",
      "way round."],
  },
  {
    name: "Memory and preemption", at: {policy: "sarathi-serve", memory: "tight", load: "heavy"},
    find: fullest_memory,
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
    find: run => index_of_largest(run.iterations, ({waiting}) => waiting),
    text: (run, k) => [
      k === null ? "Nobody ever waits in this run."
        : `Here the queue is longest: ${counted(run.iterations[k].waiting, "request")}.`,
      "If more arrives than is computed, the queue grows for ever. The capacity is the highest",
      "rate at which it does not, and the gaps between tokens still meet the SLO."],
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
let stop_number = -1;  // of the tour; -1: it is closed
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
  $("stoptext").textContent = stop.text(run, k).filter(Boolean).join(" ");
  $("tour").hidden = false;
  if (k === null) {
    set_view(-Infinity, Infinity);
    go(run, 0);
  } else {
    const {start, end} = run.iterations[k];
    const half = Math.max((end - start) * 7, (run.end - run.begin) / 80, stop.width?.(run) ?? 0);
    go(run, k);
    set_view(start - half, start + half);
  }
  $("tournext").focus();
}

// ---- Choosing runs ------------------------------------------------------------------------------

const loaded = new Map();
let show_calls = 0;
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
  const call = ++show_calls, runs = [];
  for (const entry of entries) runs.push(await load(entry));
  if (call !== show_calls) return;  // something else was chosen meanwhile
  const [low, high] = range();
  const all_in_view = !panes.length || view.from <= low && view.to >= high;
  const {from, to} = all_in_view ? {from: -Infinity, to: Infinity} : view;
  $("runs").innerHTML = "";
  panes = runs.map(run => new Lanes(run));
  for (const pane of panes) {
    const {run} = pane, {ttft, tbt} = run.so_far(Infinity);
    pane.name.textContent = run.name.split(" | ").filter(part => part !== "*").join(", ");
    pane.summary.textContent = `TTFT P50 ${format_seconds(quantile(ttft, 0.5))}, ` +
      `TBT P99 ${format_seconds(quantile(tbt, 0.99))}, ` +
      `longest gap ${format_seconds(quantile(tbt, 1))}; ` +
      `${counted(run.requests.size, "request")}, ${format_seconds(run.end - run.begin)}`;
    pane.canvas.setAttribute("aria-label", `timeline of ${run.name}`);
  }
  $("other").hidden = panes.length < 2;
  focus(panes[0]);
  set_view(from, to);
}
let choose = async () => {};  // show what the sliders say; or {name: value}, and set them so
function add_pickers() {
  if (data.choices) return add_sliders();
  if (data.runs.length < 2) return show(data.runs);
  const names = data.runs.map(({name}) => name);
  const first = add_select("run", names);
  const second = add_select("beside", ["nothing", ...names]);
  second.selectedIndex = 2;
  const show_selected = () => {
    const entries = [data.runs[first.selectedIndex], data.runs[second.selectedIndex - 1]];
    return show([...new Set(entries.filter(Boolean))]);
  };
  first.oninput = show_selected;
  second.oninput = show_selected;
  return show_selected();
}
function add_sliders() {
  const axes = Object.entries(data.choices);
  const beside = add_select("beside", ["nothing", ...axes[0][1]]);
  const sliders = axes.map(([name, values], i) => {
    const label = document.createElement("label");
    const middle = (values.length - 1) >> 1;
    label.innerHTML = `${name} <input type="range" min="0" max="${values.length - 1}"
      value="${i ? middle : 0}" id="choose-${name}"><output></output>`;
    beside.parentElement.before(label);
    return label.querySelector("input");
  });
  const set_slider = (slider, values, prefix) => {  // to the value that begins so, if one does
    const place = values.findIndex(value => prefix && value.startsWith(prefix));
    if (place >= 0) slider.value = place;
    const value = values[slider.value];
    slider.nextElementSibling.textContent = value;
    slider.setAttribute("aria-valuetext", value);
    return value;
  };
  choose = (wanted = {}) => {
    const [first, ...others] =
      axes.map(([name, values], i) => set_slider(sliders[i], values, wanted[name]));
    const entry_of = policy => data.runs.find(({name}) => {
      const [run_policy, ...parts] = name.split(" | ");
      return run_policy === policy && parts.every((part, i) => part === "*" || part === others[i]);
    });
    const entry = entry_of(first);
    const parts = entry.name.split(" | ");
    sliders.forEach((slider, i) => { slider.disabled = parts[i] === "*"; });
    return show([entry, entry_of(beside.value)].filter(Boolean));
  };
  for (const input of [...sliders, beside]) input.oninput = () => choose();
  return choose();
}
function add_select(name, values) {
  const label = document.createElement("label"), box = document.createElement("select");
  box.id = name;
  box.append(...values.map(value => new Option(value)));
  label.append(name + " ", box);
  $("save").before(label);
  return box;
}

// ---- Live ---------------------------------------------------------------------------------------

async function connect() {  // ask for new records, 4 times a second
  let run, place = NO_PLACE;
  for (;; await new Promise(done => setTimeout(done, 250))) {
    const reply = await fetch_records(place);
    if (!reply) $("why").textContent = "The server does not answer; trying again.";
    else if (!run?.iterations.length) $("why").textContent = "Nothing yet: send a request.";
    for (const record of reply?.records ?? []) {
      if (record.live) run = new Run(data.title, {});  // a snapshot begins a new run
      run.apply(record);
    }
    if (reply?.records.length) show_live(run);
    place = run?.iterations.length > MAX_LIVE_ITERATIONS ? NO_PLACE : reply?.place ?? place;
  }
}
async function fetch_records(place) {  // null if the server does not answer
  try {
    const response = await fetch(`${data.live}/${place}`);
    return await response.json();
  } catch {
    return null;
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
  if (follow) {
    cursor = Math.max(0, run.iterations.length - 1);
    set_view(run.end - 20, run.end + 0.4);
  }
  dirty = true;
}

// ---- A trace for ui.perfetto.dev: Chrome's Trace Event Format -----------------------------------

const us = seconds => Math.round(1e6 * seconds);  // both ends of a slice alike: none can overlap
function slice(pid, lane, name, from, to, args) {
  return {name, pid, tid: lane + 1, ph: "X", ts: us(from), dur: us(to) - us(from), args};
}
function instant(pid, lane, name, at, args) {
  return {name, pid, tid: lane + 1, ph: "i", s: "t", ts: us(at), args};
}

function trace(runs) {  // as text, an event a line; those of the same time stay in their order
  const events = runs.flatMap((run, i) =>
    [...trace_batches(run, 2 * i + 1), ...trace_requests(run, 2 * i + 2)]);
  events.sort((a, b) => a.pid - b.pid || (a.ts ?? -1) - (b.ts ?? -1));
  const lines = events.map(event => JSON.stringify(event)).join(",\n");
  return `{"displayTimeUnit": "ms", "traceEvents": [\n${lines}\n]}\n`;
}
function labels(pid, process_name, lanes) {  // of a process and its lanes, [lane, name], in order
  const label = (kind, name, tid) => [
    {ph: "M", name: `${kind}_name`, pid, tid, args: {name}},
    {ph: "M", name: `${kind}_sort_index`, pid, tid, args: {sort_index: tid ?? pid}}];
  const lane_labels = lanes.flatMap(([lane, name]) => label("thread", name, lane + 1));
  return [...label("process", process_name), ...lane_labels];
}
function* trace_batches({name, iterations, settings: {micro_batches}}, pid) {
  const lanes = Array.from({length: micro_batches}, (_, n) =>
    [n, micro_batches > 1 ? `micro-batch ${n}` : "iterations"]);
  yield* labels(pid, `${name}: engine`, lanes);
  const last = {};  // curve -> its last values
  for (const iteration of iterations) {
    const {start, end, prefill, tokens, budget, micro_batch} = iteration;
    yield slice(pid, micro_batch, kind_of_batch(iteration), start, end);
    const curves = {
      tokens: {prefill, decode: tokens - prefill},
      "free pages": {pages: iteration.free_pages},
      requests: {running: iteration.running, waiting: iteration.waiting},
      "token budget": budget === null ? last["token budget"] : {tokens: budget},
    };
    for (const [curve, args] of Object.entries(curves)) {  // they are steps: only changes count
      if (JSON.stringify(args) === JSON.stringify(last[curve])) continue;
      last[curve] = args;
      yield {name: curve, pid, ph: "C", ts: us(start), args};
    }
  }
}
function kind_of_batch({prefill, tokens}) {
  if (!prefill) return "decode";
  return prefill === tokens ? "prefill" : "hybrid";
}
function* trace_requests(run, pid) {
  const ids = [...run.bars.keys()];
  yield* labels(pid, `${run.name}: requests`, ids.map(id => [id, `request ${id}`]));
  yield* trace_gaps(run, pid);  // before the chunks: a slice comes before those that it holds
  for (const {start, end, chunks, preempted, cache_hits} of run.iterations) {
    for (const id of preempted) yield instant(pid, id, "preempted", start);
    for (const [id, tokens] of cache_hits)
      yield instant(pid, id, `${counted(tokens, "token")} found in the cache`, start, {tokens});
    for (const [id, , n] of chunks) yield slice(pid, id, `prefill chunk of ${n}`, start, end);
  }
  for (const [id, bars] of run.bars) {
    for (const [from, to, kind] of bars)
      if (kind === WAIT) yield slice(pid, id, "waiting", from, to);
    const {ended: reason, waits, since} = run.state.progress.get(id);
    // no record says when it ended: where its last bar does
    const end = Math.max(since, bars.at(-1)?.[1] ?? since);
    const name = reason === "abort" ? "aborted" : "finished";
    if (reason) yield instant(pid, id, name, end, {reason});
    else if (waits && since < run.end) yield slice(pid, id, "waiting", since, run.end);
  }
}
function* trace_gaps(run, pid) {  // stalls, and rows of decodes without one
  const {iterations} = run;
  const micro_batches = new Map();  // request -> its micro-batch
  for (const {chunks, micro_batch} of iterations)
    for (const [id] of chunks) micro_batches.set(id, micro_batch);
  const rows = new Map();  // request -> the slice of its last decodes in a row
  for (const [k, , id, since] of run.tbts) {
    const {start, end, chunks, micro_batch} = iterations[k];
    const own_micro_batch = micro_batches.get(id) ?? micro_batch;
    const others = prefill_of_others(iterations, since, end, id, own_micro_batch);
    const prefill_tokens = others.reduce((sum, [, tokens]) => sum + tokens, 0);
    const row = rows.get(id);
    if (prefill_tokens) {
      const [cause] = others[index_of_largest(others, ([, tokens]) => tokens)];
      yield slice(pid, id, `stall, caused by ${cause}`, since, end, {prefill_tokens});
      rows.delete(id);
    } else if (chunks.some(([other]) => other === id)) {
      rows.delete(id);
    } else if (row) {
      row.dur = us(end) - row.ts;
      row.args.tokens++;
    } else {
      const new_row = slice(pid, id, "decodes", start, end, {tokens: 1});
      rows.set(id, new_row);
      yield new_row;
    }
  }
}
// [[request, tokens]]: the prefill of other requests between two tokens of request `id`, in its
// micro-batch. An iteration counts if it begins there, as in find_stalls of lab/measure/metrics.py
function prefill_of_others(iterations, since, until, id, micro_batch) {
  const tokens_of = new Map();
  const first = search(iterations.length, i => iterations[i].start >= since);
  for (let i = first; iterations[i]?.start < until; i++) {
    if (iterations[i].micro_batch !== micro_batch) continue;
    for (const [other, , n] of iterations[i].chunks)
      if (other !== id) tokens_of.set(other, (tokens_of.get(other) ?? 0) + n);
  }
  return [...tokens_of];
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
  first: () => step(-Infinity),
  back: () => step(-1),
  next: () => step(1),
  last: () => { step(Infinity); follow = Boolean(data.live); },
  play: () => { if (playing) pause(); else play(); },
  in: () => zoom(0.6),
  out: () => zoom(1.7),
  fit: () => set_view(-Infinity, Infinity),
  theme: () => set_theme(is_dark() ? "light" : "dark"),
  other: () => focus(panes.find(pane => pane !== focused) ?? focused),
  guide: () => tour(stop_number < 0 ? 0 : -1),
  tourback: () => tour(Math.max(0, stop_number - 1)),
  tournext: () => tour(stop_number + 1),
  tourend: () => tour(-1),
  save,
};
for (const [id, action] of Object.entries(actions))
  $(id).onclick = () => { if (focused) action(); };  // not before there is something to see
const KEYS = {
  " ": "play", ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", "+": "in",
  "=": "in", "-": "out", "0": "fit", o: "other", t: "guide", d: "theme", s: "save",
  Escape: "tourend",
};
const STEPS_WITH_SHIFT = {ArrowLeft: -10, ArrowRight: 10};
document.addEventListener("keydown", event => {
  const {key, target} = event;
  const used_by_target = target.matches("select") || target.matches("button") && key === " "
    || target.matches("input") && /^(Arrow|Home|End)/.test(key);
  if (used_by_target || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!focused || !(key in KEYS) || key === "Escape" && stop_number < 0) return;
  event.preventDefault();
  if (event.shiftKey && key in STEPS_WITH_SHIFT) step(STEPS_WITH_SHIFT[key]);
  else actions[KEYS[key]]();
});
$("scrub").oninput = () => {
  pause();
  follow = false;
  go(focused.run, +$("scrub").value);
};
function set_theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "light" : "dark";
  dirty = true;
}
set_theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
addEventListener("resize", () => { dirty = true; });

let last_frame = 0;  // when it was, in ms
let owed = 0;  // iterations that playing is behind, of which there may be parts
function play_on(now) {
  owed += (now - last_frame) / 1e3 * $("speed").value;
  if (owed >= 1) {
    go(focused.run, cursor + Math.floor(owed));
    owed %= 1;
  }
  if (cursor >= focused.run.iterations.length - 1) pause();
}
function frame(now) {
  requestAnimationFrame(frame);  // first: if anything goes wrong below, there is a next one
  if (playing) play_on(now);
  last_frame = now;
  if (!dirty || !focused?.run.iterations.length) return;
  if (dirty === true)
    for (const pane of panes) pane.draw();
  for (const pane of panes) {
    const k = pane === focused ? cursor : index_at(pane.run, moment);
    pane.draw_cursor(pane.run.iterations[k]);
  }
  dirty = false;
  $("scrub").value = cursor;
  show_details();
}
async function start() {
  $("title").textContent = data.title;
  $("machine").textContent = data.machine;
  $("slo").textContent = SLO < Infinity ? format_seconds(SLO) : "an SLO";
  $("scrub").max = 0;
  if (data.live) connect();
  else {
    await add_pickers();
    go(focused?.run, data.iteration - 1);
  }
  requestAnimationFrame(frame);
}
start();
