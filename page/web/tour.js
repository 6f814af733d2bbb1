// The tour: nine stops, each with the iteration that shows it. Read next: live.js.

/** The iteration in a Gap with the most prefill. */
function iteration_of_gap({iterations}, {since, until}) {
  const first = search(iterations.length, i => iterations[i].start >= since);
  const last = search(iterations.length, i => iterations[i].start >= until);
  const largest = index_of_largest(iterations.slice(first, last), ({prefill}) => prefill);
  return Math.min(first + (largest ?? 0), iterations.length - 1);
}
function largest_cut_chunk(run) {
  const is_cut = ([id, , length]) => length < run.requests.get(id).prompt_len;
  return index_of_largest(run.iterations, ({chunks}) => chunks.some(is_cut));
}
function fullest_memory(run) {
  return index_of_largest(run.iterations, ({preempted}) => preempted.length)
    ?? index_of_largest(run.iterations, ({free_pages}) => 1 / (1 + free_pages));
}
/** The request with the longest prompt, and of those with a quarter of it at most the one that
 * waits longest for its first token: {long, short}, ids; null without such. */
function long_and_short(run) {
  const ids = [...run.requests.keys()].filter(id => run.ttft_of(id) !== null);
  const length_of = id => run.requests.get(id).prompt_len;
  const long = ids[index_of_largest(ids, length_of)];
  const shorts = ids.filter(id => 4 * length_of(id) <= length_of(long));
  const slowest = index_of_largest(shorts, id => run.ttft_of(id));
  return slowest === null ? null : {long, short: shorts[slowest]};
}
const seconds_html = seconds => `<b>${format_seconds(seconds)}</b>`;
const colored = (name, text) => `<b class="${name}">${text}</b>`;
const DECODES = colored("decode", "decodes");

/** A stop. `at`: the choices that show it, on a page with choices; `marks`: the bands of the lanes
 * and the elements that it names; `find`: the iteration that shows it, or null; `seconds`: how many
 * must be in view; `text`: sentences in HTML.
 * @typedef {{name: string, at: Object<string, string>, marks: string[],
 *            find: (run: Run) => ?number, seconds?: (run: Run) => number,
 *            text: (run: Run, k: ?number) => string[]}} Stop */
/** @type {Stop[]} */
const TOUR = [
  {
    name: "Tokens, one by one", at: {policy: "vllm", beside: NOBODY}, marks: ["lanes"],
    find: () => null,
    text: run => [
      run.settings.letters ? "Four people ask an LLM server, A to D. Each has a lane."
        : "Each request to the server has a lane.",
      `First its ${colored("prefill", "prompt is computed")}, then it writes one token after`,
      "another: each tick is a token, the colour says how long it took.",
      run.settings.letters ? "C and D come later, with long prompts. Look at A and B then." : ""],
  },
  {
    name: "What stalls", at: {policy: "vllm", beside: NOBODY}, marks: ["lanes", "gaps"],
    find: run => run.longest_gap() && iteration_of_gap(run, run.longest_gap()),
    seconds: run => run.longest_gap().until - run.longest_gap().since,
    text: (run, k) => [
      k === null ? "" : sentence(explain_gap(run, run.longest_gap())),
      k === null ? "" : "It is the longest gap here.",
      "While somebody's prompt is computed alone, nobody else gets a token: their text stands",
      `still. This is a ${colored("stall", "generation stall")}, red where it is longer than the`,
      `allowed ${format_seconds(SLO < Infinity ? SLO : null)}, the dashed line.`],
  },
  {
    name: "What a chunk is", at: {policy: "sarathi-serve", beside: "vllm"},
    marks: ["lanes"],
    find: largest_cut_chunk,
    text: (run, k) => [
      k === null ? "No prompt is cut in this run: each is computed whole."
        : `sarathi-serve cuts the prompt: here ${explain_chunk(run, k)} are computed beside` +
          " everybody's next token. Nobody stands still: this is <b>chunked prefill</b>.",
      compare_longest_gaps(run, panes[1]?.run),
      "The answer is the same: a chunk only moves on the counter of computed tokens."],
  },
  {
    name: "Why decodes ride along", at: {policy: "sarathi-serve", load: "steady", beside: NOBODY},
    marks: ["batches", "#batchbox"],
    find: run => index_of_largest(run.iterations, ({chunks, decodes}) =>
      chunks.length && decodes.length),
    text: (run, k) => [
      k === null ? "In this run no decode shares a batch with a prefill."
        : `Here ${run.iterations[k].decodes.length} ${DECODES}, the next tokens of running answers,` +
          " share a batch with a chunk.",
      explain_costs(),
      "All weights of the model are read once for the whole batch; for a few rows, reading them",
      "takes longer than computing."],
  },
  {
    name: "What the budget does", at: {policy: "sarathi-serve", load: "steady", beside: NOBODY},
    marks: ["batches", "#why"],
    find: run => index_of_largest(run.iterations, ({why, tokens}) =>
      why?.[0] === "budget" && tokens),
    text: (run, k) => [
      k === null ? "Nobody waits for budget in this run."
        : "The budget of this batch is used up, and somebody waits for the next one.",
      "The token budget, or chunk size, is how many tokens an iteration may compute: the line over",
      "the bars. It bounds every gap. Small: even gaps, but first tokens are late. Large: the other",
      "way round. Try another chunk size."],
  },
  {
    name: "A long prompt among short ones",
    at: {policy: "sarathi-serve", load: "one long", beside: NOBODY}, marks: ["lanes", "#why"],
    find: run => long_and_short(run) && index_of_largest(run.iterations, ({waiting}) => waiting),
    seconds: run => run.ttft_of(long_and_short(run).long),
    text: run => {
      const both = long_and_short(run);
      if (!both) return ["No prompt in this run is four times as long as others."];
      const [long, short] = [both.long, both.short].map(id => run.requests.get(id));
      return [
        `Request ${name_of(run, long.id)} has a prompt of ${counted(long.prompt_len, "token")}.`,
        "Its chunks leave all answers running. But prompts are served in order of arrival, so",
        `request ${name_of(run, short.id)}, with ${counted(short.prompt_len, "token")}, waits`,
        `${seconds_html(run.ttft_of(short.id))} for its first one.`];
    },
  },
  {
    name: "Who may pass?", at: {policy: "shortest-uncached", load: "one long", beside: "sarathi-serve"},
    marks: ["lanes", "#policies"],
    find: run => long_and_short(run) && index_of_largest(run.iterations, ({chunks}) =>
      chunks.length > 1 ? chunks.length : 0),
    seconds: run => run.ttft_of(long_and_short(run).long),
    text: run => {
      const other = panes[1]?.run;
      if (!other || !long_and_short(run)) return ["Compare two policies at this load."];
      const compare = key => {
        const [here, there] = [run, other].map(run => run.ttft_of(long_and_short(run)[key]));
        return `${seconds_html(here)} instead of ${seconds_html(there)}`;
      };
      return [
        `${title_of(run)}: short prompts pass the long one. The slowest of them waits`,
        `${compare("short")} for its first token, and the long one pays: ${compare("long")}.`,
        "Other ways are to share the budget, to cap the long prompt, or deadlines: the table",
        "compares them at this load."];
    },
  },
  {
    name: "Memory and preemption", at: {policy: "sarathi-serve", load: "tight", beside: NOBODY},
    marks: ["#cachebox"],
    find: fullest_memory,
    text: (run, k) => [
      k === null || !run.iterations[k].preempted.length
        ? "Nobody is preempted in this run; here memory is fullest."
        : "Here a decode needed a page, none was free, and request " +
          `${name_of(run, run.iterations[k].preempted[0])} lost its own: computed again later.`,
      "Keys and values of all tokens stay in the KV cache, in pages. A request is admitted when",
      "its prompt fits, and takes a page more as it grows."],
  },
  {
    name: "Which policy?", at: {policy: "vllm", load: "overload", beside: "sarathi-serve"},
    marks: ["#policies", "#choices"],
    find: run => index_of_largest(run.iterations, ({waiting}) => waiting),
    text: (run, k) => [
      k === null ? "Nobody ever waits in this run."
        : `Here the queue is longest: ${counted(run.iterations[k].waiting, "request")}.`,
      "The table compares all policies at this load: first tokens (TTFT), gaps (TBT), throughput.",
      "Now try your own question: choose a policy, a chunk size and a load; point at any tick."],
  },
];
/** The first chunk of an iteration: "254 of C's 1,000 tokens, a chunk,". */
function explain_chunk(run, k) {
  const [id, , length] = run.iterations[k].chunks[0];
  const prompt = format_count(run.requests.get(id).prompt_len);
  const tokens = `${format_count(length)} of request ${name_of(run, id)}'s ${prompt} tokens`;
  return `${tokens}, a ${colored("prefill", "chunk")},`;
}
function compare_longest_gaps(run, other) {
  if (!other) return "";
  const [here, there] = [run, other].map(run => gap_seconds({longest_gap: run.longest_gap()}));
  return `The longest gap is ${seconds_html(here)}; below, on the same clock, ` +
    `${title_of(other)} has ${seconds_html(there)}.`;
}
function explain_costs() {
  if (!data.costs) return "";
  const {decodes, chunk, decodes_s, chunk_s, both_s} = data.costs;
  return `On this GPU, with attention, ${decodes} ${DECODES} alone take <b>${format_seconds(decodes_s)}</b>, ` +
    `${colored("prefill", `a chunk of ${chunk}`)} alone <b>${format_seconds(chunk_s)}</b>, ` +
    `both together <b>${format_seconds(both_s)}</b>: the decodes ride along for ` +
    `<b>${format_seconds(both_s - chunk_s)}</b>.`;
}

let stop_number = -1;  // of the tour; -1: it is closed
async function tour(n) {
  if (n < 0 || n >= TOUR.length) return end_tour();
  stop_number = n;
  pause();
  follow = false;
  const stop = TOUR[n];
  if (data.choices) await choose({chunk: "256", load: "A to D", ...stop.at});
  else if (data.runs.length > 1) await choose({run: stop.at.policy});
  if (stop_number !== n) return;  // it was left meanwhile
  const {run} = focused, k = stop.find(run);
  $("stop").textContent = `${n + 1} of ${TOUR.length}: ${stop.name}`;
  $("stoptext").innerHTML = stop.text(run, k).filter(Boolean).join(" ");
  $("tourback").disabled = n === 0;
  $("tournext").textContent = n === TOUR.length - 1 ? "done" : "next";
  document.body.classList.add("touring");
  $("tour").hidden = false;
  set_view(-Infinity, Infinity);
  go(run, k ?? 0);
  if (k !== null && !run.settings.letters) {  // a few requests are seen whole
    const {start, end} = run.iterations[k];
    const half = Math.max((end - start) * 7, (run.end - run.begin) / 80, stop.seconds?.(run) ?? 0);
    set_view(start - half, start + half);
  }
  mark_named(stop.marks);
  $("tournext").focus({preventScroll: true});
}
function end_tour() {
  $("tour").hidden = true;
  stop_number = -1;
  mark_named([]);
  document.body.classList.remove("touring");
  $("guide").focus();
}
/** Outline what a stop names, and bring the first of it into view above the card. */
function mark_named(marks) {
  named_bands = marks.filter(mark => mark[0] !== "#");
  for (const element of document.querySelectorAll(".named")) element.classList.remove("named");
  for (const mark of marks)
    if (mark[0] === "#") document.querySelector(mark).classList.add("named");
  dirty = dirty || "cursor";
  if (!marks.length) return;
  const target = marks[0][0] === "#" ? document.querySelector(marks[0]) : focused.box;
  requestAnimationFrame(() => target.scrollIntoView({block: "start"}));  // once it is drawn
}
