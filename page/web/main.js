// Keys, buttons, and one picture per frame.

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
  stall: next_stall,
  start: () => tour(0),
  save,
};
for (const [id, action] of Object.entries(actions))
  $(id).onclick = () => { if (focused) action(); };  // not before there is something to see
const KEYS = {
  " ": "play", ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", "+": "in",
  "=": "in", "-": "out", "0": "fit", o: "other", t: "guide", d: "theme", s: "save",
  g: "stall", Escape: "tourend",
};
const STEPS_WITH_SHIFT = {ArrowLeft: -10, ArrowRight: 10};
document.addEventListener("keydown", event => {
  const {key, target} = event;
  const is_button = target.matches("button, summary");
  const used_by_target = target.matches("select, #key") || is_button && key === " "
    || target.matches("input") && /^(Arrow|Home|End)/.test(key);
  if (used_by_target || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!focused || !(key in KEYS) || is_opening() && key !== "d" || key === "Escape" && stop_number < 0) return;
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
  palette = new Palette();
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
  if (is_opening()) play_opening(now);
  last_frame = now;
  if (!dirty || !focused?.run.iterations.length) return;
  if (dirty === true) {
    for (const pane of panes) pane.layout();
    const scales = common_scales();
    for (const pane of panes) pane.draw(scales);
  }
  for (const pane of panes) {
    const k = pane === focused ? cursor : index_at(pane.run, moment);
    pane.draw_over(pane.run.iterations[k]);
  }
  dirty = false;
  if (is_opening()) return;
  $("scrub").value = cursor;
  show_details();
  save_address();
}
for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, event => {
    const element = event.target.closest?.("[data-request]");
    if (element?.dataset.request) light_request(Number(element.dataset.request));
    else if (event.target.tagName !== "CANVAS") light_request(null);
  });
}
document.addEventListener("click", event => {
  const id = event.target.closest?.("[data-request]")?.dataset.request;
  if (id) pin_request(Number(id));
});
addEventListener("scroll", hide_tip, {passive: true});
addEventListener("hashchange", restore);
async function start() {
  $("title").textContent = data.live ? `${data.title}: ${data.machine}` : data.title;
  $("machine").textContent = data.machine;
  const source = data.slo_source ? ` (the SLO: ${data.slo_source})` : "";
  $("slo").textContent = SLO < Infinity ? format_seconds(SLO) + source : "an SLO";
  $("scrub").max = 0;
  $("intro").hidden = !data.choices;
  if (data.live) {
    document.documentElement.classList.remove("loading");
    write_example();
    connect();
  } else {
    if (data.runs.length > 1) add_buttons();
    await open_first();
    document.documentElement.classList.remove("loading");
    if (data.costs) start_costs();
    if (data.editor) start_editor();
  }
  requestAnimationFrame(frame);
}
start();
