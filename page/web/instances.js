// Instances that work side by side, replicas or two pools: a lane for each, hatched while it is
// idle. Two pools have a lane between them for the link, a thin bar for each transfer.
// Read next: pointing.js.

/** A Sent of policies/observers.py. `bar`: its place in the lane, from the top.
 * @typedef {{id: number, source: number, target: number, tokens: number, prefilled: number,
 *            start: number, end: number, bar: number}} Transfer */
const BARS = 3, BAR_HEIGHT = 4, BAR_DISTANCE = 5;  // below each other in the lane of the link

/** Put a transfer behind others in the first row of bars that is free when it begins. */
function add_transfer(transfers, transfer) {
  const is_free = bar =>
    (transfers.findLast(other => other.bar === bar)?.end ?? 0) <= first_seen(transfer);
  const bar = Array.from({length: BARS}, (_, bar) => bar).find(is_free) ?? 0;
  transfers.push({...transfer, bar});
}
const first_seen = ({prefilled, start}) => Math.min(prefilled, start);
/** Seconds after its first token that a request waits for memory, and that it is sent. */
const memory_seconds = ({prefilled, start}) => Math.max(0, start - prefilled);
const link_seconds = ({prefilled, start, end}) => end - Math.max(start, prefilled);

/** The names of the lanes of the band "stages". */
function band_rows({stages = 0, instances = [], prefills = 0}) {
  if (stages) return Array.from({length: stages}, (_, stage) => `stage ${stage + 1}`);
  if (!prefills) return instances;
  return [...instances.slice(0, prefills), "link", ...instances.slice(prefills)];
}
/** The lane of an instance; that of the link lies between the pools. */
const row_of = ({prefills = Infinity}, instance) => instance + (instance >= prefills);

function draw_instances(lanes, pen) {
  const {run} = lanes, {instances, prefills} = run.settings;
  if (!instances) return;
  const [top] = lanes.band("stages"), height = STAGE_HEIGHT - 3;
  const y_of = instance => top + row_of(run.settings, instance) * STAGE_HEIGHT;
  const iterations = iterations_in_view(run);
  pen.fillStyle = hatched(pen);
  for (const instance of instances.keys())
    lanes.fill(pen, run.begin, run.end, y_of(instance), height);
  pen.fillStyle = palette.back;  // or the hatching would be seen between batches
  for (const {start, end, micro_batch} of iterations)
    pen.fillRect(lanes.x(start), y_of(micro_batch), lanes.x(end) - lanes.x(start), height);
  for (const iteration of iterations) {
    pen.fillStyle = palette[kind_of_batch(iteration)];
    lanes.fill(pen, iteration.start, iteration.end, y_of(iteration.micro_batch), height);
  }
  if (prefills) draw_transfers(lanes, pen, top + prefills * STAGE_HEIGHT);
}
function draw_transfers(lanes, pen, top) {
  for (const {prefilled, start, end, bar} of lanes.run.transfers) {
    if (end < view.from || Math.min(prefilled, start) > view.to) continue;
    const y = top + bar * BAR_DISTANCE;
    pen.fillStyle = palette.wait;
    if (start > prefilled) lanes.fill(pen, prefilled, start, y, BAR_HEIGHT);
    pen.fillStyle = palette.accent;
    lanes.fill(pen, start, end, y, BAR_HEIGHT, 1);
  }
}
function caption_of_instances({prefills}) {
  const link = prefills && !is_narrow() ? "; link: keys and values, gray: wait for memory" : "";
  return `batches on each instance; hatched: idle${link}`;
}

// ---- In words -----------------------------------------------------------------------------------

/** The batch of an instance, how long it is idle, or what is sent over the link. */
function describe_row(lanes, time, row) {
  const {run} = lanes, {instances, prefills} = run.settings;
  if (row === prefills) return describe_link(lanes, time);
  const instance = row > prefills ? row - 1 : row;
  const iterations = run.iterations.filter(({micro_batch}) => micro_batch === instance);
  const next = search(iterations.length, k => iterations[k].end > time);
  const name = instances[instance][0].toUpperCase() + instances[instance].slice(1);
  const {start, end} = iterations[next] ?? {start: run.end, end: run.end};
  if (time > run.end || time < run.begin) return "";
  if (time >= start)
    return `${name} computes ${name_batch(iterations[next])} in ${format_seconds(end - start)}.`;
  const since = iterations[next - 1]?.end ?? run.begin;
  const cause = instance >= prefills ? "no request has been sent to it"
    : "there is no request that it can begin";
  return `${name} is idle for ${format_seconds(start - since)}: ${cause}.`;
}
function describe_link({run, seconds_per_pixel}, time) {
  const slack = 2 * seconds_per_pixel;  // a narrow bar can be hit
  const sent = run.transfers.filter(transfer =>
    transfer.end >= time - slack && first_seen(transfer) <= time + slack);
  sent.sort((a, b) => (a.start > time) - (b.start > time));  // those that wait for memory later
  const texts = sent.slice(0, BARS).map(transfer => {
    const memory_s = memory_seconds(transfer);
    const wait = memory_s ? `, waited ${format_seconds(memory_s)} for memory` : "";
    const early = transfer.start < transfer.prefilled ? " after its prefill" : "";
    return sentence(`request ${name_of(run, transfer.id)}: ${counted(transfer.tokens, "token")}, ` +
      `${format_seconds(link_seconds(transfer))} on the link${early}${wait}`);
  });
  if (sent.length > BARS) texts.push(`And ${sent.length - BARS} more.`);
  return texts.join(" ");
}
/** How a request was sent between two tokens, or "". */
function explain_transfer({transfers}, id, since, until) {
  const transfer = transfers.find(({id: other, prefilled, end}) =>
    other === id && prefilled >= since && end <= until);
  if (!transfer) return "";
  const memory_s = memory_seconds(transfer);
  const wait = memory_s ? `${format_seconds(memory_s)} for memory and ` : "";
  return `, of which ${wait}${format_seconds(link_seconds(transfer))} on the link`;
}
/** How much of the time each instance is idle, and how long the link takes; "" without any. */
function summarize_instances({iterations, transfers, begin, end, settings: {instances}}) {
  if (!instances) return "";
  const busy = instances.map(() => 0);
  for (const {start, end, micro_batch} of iterations) busy[micro_batch] += end - start;
  const shares = instances.map((name, instance) =>
    `${name} ${(100 * (1 - busy[instance] / (end - begin))).toFixed(1)} %`);
  const idle = `Idle: ${shares.join(", ")} of the time.`;
  if (!transfers.length) return idle;
  const times = transfers.map(link_seconds).sort((a, b) => a - b);
  return `${idle} ${counted(transfers.length, "transfer")}, each ` +
    `${format_seconds(quantile(times, 0.5))} on the link (median, after the first token).`;
}
