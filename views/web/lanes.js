// Lanes: a canvas for each run. A lane for each request, and two strips on the same clock: the
// longest gap that ends in each iteration, and the tokens of each batch. Read next: highlight.js.

const LEFT = 48, RIGHT = 8;  // pixels beside the plot
const CAPTION_HEIGHT = 18, AXIS_HEIGHT = 22;
const LANES_HEIGHT = 300, MAX_LANE_HEIGHT = 24;  // of a run alone; two share the height
const MAX_LANES = 60;  // with a request each
const TICK_WIDTH = 3;  // pixels that a gap must have to be drawn by itself

const is_narrow = () => innerWidth < 600;

class Lanes {
  constructor(run) {
    this.run = run;
    this.box = document.createElement("section");
    this.box.className = "run";
    this.box.innerHTML = `<h2></h2><p class="gap"></p><p class="soft"></p>
      <div class="canvases"><canvas class="over"></canvas><canvas role="img"></canvas></div>`;
    [this.name, this.gap_text, this.note] = this.box.children;
    [this.over, this.canvas] = this.box.querySelectorAll("canvas");
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
      if (!drag) return this.point_at(event);
      const pixels = drag.x - event.clientX;
      const seconds = pixels / this.width * (drag.to - drag.from);
      drag.moved ||= Math.abs(pixels) > 4;
      if (drag.moved) set_view(drag.from + seconds, drag.to + seconds);
    };
    canvas.onpointerup = event => {
      if (drag && !drag.moved) {
        focus(this);
        go(this.run, index_at(this.run, this.time_at(event.offsetX)));
        pin_request(this.request_at(event.offsetY));
        this.point_at(event);
      }
      drag = null;
    };
    canvas.onpointercancel = () => { drag = null; };
    canvas.onpointerleave = event => {
      if (event.pointerType === "touch") return;  // the tip stays when the finger has gone
      hide_tip();
      light_request(null);
    };
    canvas.onwheel = event => {
      if (!event.ctrlKey) return;  // the page scrolls; a pinch has it, too
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 300), this.time_at(event.offsetX));
    };
  }
  label() {
    const {run} = this, {note} = run.settings;
    this.name.textContent = title_of(run);
    this.note.textContent = note ? sentence(note) : "";
    this.gap_text.textContent = summarize_gap(run);
    this.gap_text.classList.toggle("over", gap_seconds({longest_gap: run.longest_gap()}) > SLO);
    this.canvas.setAttribute("aria-label", `timeline of ${title_of(run)}. ${summarize_gap(run)}`);
  }
  get seconds_per_pixel() { return (view.to - view.from) / this.width; }
  x(t) { return LEFT + (t - view.from) / (view.to - view.from) * this.width; }
  time_at(x) { return view.from + (x - LEFT) / this.width * (view.to - view.from); }

  // ---- Places ----

  /** The part of the height that a band has: "lanes", "gaps" or "batches". [top, bottom] */
  band(name) {
    const gaps_top = this.lanes_height + CAPTION_HEIGHT, strip = is_narrow() ? 34 : 46;
    const batches_top = gaps_top + strip + CAPTION_HEIGHT;
    return {
      lanes: [0, this.lanes_height],
      gaps: [gaps_top, gaps_top + strip],
      batches: [batches_top, batches_top + strip],
    }[name];
  }
  get base() { return this.band("batches")[1]; }
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
    const limit = LANES_HEIGHT / (panes.length > 1 ? 1.5 : 1) * (is_narrow() ? 0.6 : 1);
    this.lanes_height = Math.min(limit, MAX_LANE_HEIGHT * Math.max(4, run.requests.size));
    const fitting = this.lanes_height / Math.max(1, lane_ends.length);
    this.lane_height = Math.min(MAX_LANE_HEIGHT, fitting < 3 ? fitting : Math.floor(fitting));
  }
  lane_y(id) { return this.lane_of.get(id) * this.lane_height; }
  get bar_height() { return this.lane_height > 3 ? this.lane_height - 1 : this.lane_height; }
  /** The requests of a lane, if y is in one. */
  requests_at(y) {
    const lane = Math.floor(y / this.lane_height);
    return this.ids.filter(id => this.lane_of.get(id) === lane && y < this.lanes_height);
  }
  request_at(y) {
    const ids = this.requests_at(y);
    return ids.length === 1 ? ids[0] : null;
  }

  // ---- Drawing ----

  draw(scales) {
    this.scales = scales;
    const {canvas} = this, scale = devicePixelRatio || 1, width = canvas.clientWidth;
    for (const layer of [canvas, this.over]) {
      layer.width = width * scale;
      layer.height = this.height * scale;
      layer.style.height = this.height + "px";
    }
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width, this.height);
    pen.clip();
    for (const id of this.ids) this.draw_lane(pen, id);
    this.draw_gap_strip(pen);
    this.draw_batches(pen);
    pen.restore();
    this.draw_axes(pen);
  }
  /** Draw the history of a request. Stalls lie above all else, or zoomed out they would hide. */
  draw_lane(pen, id) {
    const {waits, chunks, gaps} = this.run.lanes.get(id);
    const y = this.lane_y(id), height = this.bar_height;
    pen.fillStyle = palette.wait;
    for (const [from, to] of this.visible(waits)) this.fill(pen, from, to, y, height);
    const {waits: still_waits, ended, since} = this.run.state.progress.get(id);
    if (still_waits && !ended) this.fill(pen, since, this.run.end, y, height);
    const seen_gaps = this.visible(gaps);
    this.draw_gaps(pen, seen_gaps, y, height);
    pen.fillStyle = palette.prefill;
    for (const [from, to] of this.merged(chunks)) this.fill(pen, from, to, y, height, 0.7);
    const stalls = seen_gaps.filter(([from, to]) => to - from > SLO);
    pen.fillStyle = palette.stall;
    for (const [from, to] of stalls) this.fill_stall(pen, from, to, y, height);
    if (stalls.length) {  // the chunks of a request that was preempted lie in its gap
      const first_token = gaps[0][0];
      pen.fillStyle = palette.prefill;
      for (const [from, to] of this.visible(chunks))
        if (from >= first_token) this.fill(pen, from, to, y + height / 2, height / 2);
    }
  }
  /** The spans in view. Ends are in order. */
  visible(spans) {
    const first = search(spans.length, i => spans[i][1] >= view.from);
    const last = search(spans.length, i => spans[i][0] > view.to);
    return spans.slice(first, last);
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
  /** Fill whole pixels, two at least: half-covered ones would be pale, and not be seen. */
  fill_stall(pen, from, to, y, height) {
    const left = Math.floor(Math.max(this.x(from), LEFT - 2));
    const right = Math.floor(Math.min(this.x(to), LEFT + this.width + 2));
    const width = right - left;
    pen.fillRect(left, y, width > TICK_WIDTH ? width - 1 : Math.max(width, 2), height);
  }
  /** A tick for each token, at the end of its gap; of gaps that are narrower than TICK_WIDTH the
   * longest on a pixel is drawn. */
  draw_gaps(pen, gaps, y, height) {
    let start = null, longest = 0;  // of the gaps on one pixel
    gaps.forEach(([from, to], i) => {
      const right = this.x(to);
      start ??= this.x(from);
      longest = Math.max(longest, to - from);
      const is_last = i === gaps.length - 1;
      if (!is_last && right - start < 1) return;
      const width = right - start;
      pen.fillStyle = palette.gap(longest);
      pen.fillRect(start, y, Math.max(width > TICK_WIDTH ? width - 1 : width, 1), height);
      if (width >= 2 * TICK_WIDTH && height > 5) {
        pen.fillStyle = palette.ink;
        pen.fillRect(Math.round(right) - 1, y, 1, height);
      }
      start = null;
      longest = 0;
    });
  }
  /** The iterations in view, those on one pixel as one: {from, to, value} with their largest. */
  *strip(value_of) {
    const {iterations} = this.run;
    const last = search(iterations.length, i => iterations[i].start >= view.to);
    let largest = null, from = null;
    for (let k = index_at(this.run, view.from); k < last; k++) {
      const iteration = iterations[k];
      from ??= iteration.start;
      if (largest === null || value_of(iteration) > value_of(largest)) largest = iteration;
      if (iteration.end - from < this.seconds_per_pixel && k < last - 1) continue;
      yield {from, to: iteration.end, largest};
      largest = null;
      from = null;
    }
  }
  draw_gap_strip(pen) {
    const [top, bottom] = this.band("gaps"), {gap_s} = this.scales;
    for (const {from, to, largest} of this.strip(gap_seconds)) {
      const seconds = gap_seconds(largest);
      if (!seconds) continue;
      const height = Math.min(1, seconds / gap_s) * (bottom - top);
      pen.fillStyle = palette.gap(seconds);
      if (seconds > SLO) this.fill_stall(pen, from, to, bottom - height, height);
      else this.fill(pen, from, to, bottom - height, height, 0.7);
    }
    if (SLO >= Infinity) return;
    const y = Math.round(bottom - SLO / gap_s * (bottom - top)) + 0.5;
    pen.strokeStyle = palette.ink;
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(LEFT + this.width, y);
    pen.stroke();
    pen.setLineDash([]);
  }
  draw_batches(pen) {
    const [top, bottom] = this.band("batches"), top_tokens = this.scales.tokens;
    const y_of = n => bottom - n / top_tokens * (bottom - top);
    const budget_line = new Path2D();
    for (const {from, to, largest} of this.strip(({tokens}) => tokens)) {
      const {tokens, prefill, budget} = largest;
      pen.fillStyle = palette.prefill;
      this.fill(pen, from, to, y_of(tokens), y_of(tokens - prefill) - y_of(tokens), 0.7);
      pen.fillStyle = palette.decode;
      this.fill(pen, from, to, y_of(tokens - prefill), bottom - y_of(tokens - prefill), 0.7);
      if (budget !== null && budget <= top_tokens) {
        budget_line.moveTo(this.x(from), y_of(budget));
        budget_line.lineTo(this.x(to), y_of(budget));
      }
    }
    pen.strokeStyle = palette.ink;
    pen.stroke(budget_line);
  }
  draw_axes(pen) {
    const [gaps_top, gaps_bottom] = this.band("gaps");
    const [batches_top, batches_bottom] = this.band("batches");
    const budget = is_narrow() ? "tokens in each batch" : "tokens in each batch; line: its budget";
    const slo = SLO < Infinity ? `; dashed: the SLO, ${format_seconds(SLO)}` : "";
    const gap = is_narrow() ? "longest gap" : "longest gap that ends in each iteration";
    pen.fillStyle = palette.soft;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText(gap + slo, LEFT, gaps_top - 5);
    pen.fillText(budget, LEFT, batches_top - 5);
    const absent = [];
    if (this.ended) absent.push(`${format_count(this.ended)} have ended`);
    if (this.to_come) absent.push(`${format_count(this.to_come)} not yet arrived`);
    pen.textAlign = "right";
    pen.fillText(is_narrow() ? "" : absent.join(", "), LEFT + this.width, gaps_top - 5);
    pen.fillText(format_seconds(this.scales.gap_s), LEFT - 4, gaps_top + 9);
    pen.fillText("0", LEFT - 4, gaps_bottom);
    pen.fillText(format_count(this.scales.tokens), LEFT - 4, batches_top + 9);
    pen.fillText("0", LEFT - 4, batches_bottom);
    const label_every = Math.ceil(12 / this.lane_height);
    for (const [id, lane] of this.shared ? [] : this.lane_of) {
      if (lane % label_every) continue;
      const y = Math.max(9, (lane + 0.5) * this.lane_height + 4);
      pen.fillText(name_of(this.run, id), LEFT - 4, y);
    }
    if (!is_narrow()) this.draw_lane_title(pen);
    this.draw_time_axis(pen);
  }
  draw_lane_title(pen) {
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
    if (iteration) this.draw_cursor(pen, iteration);
    pen.strokeStyle = palette.accent;
    if (this.lane_of.has(lit_request)) {
      pen.lineWidth = 2;
      pen.strokeRect(1, this.lane_y(lit_request), LEFT + this.width - 2, this.lane_height);
    }
    pen.lineWidth = 3;
    for (const name of named_bands) {
      const [top, bottom] = this.band(name);
      pen.strokeRect(2, top + 1.5, LEFT + this.width + 2, bottom - top);
    }
  }
  draw_cursor(pen, {start, end}) {
    const left = Math.max(LEFT, this.x(start));
    const right = Math.min(this.x(end), LEFT + this.width);
    if (right < LEFT || left > LEFT + this.width) return;
    pen.globalAlpha = 0.13;
    pen.fillStyle = palette.ink;
    pen.fillRect(left, 0, Math.max(right - left, 1), this.base);
    pen.globalAlpha = 1;
    pen.fillStyle = palette.accent;
    pen.fillRect(left, 0, 1.5, this.base);
    pen.fillRect(right - 1.5, 0, 1.5, this.base);
  }

  // ---- Pointing ----

  /** Say what is under the pointer, and light its request. */
  point_at({offsetX, offsetY, clientX, clientY}) {
    const time = this.time_at(offsetX);
    const inside = offsetX >= LEFT && offsetX <= LEFT + this.width && offsetY < this.base;
    light_request(this.request_at(offsetY));
    const text = inside ? this.describe(time, offsetY) : "";
    if (text) show_tip(text, clientX, clientY);
    else hide_tip();
  }
  describe(time, y) {
    if (y >= this.lanes_height) return this.describe_iteration(time);
    for (const id of this.requests_at(y)) {
      const text = this.describe_request(id, time);
      if (text) return sentence(text);
    }
    return "";
  }
  describe_iteration(time) {
    const {run} = this, iteration = run.iterations[index_at(run, time)];
    if (!iteration || time > iteration.end) return "";
    const {start, end, tokens, longest_gap} = iteration;
    const text = `${counted(tokens, "token")} in ${format_seconds(end - start)}`;
    if (!longest_gap) return `${text}; no gap ends here.`;
    return `${text}; longest gap that ends here: ${explain_gap(run, longest_gap)}.`;
  }
  describe_request(id, time) {
    const {run} = this, {waits, chunks, gaps, first_token} = run.lanes.get(id);
    const near = 2 * this.seconds_per_pixel;  // a narrow stall can be hit
    const span_at = (spans, slack) => {
      const first = search(spans.length, i => spans[i][1] >= time - slack);
      return spans[first]?.[0] <= time + slack ? first : -1;
    };
    const chunk = span_at(chunks, 0);
    if (chunk >= 0) return this.describe_chunk(id, run.iterations[chunks[chunk][2]]);
    let gap = span_at(gaps, near);
    for (let i = gap; i >= 0 && gaps[i]?.[0] <= time + near; i++)
      if (gaps[i][1] - gaps[i][0] > gaps[gap][1] - gaps[gap][0]) gap = i;
    if (gap >= 0) {
      const [since, until] = gaps[gap];
      return explain_gap(run, {id, since, until, token: first_token + gap + 1});
    }
    const wait = span_at(waits, 0);
    const {waits: still_waits, ended, since} = run.state.progress.get(id);
    const is_waiting = still_waits && !ended && time >= since;
    if (wait < 0 && !is_waiting) return "";
    const until = wait >= 0 ? waits[wait][1] : run.end;
    const seconds = format_seconds(until - (wait >= 0 ? waits[wait][0] : since));
    return `request ${name_of(run, id)} waits ${seconds} to be computed`;
  }
  describe_chunk(id, {start, end, chunks, decodes}) {
    const [, first, n] = chunks.find(([other]) => other === id);
    const tokens = `tokens ${format_count(first)} to ${format_count(first + n - 1)}`;
    const prompt = format_count(this.run.requests.get(id).prompt_len);
    const beside = decodes.length ? `beside ${counted(decodes.length, "decode")}` : "alone";
    return `request ${name_of(this.run, id)}: ${tokens} of its prompt of ${prompt}, ${beside}, ` +
      `in ${format_seconds(end - start)}`;
  }
}
const gap_seconds = ({longest_gap: gap}) => gap ? gap.until - gap.since : 0;

/** The tops of the strips, the same for all runs that are shown: `gap_s` and `tokens`. */
function common_scales() {
  let tokens = 1, budget = 0, gap_s = 0;
  for (const {run} of panes) {
    const {iterations} = run;
    const last = search(iterations.length, i => iterations[i].start >= view.to);
    for (let k = index_at(run, view.from); k < last; k++) {
      tokens = Math.max(tokens, iterations[k].tokens);
      budget = Math.max(budget, iterations[k].budget ?? 0);
      gap_s = Math.max(gap_s, gap_seconds(iterations[k]));
    }
  }
  // a budget that is far from used up is not shown, or the bars would be too low to see
  return {
    tokens: Math.max(tokens, Math.min(1.3 * tokens, budget)),
    gap_s: SLO < Infinity ? Math.max(gap_s, 1.3 * SLO) : gap_s || 1,
  };
}
