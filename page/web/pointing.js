// Pointing: which request, token, iteration or bubble is under the pointer, and what is said of it.
// Read next: highlight.js.

function listen(lanes) {
  const {canvas} = lanes;
  let drag = null;  // where it began, and the view there
  canvas.onpointerdown = event => {
    drag = {x: event.clientX, moved: false, ...view};
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = event => {
    if (!drag) return point_at(lanes, event);
    const pixels = drag.x - event.clientX;
    const seconds = pixels / lanes.width * (drag.to - drag.from);
    drag.moved ||= Math.abs(pixels) > 4;
    if (drag.moved) set_view(drag.from + seconds, drag.to + seconds);
  };
  canvas.onpointerup = event => {
    if (drag && !drag.moved) {
      focus(lanes);
      go(lanes.run, index_at(lanes.run, lanes.time_at(event.offsetX)));
      pin_request(request_at(lanes, event.offsetY));
      point_at(lanes, event);
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
    zoom(Math.exp(event.deltaY / 300), lanes.time_at(event.offsetX));
  };
}
/** Say what is under the pointer, and light its request. */
function point_at(lanes, {offsetX: x, offsetY: y, clientX, clientY}) {
  const inside = x >= LEFT && x <= LEFT + lanes.width && y < lanes.base;
  light_request(request_at(lanes, y));
  const text = inside ? describe(lanes, lanes.time_at(x), y) : "";
  if (text) show_tip(text, clientX, clientY);
  else hide_tip();
}
/** The requests of a lane, if y is in one. */
function requests_at({ids, lane_of, lane_height, lanes_height}, y) {
  const lane = Math.floor(y / lane_height);
  return ids.filter(id => lane_of.get(id) === lane && y < lanes_height);
}
function request_at(lanes, y) {
  const ids = requests_at(lanes, y);
  return ids.length === 1 ? ids[0] : null;
}

// ---- What is there, as a sentence; "" if there is nothing ---------------------------------------

function describe(lanes, time, y) {
  const {run} = lanes, [stages_top, stages_bottom] = lanes.band("stages");
  if (y >= stages_bottom) return describe_iteration(run, time);
  if (y >= stages_top) {
    const row = Math.floor((y - stages_top) / STAGE_HEIGHT);
    return run.settings.stages ? describe_stage(run, time, row) : describe_row(lanes, time, row);
  }
  const slack = 2 * lanes.seconds_per_pixel;  // a narrow stall can be hit
  for (const id of requests_at(lanes, y)) {
    const text = describe_request(run, id, time, slack);
    if (text) return sentence(text) + (run.texts?.[id] ? ` It writes: … ${run.texts[id]}` : "");
  }
  return "";
}
function describe_iteration(run, time) {
  const iteration = run.iterations[index_at(run, time)];
  if (!iteration || time > iteration.end) return "";
  const {start, end, tokens} = iteration, gap = longest_gap_at(run, time);
  const text = `${counted(tokens, "token")} in ${format_seconds(end - start)}`;
  if (!gap) return `${text}; nobody is between two tokens.`;
  return `${text}; the longest gap here: ${explain_gap(run, gap)}.`;
}
/** The longest gap that lasts at a time, or null. @returns {?Gap} */
function longest_gap_at(run, time) {
  let longest = null;
  for (const [id, {gaps, first_token}] of run.lanes) {
    const i = search(gaps.length, i => gaps[i][1] >= time), [since, until] = gaps[i] ?? [Infinity];
    if (since > time || longest && until - since <= longest.until - longest.since) continue;
    longest = {id, since, until, token: first_token + i + 1};
  }
  return longest;
}
/** The batch on a stage of a pipeline, or the bubble before it. */
function describe_stage({iterations}, time, stage) {
  const next = search(iterations.length, k => iterations[k].stages[stage][1] > time);
  if (next === iterations.length) return "";
  const [start, end, bubble = 0, kind] = iterations[next].stages[stage];
  if (time >= start) {
    const batch = name_batch(iterations[next]);
    return `Stage ${stage + 1} computes ${batch} in ${format_seconds(end - start)}.`;
  }
  if (time < start - bubble) return "";
  return `Stage ${stage + 1} waits ${format_seconds(bubble)} for its next batch: a bubble, as ` +
    `${BUBBLE_CAUSES[kind]} (${kind}).`;
}
/** "512 tokens of prefill and 3 decodes". */
function name_batch({decodes, prefill}) {
  return [prefill && `${counted(prefill, "token")} of prefill`,
    decodes.length && counted(decodes.length, "decode")].filter(Boolean).join(" and ");
}
const BUBBLE_CAUSES = {  // SARATHI §3.2
  PB1: "prefills of different length follow each other",
  PB2: "a batch with prefill and one without it follow each other",
  PB3: "decodes with contexts of different length follow each other",
};
/** What a request does at a time, give or take `slack` seconds for gaps. */
function describe_request(run, id, time, slack = 0) {
  const {waits, chunks, gaps, first_token} = run.lanes.get(id);
  const span_at = (spans, slack) => {
    const first = search(spans.length, i => spans[i][1] >= time - slack);
    return spans[first]?.[0] <= time + slack ? first : -1;
  };
  const chunk = span_at(chunks, 0);
  if (chunk >= 0) return describe_chunk(run, id, run.iterations[chunks[chunk][2]]);
  let gap = span_at(gaps, slack);
  for (let i = gap; i >= 0 && gaps[i]?.[0] <= time + slack; i++)
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
function describe_chunk(run, id, {start, end, chunks, decodes}) {
  const [, first, n] = chunks.find(([other]) => other === id);
  const tokens = `tokens ${format_count(first)} to ${format_count(first + n - 1)}`;
  const prompt = format_count(run.requests.get(id).prompt_len);
  const beside = decodes.length ? `beside ${counted(decodes.length, "decode")}` : "alone";
  return `request ${name_of(run, id)}: ${tokens} of its prompt of ${prompt}, ${beside}, ` +
    `in ${format_seconds(end - start)}`;
}
