// The view: which seconds are seen, and which iteration is looked at. Read next: details.js.

const view = {from: 0, to: 1};  // seconds
let panes = [];  // Lanes: one, or two to compare
let focused = null;  // the one whose iterations are stepped
let cursor = 0;  // the iteration that is looked at
let moment = 0;  // the time that was chosen
let playing = false, follow = Boolean(data.live);
let revealed = Infinity;  // what happens after this time is not drawn: the opening moves it
let dirty = true;  // what is to be drawn: true, "cursor" or false

function range() {  // of all runs, in seconds
  const runs = panes.map(pane => pane.run), low = Math.min(...runs.map(run => run.begin));
  return [low, Math.max(...runs.map(run => run.end), low + 1e-3)];
}
function is_all_in_view() {
  const [low, high] = range();
  return view.from <= low && view.to >= high;
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
/** Go to the next iteration in which a stall ends; from the last one to the first. */
function next_stall() {
  const {run} = focused;
  const stall = run.stalls.find(({k}) => k > cursor) ?? run.stalls[0];
  if (!stall) return;
  pause();
  follow = false;
  go(run, stall.k);
  const {id, since} = stall, until = run.iterations[stall.k].end, margin = until - since;
  if (since < view.from || view.to - view.from > 40 * margin)
    set_view(since - 3 * margin, until + 3 * margin);
  pinned_request = id;
  light_request(id);
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
