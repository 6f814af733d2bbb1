// The opening: four requests play once under two policies, one above the other, on one clock. Then
// it says what was seen. The rest of the page, and its tour, are shown when they are asked for. Read next:
// tour.js.

const PLAYING_S = 14;  // how long it plays; the run itself takes less than a second
const MIN_COUNTER_WIDTH = 44;  // pixels of a gap that has room for its seconds
const GREENS = "The lighter its green, the longer a token took.";

const opening = {is_open: false, began: null};  // began: when it began to play, in ms, if it plays
const is_opening = () => opening.is_open;

async function open_opening() {
  opening.is_open = true;
  await choose({policy: "vllm", beside: "sarathi-serve"});
  document.body.classList.add("opening");
  $("opening").hidden = false;
  $("ownpolicy").hidden = !data.editor;
  show_chunk_slider();
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) end_opening();
  else play_again();
}
function play_again() {
  opening.began = performance.now();
  $("again").textContent = "Skip to the end";
  const [low, high] = range(), slower = Math.round(PLAYING_S / (high - low));
  $("story").textContent = "Four people ask an LLM server, A to D: their prompts are computed (blue), " +
    `then each tick is a token of an answer. ${GREENS} The clock goes ${slower} times slower than on a GPU.`;
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
  $("again").textContent = "Play again";
  $("story").innerHTML = story(...panes.map(pane => pane.run));
  dirty = true;
}
/** What a run does to the answers that are being written when others come with long prompts: `late`
 * and `cut`, the ids of those and of them whose prompts are cut; `gap_s`, how long an answer stands
 * still at most; `last`, the id whose first token comes last after its arrival, and its `ttft_s`. */
function facts_of(run) {
  const late = [...run.requests.values()].filter(({arrival}) => arrival > 0).map(({id}) => id);
  const last = late[index_of_largest(late, id => run.ttft_of(id))];
  return {
    late, last,
    cut: late.filter(id => run.lanes.get(id).chunks.length > 1),
    gap_s: gap_seconds({longest_gap: run.longest_gap()}),
    ttft_s: run.ttft_of(last),
  };
}
/** The run above, the one below it, and the price of what is better there, in sentences. */
function story(above, below) {
  const {late, gap_s} = facts_of(above), facts = facts_of(below);
  const {cut, last} = facts;
  const prompts = cut.length === late.length ? "them" : `the prompt of ${list_names(below, cut)}`;
  const cuts = cut.length ? `cuts ${prompts} into ${colored("prefill", "chunks")} and computes each`
    : "computes them";
  const stall = seconds => `<b${seconds > SLO ? ' class="stall"' : ""}>${format_seconds(seconds)}</b>`;
  return `${list_names(above, late)} come with long prompts: ${title_of(above)} computes them whole, ` +
    `and the other answers stand still for ${stall(gap_s)}, a <b>generation stall</b>. ` +
    `${title_of(below)} ${cuts} beside everybody's next token: no answer stands still for longer ` +
    `than ${stall(facts.gap_s)}. The price is ${name_of(below, last)}'s first token, after ` +
    `<b>${format_seconds(facts.ttft_s)}</b> instead of ${format_seconds(above.ttft_of(last))}. ${GREENS}`;
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
    for (const [from, to, k] of is_narrow() ? [] : lanes.visible(chunks)) {
      const [, , length] = run.iterations[k].chunks.find(([other]) => other === id);
      write_within(lanes, pen, from, to, middle, counted(length, "token"));
    }
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
/** A slider over the chunk sizes, if there are several; the picture follows it. */
function show_chunk_slider() {
  $("chunklabel").hidden = axes[1]?.[0] !== "chunk";
  if ($("chunklabel").hidden) return;
  const [, labels] = axes[1], slider = $("chunkslider");
  slider.max = labels.length - 1;
  slider.value = labels.indexOf(chosen.chunk);
  slider.oninput = async () => {
    $("chunksize").textContent = labels[slider.value];
    await choose({chunk: labels[slider.value]});
    end_opening();
  };
  $("chunksize").textContent = chosen.chunk;
}
$("again").onclick = () => opening.began === null ? play_again() : end_opening();
$("everything").onclick = async () => {
  await close_opening();
  if (chosen[axes[0][0]] === "vllm") await tour(0);  // not if a policy of one's own comes first
};
$("ownpolicy").onclick = async () => {
  await close_opening();
  jump_to_editor();
};
