// The opening: four requests play once under two policies, one above the other, on one clock. Then
// it says what can be tried, and the rest of the page is shown when it is asked for. Read next:
// tour.js.

const PLAYING_S = 14;  // how long it plays; the run itself takes less than a second
const MIN_COUNTER_WIDTH = 44;  // pixels of a gap that has room for its seconds

const opening = {is_open: false, began: null};  // began: when it began to play, in ms, if it plays
const is_opening = () => opening.is_open;

async function open_opening() {
  opening.is_open = true;
  await choose({policy: "vllm", beside: "sarathi-serve"});
  document.body.classList.add("opening");
  $("opening").hidden = false;
  $("dragchunk").hidden = axes[1]?.[0] !== "chunk";
  $("ownpolicy").hidden = !data.editor;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) end_opening();
  else play_again();
}
function play_again() {
  opening.began = performance.now();
  $("openingbuttons").classList.add("later");
  const [low, high] = range(), slower = Math.round(PLAYING_S / (high - low));
  $("story").textContent = "Four people ask an LLM server, A to D: their prompts are computed (blue), " +
    `then each tick is a token of an answer. The clock goes ${slower} times slower than on a GPU.`;
}
/** Move the clock of the opening. */
function play_opening(now) {
  if (opening.began === null) return;
  const [low, high] = range();
  revealed = low + (now - opening.began) / 1e3 / PLAYING_S * (high - low);
  if (revealed >= high) end_opening();
  dirty = true;
}
function end_opening() {
  opening.began = null;
  revealed = Infinity;
  $("openingbuttons").classList.remove("later");
  $("story").innerHTML = story(...panes.map(pane => pane.run));
  dirty = true;
}
/** One sentence on the run above and the one below it. */
function story(above, below) {
  const [longer, shorter] = [above, below].map(run => run.longest_gap());
  const late = [...above.requests.values()].filter(({arrival}) => arrival > 0);
  const names = list_names(above, late.map(({id}) => id));
  const ms = gap => format_seconds(gap.until - gap.since);
  return `${names} come with long prompts: ${title_of(above)} computes them whole, and the other ` +
    `answers stand still for ${colored("stall", ms(longer))}, a <b>generation stall</b>; ` +
    `${title_of(below)} cuts them into ${colored("prefill", "chunks")}, computes one beside ` +
    `everybody's next token, and nobody waits longer than <b>${ms(shorter)}</b>.`;
}
/** What is drawn over the lanes: the seconds of each stall within it, what is computed, and the
 * present moment. */
function draw_opening(lanes, pen) {
  const {run, bar_height} = lanes;
  pen.font = "600 13px system-ui, sans-serif";
  pen.fillStyle = palette.back;
  for (const id of lanes.ids) {
    const {gaps, chunks} = run.lanes.get(id), middle = lanes.lane_y(id) + bar_height / 2 + 5;
    for (const [from, to] of lanes.visible(gaps))
      if (to - from > SLO) write_within(lanes, pen, from, to, middle, format_seconds(to - from));
    const prompt = counted(run.requests.get(id).prompt_len, "token");
    const [chunk] = lanes.visible(chunks);
    if (chunk && !is_narrow()) write_within(lanes, pen, chunk[0], chunk[1], middle, prompt);
  }
  if (revealed === Infinity) return;
  pen.fillStyle = palette.ink;
  pen.fillRect(lanes.x(revealed), 0, 1.5, lanes.base);
}
/** Write a text into a bar that has room for it. */
function write_within(lanes, pen, from, to, y, text) {
  const left = lanes.x(from), width = lanes.x(to) - left;
  if (width < Math.max(MIN_COUNTER_WIDTH, pen.measureText(text).width + 8)) return;
  pen.textAlign = "center";
  pen.fillText(text, left + width / 2, y);
}
function leave_opening() {
  opening.is_open = false;
  opening.began = null;
  revealed = Infinity;
  document.body.classList.remove("opening");
  $("opening").hidden = true;
}
/** Show the rest of the page. */
async function close_opening() {
  if (!is_opening()) return;
  leave_opening();
  await show_first();
}
/** A slider over the chunk sizes; the picture follows it. */
function drag_chunk() {
  const [, labels] = axes[1], slider = $("chunkslider");
  $("dragchunk").hidden = true;
  $("chunklabel").hidden = false;
  slider.max = labels.length - 1;
  slider.value = labels.indexOf(chosen.chunk);
  slider.oninput = async () => {
    $("chunksize").textContent = labels[slider.value];
    await choose({chunk: labels[slider.value]});
    end_opening();
  };
  $("chunksize").textContent = chosen.chunk;
  slider.focus();
}
$("again").onclick = play_again;
$("dragchunk").onclick = drag_chunk;
$("everything").onclick = close_opening;
$("ownpolicy").onclick = async () => {
  await close_opening();
  jump_to_editor();
};
