// Details: one iteration in numbers. Read next: choices.js.

/** Write HTML into a box, if it is not there yet. If a request's button in it had the focus, it
 * keeps it, or else the box has it. */
function write_html(box, html) {
  if (box.written === html) return;
  const active = document.activeElement, had_focus = box.contains(active);
  box.innerHTML = html;
  box.written = html;
  if (!had_focus) return;
  const button = box.querySelector(`button[data-request="${active.dataset.request}"]`);
  (button ?? box).focus({preventScroll: true});
}
function fill_table(table, rows) {  // the first row is the head
  const cell_html = (cell, is_head) => is_head && cell ? `<th>${cell}</th>` : `<td>${cell}</td>`;
  const row_html = (cells, i) => `<tr>${cells.map(cell => cell_html(cell, i === 0)).join("")}</tr>`;
  write_html(table, rows.map(row_html).join(""));
}
const key_html = id => `<span class="key" style="background:${color_of(id)}"></span>`;
function request_html(run, id, text = "") {
  const name = `<span class="sr">request </span>${name_of(run, id)}`;
  return `<button class="chip" data-request="${id}">${key_html(id)}${name}${text}</button>`;
}
function fill_chips(box, run, chips, limit) {  // chips: [request id, text]
  const html = chips.slice(0, limit).map(([id, text]) => request_html(run, id, `: ${text}`));
  const hidden = chips.length - limit;
  if (hidden > 0) html.push(`<span>and ${format_count(hidden)} more</span>`);
  write_html(box, html.join(""));
}

let details_shown = null;  // what they were of
let numbers_written = 0, numbers_timer = 0;  // when that was, and a timer to do so
function show_details() {
  const {run} = focused, iteration = run.iterations[cursor];
  const key = [iteration, palette, pinned_request, lit_request, innerWidth, run.iterations.length];
  if (details_shown?.every((part, i) => part === key[i])) return;  // only the view has moved
  details_shown = key;
  const state = run.at(cursor), after = run.after(cursor);
  const number = `${format_count(cursor + 1)} of ${format_count(run.iterations.length)}`;
  const seconds = (iteration.start - run.origin).toFixed(3);
  $("position").textContent = `iteration ${number}, at ${seconds} s`;
  $("scrub").setAttribute("aria-valuetext", $("position").textContent);
  const gap = iteration.longest_gap;
  $("policy").textContent = panes.length > 1 ? `${title_of(run)}: ` : "";
  $("decision").textContent = explain(run, cursor);
  $("gapline").textContent = gap ? sentence(`gap: ${explain_gap(run, gap)}`) : "";
  $("pinnedline").textContent = describe_pinned(run, iteration);
  $("detailsof").textContent =
    `Iteration ${format_count(cursor + 1)} of ${title_of(run)}, and how all is after it`;
  const {start, launch, end} = iteration;
  const parts = launch > start ? `: ${format_seconds(launch - start)} to decide and prepare, ` +
    `${format_seconds(end - launch)} to compute and fetch the tokens` : "";
  $("time").textContent = `took ${format_seconds(end - start)}${parts}`;
  show_batch(run, iteration, id => state.progress.get(id).computed);
  show_queue(run, after, iteration);
  const running = [...after.progress.values()].filter(({pages}) => pages.length);
  running.sort((a, b) => a.id - b.id);
  show_running(run, running);
  show_pages(running, run.settings);
  mark_lit();
  clearTimeout(numbers_timer);  // to sort all gaps takes as long as a frame
  const k = cursor;  // of now, as the other boxes: it may have moved when the timer fires
  if (performance.now() - numbers_written > 250) show_numbers(run, k, after, iteration);
  else numbers_timer = setTimeout(() => show_numbers(run, k, after, iteration), 100);
}
/** What the request that is kept outlined does in an iteration, or "". */
function describe_pinned(run, {start, end, longest_gap}) {
  if (!run.requests.has(pinned_request) || longest_gap?.id === pinned_request) return "";
  const text = describe_request(run, pinned_request, (start + end) / 2);
  return text && sentence(text);
}
// blocks as wide as they have tokens, up to the budget; computed(id): the tokens of a request
function show_batch(run, {tokens, budget, decodes, chunks, cache_hits}, computed) {
  const of_budget = budget === null ? ", no budget" : ` of a budget of ${format_count(budget)}`;
  $("batchname").textContent = `The batch: ${counted(tokens, "token")}${of_budget}`;
  const room = Math.max(budget ?? 0, tokens), left = room - tokens;
  const block = (n, kind, text, id) => `<div class="${kind}" title="${text}"
    style="flex:${n / room * 1e4} 0 0" data-request="${id}">${text}</div>`;
  const request = id => `request ${name_of(run, id)}`;
  const blocks = [
    ...decodes.map(id => block(1, "decode", room < 40 ? name_of(run, id) : "", id)),
    ...chunks.map(([id, , n]) => block(n, "prefill", `${request(id)}: ${format_count(n)}`, id)),
    left > 0 ? block(left, "left", `${format_count(left)} left`, "") : "",
  ];
  write_html($("blocks"), blocks.join(""));
  const hits = new Map(cache_hits);
  const describe_chunk = (id, start, n) => {
    const text = `tokens ${format_count(start)} to ${format_count(start + n - 1)}, prefill`;
    return hits.has(id) ? `${text}, ${format_count(hits.get(id))} found in the cache` : text;
  };
  fill_chips($("chips"), run, [
    ...chunks.map(([id, start, n]) => [id, describe_chunk(id, start, n)]),
    ...decodes.map(id => [id, `token ${format_count(computed(id))}, decode`]),
  ], 60);
}
function show_queue(run, state, iteration) {
  const queue = run.waiting(state, iteration, iteration.end);
  const count = counted(queue.length, "request waits", "requests wait");
  $("queuename").textContent = `The queue after it: ${count}`;
  fill_chips($("queue"), run, queue.map(({id}) => {
    const {prompt_len, arrival} = run.requests.get(id);
    const waited = format_seconds(iteration.end - arrival);
    return [id, `${counted(prompt_len, "token")}, for ${waited}`];
  }), 30);
}
function show_running(run, running) {
  const {max_batch, micro_batches} = run.settings;
  $("runningname").textContent =
    `Running after it: ${running.length} of at most ${max_batch * micro_batches}`;
  const rows = running.slice(0, 32).map(({id, computed, cached, output, pages}) => {
    const {prompt_len} = run.requests.get(id), of_prompt = Math.min(computed, prompt_len);
    const percent = n => 100 * n / prompt_len;
    const bar = `<span class="bar"><i class="cached" style="width:${percent(cached)}%"
      title="${counted(cached, "token")} found in the cache"></i>` +
      `<i style="width:${percent(of_prompt) - percent(cached)}%"></i></span>`;
    const prompt = `${format_count(of_prompt)} of ${format_count(prompt_len)}`;
    return [request_html(run, id), bar, prompt, format_count(output), pages.length];
  });
  if (running.length > 32) rows.push([`and ${running.length - 32} more`]);
  const bar_head = running.some(({cached}) => cached) ? "light: found" : "";
  const head = ["request", bar_head, "prompt computed", "output", "pages"];
  fill_table($("running"), [head, ...rows]);
}
/** All latencies up to iteration k; waits that go on count as long as they are by then. */
function show_numbers(run, k, after, {end, preemptions, cached_tokens}) {
  numbers_written = performance.now();
  const {ttft, tbt} = run.so_far(k), waits = run.waits_in(after, end);
  const latencies = {ttft, tbt: Float64Array.of(...tbt, ...waits.map(([wait]) => wait)).sort()};
  const row = (name, key) => [name, ...[0.5, 0.99, 1].map(q => {
    const text = format_seconds(quantile(latencies[key], q));
    return `<span data-k="${key}-${q}">${text}</span>`;
  })];
  const rows = [
    ["", "P50", "P99", "longest"],
    row("TTFT, arrival to first token", "ttft"),
    row("TBT, token to token", "tbt"),
  ];
  if (SLO < Infinity) {
    const stalls = search(run.stalls.length, i => run.stalls[i].k > k);
    const going_on = waits.filter(([, is_stall]) => is_stall).length;
    rows.push([`stalls, longer than ${format_seconds(SLO)}`, "",
      going_on ? `${format_count(going_on)} go on` : "", format_count(stalls + going_on)]);
  }
  rows.push(["requests with a first token", "", "", format_count(ttft.length)]);
  rows.push(["preemptions", "", "", format_count(preemptions)]);
  if (cached_tokens) rows.push(["tokens found in the cache", "", "", format_count(cached_tokens)]);
  fill_table($("numbers"), rows);
}
function show_pages(running, {pages, page_size, micro_batches}) {
  const canvas = $("pages"), pen = canvas.getContext("2d"), scale = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth - 24;
  const size = Math.max(2, Math.min(18, Math.floor(Math.sqrt(width * 150 / pages))));
  const inner = size > 4 ? size - 1 : size;
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(pages / columns) * size;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  pen.scale(scale, scale);
  const corner = page => [page % columns * size, Math.floor(page / columns) * size];
  pen.fillStyle = palette.free;
  for (let page = 0; page < pages; page++) pen.fillRect(...corner(page), inner, inner);
  const readers = new Map();  // page -> [[request, how full the page is]]
  for (const {id, micro_batch, pages: table, computed} of running) {
    const first = (micro_batch ?? 0) * Math.floor(pages / micro_batches);
    table.forEach((page, i) => {
      const full = Math.max(0, Math.min(1, computed / page_size - i));
      if (!readers.has(first + page)) readers.set(first + page, []);
      readers.get(first + page).push([id, full]);
    });
  }
  for (const [page, requests] of readers) {  // a stripe for each request that reads it
    const [x, y] = corner(page), stripe = inner / requests.length;
    requests.forEach(([id, full], i) => {
      pen.fillStyle = color_of(id);
      pen.globalAlpha = 0.3;
      pen.fillRect(x, y + i * stripe, inner, stripe);
      pen.globalAlpha = 1;
      pen.fillRect(x, y + i * stripe, inner * full, stripe);
      if (id !== lit_request) return;
      pen.strokeStyle = palette.ink;
      pen.strokeRect(x + 0.5, y + i * stripe + 0.5, inner - 1, stripe - 1);
    });
  }
  const shared = [...readers.values()].filter(requests => requests.length > 1).length;
  const striped = shared ? `, ${format_count(shared)} by several requests, striped` : "";
  const taken = `${format_count(readers.size)} of ${counted(pages, "page")} taken${striped}`;
  $("pagesname").textContent =
    `The KV cache after it: ${taken}, of ${counted(page_size, "token")} each; pale: not yet written`;
}

