// The bands below the lanes, on the same clock: the stages of a pipeline and their bubbles, the
// longest gap that ends in each iteration, and the tokens of each batch. Read next: instances.js.

const gap_seconds = ({longest_gap: gap}) => gap ? gap.until - gap.since : 0;

/** The tops of the strips, the same for all runs that are shown: `gap_s` and `tokens`. */
function common_scales() {
  let tokens = 1, budget = 0, gap_s = 0;
  for (const {run} of panes) {
    for (const iteration of iterations_in_view(run)) {
      tokens = Math.max(tokens, iteration.tokens);
      budget = Math.max(budget, iteration.budget ?? 0);
      gap_s = Math.max(gap_s, gap_seconds(iteration));
    }
  }
  // a budget that is far from used up is not shown, or the bars would be too low to see
  return {
    tokens: Math.max(tokens, Math.min(Math.ceil(1.3 * tokens), budget)),
    gap_s: SLO < Infinity ? Math.max(gap_s, 1.3 * SLO) : gap_s || 1,
  };
}
/** Several may be computed at once. Instances may end them in another order than they begin them:
 * then some have ended before. */
function iterations_in_view({iterations}) {
  const first = search(iterations.length, i => iterations[i].latest_end >= view.from);
  return iterations.slice(first, search(iterations.length, i => iterations[i].start >= view.to));
}
/** The iterations in view, those on one pixel as one: {from, to, largest}. */
function* columns(lanes, value_of) {
  const iterations = iterations_in_view(lanes.run);
  let largest = null, from = null;
  for (const [k, iteration] of iterations.entries()) {
    from ??= iteration.start;
    if (largest === null || value_of(iteration) > value_of(largest)) largest = iteration;
    if (iteration.end - from < lanes.seconds_per_pixel && k < iterations.length - 1) continue;
    yield {from, to: iteration.end, largest};
    largest = null;
    from = null;
  }
}

/** All bands below the lanes. */
function draw_strips(lanes, pen) {
  draw_stages(lanes, pen);
  draw_instances(lanes, pen);
  draw_gap_strip(lanes, pen);
  draw_batches(lanes, pen);
}
/** A lane for each stage: its batches, coloured by what is in them, and hatched bubbles. Where a
 * pixel holds both, the hatching is as high as the share of the bubbles. */
function draw_stages(lanes, pen) {
  const [top, bottom] = lanes.band("stages");
  if (bottom === top) return;
  const iterations = iterations_in_view(lanes.run), height = STAGE_HEIGHT - 3;
  const hatching = hatched(pen);
  for (let stage = 0; stage < lanes.run.settings.stages; stage++) {
    const y = top + stage * STAGE_HEIGHT;
    for (const iteration of iterations) {
      const [start, end] = iteration.stages[stage];
      pen.fillStyle = palette[kind_of_batch(iteration)];
      lanes.fill(pen, start, end, y, height);
    }
    bubble_shares(lanes, stage).forEach((share, x) => {
      if (!share) return;
      for (const fill of [palette.back, hatching]) {
        pen.fillStyle = fill;
        pen.fillRect(LEFT + x, y, 1, share * height);
      }
    });
  }
}
/** The share of each pixel of the plot that is a bubble of a stage. */
function bubble_shares(lanes, stage) {
  const shares = new Float64Array(Math.max(0, Math.ceil(lanes.width)));
  for (const {stages} of iterations_in_view(lanes.run)) {
    const [start, , bubble] = stages[stage];
    if (!bubble) continue;
    const from = Math.max(0, lanes.x(start - bubble) - LEFT);
    const to = Math.min(shares.length, lanes.x(start) - LEFT);
    for (let x = Math.floor(from); x < to; x++)
      shares[x] += Math.min(to, x + 1) - Math.max(from, x);
  }
  return shares;
}
function hatched(pen) {  // stripes of 45 degrees
  const tile = new OffscreenCanvas(6, 6), tile_pen = tile.getContext("2d");
  tile_pen.strokeStyle = palette.ink;
  tile_pen.lineWidth = 1.4;
  for (const x of [-6, 0, 6]) {
    tile_pen.moveTo(x, 6);
    tile_pen.lineTo(x + 6, 0);
  }
  tile_pen.stroke();
  return pen.createPattern(tile, "repeat");
}
/** At each pixel the longest gap that lasts then, of all requests. */
function draw_gap_strip(lanes, pen) {
  const [top, bottom] = lanes.band("gaps"), {gap_s} = lanes.scales;
  const pixels = Math.max(0, Math.ceil(lanes.width)) + 2;  // a page in a hidden frame has no width
  const longest = new Float64Array(pixels);  // of each, in seconds
  for (const id of lanes.ids) {
    for (const [from, to, seconds] of lanes.gaps_in_view(lanes.run.lanes.get(id).gaps)) {
      const left = Math.max(0, Math.floor(lanes.x(from) - LEFT));
      const right = Math.max(left + (seconds > SLO ? 2 : 1), Math.floor(lanes.x(to) - LEFT));
      for (let x = left; x < Math.min(right, longest.length); x++)
        longest[x] = Math.max(longest[x], seconds);
    }
  }
  longest.forEach((seconds, x) => {
    const height = Math.min(1, seconds / gap_s) * (bottom - top);
    pen.fillStyle = palette.gap(seconds);
    if (seconds) pen.fillRect(LEFT + x, bottom - height, 1, height);
  });
  if (SLO >= Infinity) return;
  const y = Math.round(bottom - SLO / gap_s * (bottom - top)) + 0.5;
  pen.strokeStyle = palette.ink;
  pen.setLineDash([5, 4]);
  pen.beginPath();
  pen.moveTo(LEFT, y);
  pen.lineTo(LEFT + lanes.width, y);
  pen.stroke();
  pen.setLineDash([]);
}
function draw_batches(lanes, pen) {
  const [top, bottom] = lanes.band("batches"), top_tokens = lanes.scales.tokens;
  const y_of = n => bottom - n / top_tokens * (bottom - top);
  const budget_line = new Path2D();
  for (const {from, to, largest} of columns(lanes, ({tokens}) => tokens)) {
    const {tokens, prefill, budget} = largest;
    pen.fillStyle = palette.prefill;
    lanes.fill(pen, from, to, y_of(tokens), y_of(tokens - prefill) - y_of(tokens), 0.7);
    pen.fillStyle = palette.decode;
    lanes.fill(pen, from, to, y_of(tokens - prefill), bottom - y_of(tokens - prefill), 0.7);
    if (budget !== null && budget <= top_tokens) {
      budget_line.moveTo(lanes.x(from), y_of(budget));
      budget_line.lineTo(lanes.x(to), y_of(budget));
    }
  }
  pen.strokeStyle = palette.ink;
  pen.stroke(budget_line);
}
/** The titles and scales of the bands. */
function draw_captions(lanes, pen) {
  const {ended, to_come, scales, run: {settings}} = lanes;
  const [stages_top] = lanes.band("stages");
  const [gaps_top, gaps_bottom] = lanes.band("gaps");
  const [batches_top, batches_bottom] = lanes.band("batches");
  const budget = is_narrow() ? "tokens in each batch" : "tokens in each batch; line: its budget";
  const slo = SLO < Infinity ? `; dashed: the SLO, ${format_seconds(SLO)}` : "";
  const gap = is_narrow() ? "longest gap" : "the longest gap, while it lasts";
  const kinds = is_narrow() ? "" : " (light: prefill and decodes together)";
  const left = LEFT + 6;  // beside the outline of a first iteration
  pen.textAlign = "left";
  if (settings.stages)
    pen.fillText(`batches on each stage${kinds}; hatched: a bubble`, left, stages_top - 5);
  if (settings.instances) pen.fillText(caption_of_instances(settings), left, stages_top - 5);
  pen.fillText(gap + slo, left, gaps_top - 5);
  pen.fillText(budget, left, batches_top - 5);
  const absent = [];
  if (ended) absent.push(`${format_count(ended)} have ended`);
  if (to_come) absent.push(`${format_count(to_come)} not yet arrived`);
  pen.textAlign = "right";
  const right = LEFT + lanes.width;
  pen.fillText(is_narrow() ? "" : absent.join(", "), right, lanes.lanes_height + 13);
  band_rows(settings).forEach((name, row) =>
    pen.fillText(name, LEFT - 4, stages_top + (row + 0.5) * STAGE_HEIGHT + 3));
  pen.fillText(format_seconds(scales.gap_s), LEFT - 4, gaps_top + 9);
  pen.fillText("0", LEFT - 4, gaps_bottom);
  pen.fillText(format_count(scales.tokens), LEFT - 4, batches_top + 9);
  pen.fillText("0", LEFT - 4, batches_bottom);
}
