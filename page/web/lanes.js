// Lanes: a canvas for each run, with a lane for each request. Below them lie bands on the same
// clock, which strips.js draws. Read next: strips.js.

const LEFT = 48, RIGHT = 8;  // pixels beside the plot
const CAPTION_HEIGHT = 18, AXIS_HEIGHT = 22, STAGE_HEIGHT = 18;
const LANES_HEIGHT = 300, MAX_LANE_HEIGHT = 24;  // of a run alone; two share the height
const OPENING_LANE_HEIGHT = 54, NARROW_OPENING_LANE_HEIGHT = 30;
const MAX_LANES = 60;  // with a request each
const MANY_GAPS = 100;  // of a request, too many to be merged in every frame
const TICK_WIDTH = 3;  // pixels that a gap must have to be set off from the next

const is_narrow = () => innerWidth < 600;

class Lanes {
  constructor(run) {
    this.run = run;
    this.box = document.createElement("section");
    this.box.className = "run";
    this.box.innerHTML = `<h2></h2><p class="gap"></p><p class="soft"></p>
      <div class="canvases"><canvas class="over" aria-hidden="true"></canvas>
      <canvas role="img"></canvas></div><ul class="sr"></ul>`;
    [this.name, this.gap_text, this.note] = this.box.children;
    this.texts = this.box.lastElementChild;
    [this.over, this.canvas] = this.box.querySelectorAll("canvas");
    $("runs").append(this.box);
    listen(this);
  }
  label() {
    const {run} = this, {note} = run.settings;
    const summary = summarize_gap(run);
    this.name.textContent = title_of(run);
    this.note.textContent = `${note ? sentence(note) : ""} ` +
      `${summarize_bubbles(run)}${summarize_instances(run)}`;
    this.gap_text.textContent = summary;
    this.gap_text.classList.toggle("over", run.stalls.length > 0);
    const ids = [...run.requests.keys()].slice(0, MAX_LANES);
    this.texts.innerHTML = ids.map(id => `<li>${summarize_request(run, id)}</li>`).join("");
    this.canvas.setAttribute("aria-label", `timeline of ${title_of(run)}. ${summary}`);
  }

  // ---- Places ----

  get seconds_per_pixel() { return (view.to - view.from) / this.width; }
  x(t) { return LEFT + (t - view.from) / (view.to - view.from) * this.width; }
  time_at(x) { return view.from + (x - LEFT) / this.width * (view.to - view.from); }
  /** The part of the height that a band has: "lanes", "stages" of a pipeline or instances (without
   * any, it has no height), "gaps" or "batches". [top, bottom] */
  band(name) {
    const stages = band_rows(this.run.settings).length, strip = is_narrow() ? 34 : 46;
    const stages_top = this.lanes_height + (stages ? CAPTION_HEIGHT : 0);
    const gaps_top = stages_top + stages * STAGE_HEIGHT + CAPTION_HEIGHT;
    const batches_top = gaps_top + strip + CAPTION_HEIGHT;
    return {
      lanes: [0, this.lanes_height],
      stages: [stages_top, stages_top + stages * STAGE_HEIGHT],
      gaps: [gaps_top, gaps_top + strip],
      batches: [batches_top, batches_top + strip],
    }[name];
  }
  get base() { return is_opening() ? this.lanes_height : this.band("batches")[1]; }
  get height() { return this.base + AXIS_HEIGHT; }

  /** A lane for each request that is there in these seconds; where there are many, one for several
   * that follow each other. The height of all lanes does not depend on the seconds. */
  layout() {
    this.width = this.canvas.clientWidth - LEFT - RIGHT;  // to ask for it takes time
    const {run} = this, lane_ends = [];  // when the last request in a lane has ended
    this.ended = 0;  // requests before and after what is seen
    this.to_come = 0;
    const present = [];
    for (const [id, {arrival}] of run.requests) {
      if (arrival > view.to) this.to_come++;
      else if (run.end_of(id) < view.from) this.ended++;
      else present.push(id);
    }
    present.sort((a, b) => a - b);
    this.shared = present.length > MAX_LANES;
    this.lane_of = new Map();
    this.ids = present;
    for (const id of present) {
      const {arrival} = run.requests.get(id);
      let lane = this.shared ? lane_ends.findIndex(end => end < arrival) : -1;
      if (lane < 0) lane = lane_ends.push(0) - 1;
      lane_ends[lane] = run.end_of(id);
      this.lane_of.set(id, lane);
    }
    let limit = LANES_HEIGHT / (panes.length > 1 ? 1.5 : 1) * (is_narrow() ? 0.6 : 1);
    let highest = MAX_LANE_HEIGHT;
    if (is_opening()) {
      limit = LANES_HEIGHT;
      highest = is_narrow() ? NARROW_OPENING_LANE_HEIGHT : OPENING_LANE_HEIGHT;
    }
    this.lanes_height = Math.min(limit, highest * Math.max(4, run.requests.size));
    const fitting = this.lanes_height / Math.max(1, lane_ends.length);
    this.lane_height = Math.min(highest, fitting < 3 ? fitting : Math.floor(fitting));
  }
  lane_y(id) { return this.lane_of.get(id) * this.lane_height; }
  get bar_height() { return this.lane_height > 3 ? this.lane_height - 1 : this.lane_height; }

  // ---- Drawing ----

  draw(scales) {
    this.scales = scales;
    const scale = devicePixelRatio || 1;
    this.resize(scale);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, LEFT + this.width + RIGHT, this.height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width, this.height);
    pen.clip();
    for (const id of this.ids) this.draw_lane(pen, id);
    if (!is_opening()) draw_strips(this, pen);
    pen.restore();
    this.draw_lane_labels(pen);
    if (!is_opening()) draw_captions(this, pen);
    this.draw_time_axis(pen);
  }
  resize(scale) {  // only if need be: it takes as long as a lane
    const width = Math.round((LEFT + this.width + RIGHT) * scale);
    const height = Math.round(this.height * scale);
    for (const layer of [this.canvas, this.over]) {
      if (layer.width === width && layer.height === height) continue;
      layer.width = width;
      layer.height = height;
      layer.style.height = this.height + "px";
    }
  }
  /** Draw the history of a request. Stalls lie above all else, or zoomed out they would hide. */
  draw_lane(pen, id) {
    const {waits, chunks, gaps} = this.run.lanes.get(id);
    const y = this.lane_y(id), height = this.bar_height;
    pen.fillStyle = palette.wait;
    for (const [from, to] of this.visible(waits)) this.fill(pen, from, to, y, height);
    const {waits: still_waits, ended, since} = this.run.state.progress.get(id);
    if (still_waits && !ended) this.fill(pen, since, this.run.end, y, height);
    const seen_gaps = this.gaps_in_view(gaps);
    this.draw_gaps(pen, seen_gaps, y, height);
    pen.fillStyle = palette.prefill;
    for (const [from, to] of this.merged(chunks)) this.fill(pen, from, to, y, height, 0.7);
    const stalls = seen_gaps.filter(([, , longest]) => longest > SLO);
    pen.fillStyle = palette.stall;
    for (const [from, to] of stalls) this.fill_pixels(pen, from, to, y, height, 2);
    if (stalls.length) {  // the chunks of a request that was preempted lie in its gap
      const first_token = gaps[0][0];
      pen.fillStyle = palette.prefill;
      for (const [from, to] of this.visible(chunks))
        if (from >= first_token) this.fill(pen, from, to, y + height / 2, height / 2);
    }
  }
  /** The gaps in view as [from, to, seconds of the longest], several on a pixel as one. Many are
   * merged once for all zooms within a factor of two, and not in every frame. */
  gaps_in_view(gaps) {
    const seen = this.visible(gaps), cell = 2 ** Math.floor(Math.log2(this.seconds_per_pixel));
    if (seen.length < MANY_GAPS) return merge_gaps(seen, cell);
    if (gaps.cell !== cell || gaps.merged_length !== gaps.length) {
      gaps.merged = merge_gaps(gaps, cell);
      gaps.cell = cell;
      gaps.merged_length = gaps.length;
    }
    return this.visible(gaps.merged);
  }
  /** The spans in view, as far as they are revealed. Ends are in order. */
  visible(spans) {
    const first = search(spans.length, i => spans[i][1] >= view.from);
    const last = search(spans.length, i => spans[i][0] > Math.min(view.to, revealed));
    const seen = spans.slice(first, last);
    if (revealed === Infinity) return seen;
    return seen.map(([from, to, ...rest]) => [from, Math.min(to, revealed), ...rest]);
  }
  /** The spans in view without those that end on the pixel of the one before. */
  *merged(spans) {
    let drawn_to = -Infinity;
    for (const span of this.visible(spans)) {
      if (span[1] < drawn_to + this.seconds_per_pixel / 2) continue;
      yield span;
      drawn_to = span[1];
    }
  }
  fill(pen, from, to, y, height, min_width = 0) {  // with a line behind it if there is room
    const left = Math.max(this.x(from), LEFT - 2);
    const right = Math.min(this.x(to), LEFT + this.width + 2);
    const width = right - left;
    pen.fillRect(left, y, Math.max(width > TICK_WIDTH ? width - 1 : width, min_width), height);
  }
  /** Fill whole pixels, `least` of them: half-covered ones would be pale, and not be seen. */
  fill_pixels(pen, from, to, y, height, least) {
    const left = Math.floor(Math.max(this.x(from), LEFT - 2));
    const right = Math.floor(Math.min(this.x(to), LEFT + this.width + 2));
    const width = right - left;
    pen.fillRect(left, y, width > TICK_WIDTH ? width - 1 : Math.max(width, least), height);
  }
  /** A tick for each token, at the end of its gap, where a gap has room for it. */
  draw_gaps(pen, gaps, y, height) {
    for (const [from, to, longest] of gaps) {
      const start = this.x(from), end = this.x(to), width = end - start;
      pen.fillStyle = palette.gap(longest);
      if (width <= TICK_WIDTH) {
        this.fill_pixels(pen, from, to, y, height, 1);
        continue;
      }
      pen.fillRect(start, y, width - 1, height);
      if (width < 2 * TICK_WIDTH || height <= 5) continue;
      pen.fillStyle = palette.ink;
      pen.fillRect(Math.round(end) - 1, y, 1, height);
    }
  }
  draw_lane_labels(pen) {
    pen.fillStyle = palette.soft;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    const label_every = Math.ceil(12 / this.lane_height);
    for (const [id, lane] of this.shared ? [] : this.lane_of) {
      if (lane % label_every) continue;
      const y = Math.max(9, (lane + 0.5) * this.lane_height + 4);
      pen.fillText(name_of(this.run, id), LEFT - 4, y);
    }
    if (is_narrow()) return;
    pen.save();
    pen.textAlign = "center";
    pen.translate(11, this.lanes_height / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText("request", 0, 0);
    pen.restore();
  }
  draw_time_axis(pen) {
    pen.textAlign = "center";
    const {origin} = this.run;
    const rough = (view.to - view.from) / Math.max(2, this.width / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    for (let t = Math.ceil((view.from - origin) / unit) * unit; origin + t <= view.to; t += unit) {
      pen.fillRect(this.x(origin + t), this.base + 2, 1, 4);
      const x = Math.min(this.x(origin + t), LEFT + this.width - 12);
      pen.fillText(`${+t.toFixed(6)} s`, x, this.base + 17);
    }
  }
  /** What is drawn over the picture: the iteration that is looked at, a request that is lit, and
   * the band that the tour names. */
  draw_over(iteration) {
    const pen = this.over.getContext("2d"), scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.over.width, this.over.height);
    if (is_opening()) draw_opening(this, pen);
    else if (iteration) this.draw_cursor(pen, iteration);
    pen.strokeStyle = palette.accent;
    if (this.lane_of.has(lit_request)) {
      pen.lineWidth = 2;
      pen.strokeRect(1, this.lane_y(lit_request), LEFT + this.width - 2, this.lane_height);
    }
    pen.lineWidth = 3;
    for (const name of named_bands) {
      const [top, bottom] = this.band(name);
      const y = Math.max(1.5, top - 1.5);  // around labels
      pen.strokeRect(1.5, y, LEFT + this.width + RIGHT - 3, bottom + 1.5 - y);
    }
  }
  /** Outline the iteration; a fill would look like a request that waits. */
  draw_cursor(pen, {start, end}) {
    const left = Math.max(LEFT, this.x(start));
    const right = Math.min(this.x(end), LEFT + this.width);
    if (right < LEFT || left > LEFT + this.width) return;
    const width = Math.max(right - left, 3);
    for (const name of ["lanes", "stages", "gaps", "batches"]) {  // captions stay free
      const [top, bottom] = this.band(name);
      if (bottom === top) continue;
      for (const [color, line] of [[palette.back, 4], [palette.ink, 1.5]]) {  // seen on any colour
        pen.strokeStyle = color;
        pen.lineWidth = line;
        pen.strokeRect(left, top + 1, width, bottom - top - 1);
      }
    }
  }
}

/** Gaps as [from, to, seconds of the longest]: those that are shorter than a cell become one, up to
 * its length. */
function merge_gaps(gaps, cell) {
  const merged = [];
  let last = null;  // may be made longer
  for (const [from, to] of gaps) {
    const seconds = to - from;
    if (last && seconds < cell && to - last[0] <= cell) {
      last[1] = to;
      last[2] = Math.max(last[2], seconds);
      continue;
    }
    last = [from, to, seconds];
    merged.push(last);
    if (seconds >= cell) last = null;
  }
  return merged;
}
