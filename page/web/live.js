// Live: a page that asks its server for new records, and for the texts that are being written.
// Read next: trace.js.

const MAX_LIVE_ITERATIONS = 20000;  // then a live page starts again from a snapshot
const MAX_TEXTS = 12;  // that are shown
const NO_PLACE = 1e15;  // a place that no record has: the server answers with a snapshot
let api_key = "";  // of the server: kept only here, and sent only in a header

async function connect() {  // ask for new records, 4 times a second
  let run, place = NO_PLACE;
  for (;; await new Promise(done => setTimeout(done, 250))) {
    const reply = await fetch_records(place);
    if (reply.error) $("decision").textContent = reply.error.message;
    else if (!run?.iterations.length)
      $("decision").textContent = run?.requests.size ? "The first iteration since you opened this " +
        "page is being computed." : "Nothing since you opened this page: send a request.";
    for (const record of reply.records ?? []) {
      if (record.live) run = new Run(data.title, {});  // a snapshot begins a new run
      run.apply(record);
    }
    if (reply.records?.length) show_live(run);
    $("try").hidden = Boolean(run?.iterations.length);
    if (run) show_texts(run, reply.texts ?? {});
    place = run?.iterations.length > MAX_LIVE_ITERATIONS ? NO_PLACE : reply.place ?? place;
  }
}
async function fetch_records(place) {  // {error} if the server refuses, or does not answer
  const header = new TextEncoder().encode(`Bearer ${api_key}`);
  try {
    const response = await fetch(`${data.live}/${place}`,
      {headers: {Authorization: String.fromCharCode(...header)}});
    if (response.status !== 401) return await response.json();
  } catch {
    return {error: {message: "The server does not answer; trying again."}};
  }
  await ask_key();
  return fetch_records(place);
}
/** Waits until somebody types the key. */
async function ask_key() {
  $("decision").textContent = api_key ? "This is not the key." : "The server asks for its key.";
  $("keyform").hidden = false;
  $("key").focus();
  await new Promise(done => {
    $("keyform").onsubmit = event => { event.preventDefault(); done(); };
  });
  api_key = $("key").value.trim();
  $("key").value = "";
  $("keyform").hidden = true;
  write_example();
}
/** The end of each text, newest request first: a line under the lanes lights its lane, and in the
 * tip a lane has its text. */
function show_texts(run, texts) {
  run.texts = texts;
  const ids = Object.keys(texts).map(Number).filter(id => run.requests.has(id));
  const lines = ids.sort((a, b) => b - a).slice(0, MAX_TEXTS).map(id => {
    const line = document.createElement("p"), name = document.createElement("b");
    line.dataset.request = id;
    name.textContent = name_of(run, id);
    const text = document.createElement("bdi");
    text.textContent = texts[id];
    line.append(name, text);
    return line;
  });
  $("texts").hidden = !lines.length;
  $("texts").replaceChildren(...lines);
  mark_lit();
}
/** What can be sent to a server that is idle. */
function write_example() {
  const body = {model: data.title, prompt: "Once upon a time", max_tokens: 100, stream: true};
  const authorization = api_key && '-H "Authorization: Bearer $NANOSARATHI_API_KEY" ';
  $("try").textContent = `curl -N ${location.origin}/v1/completions ${authorization}` +
    `-H 'Content-Type: application/json' -d '${JSON.stringify(body)}'`;
}
function show_live(run) {
  if (panes[0]?.run !== run) {
    $("runs").innerHTML = "";
    panes = [new Lanes(run)];
    panes[0].label();
    cursor = 0;
    focus(panes[0]);
  }
  panes[0].gap_text.textContent = last_minute(run);
  $("scrub").max = run.iterations.length - 1;
  if (follow) {
    cursor = Math.max(0, run.iterations.length - 1);
    set_view(run.end - 20, run.end + 0.4);
  }
  dirty = true;
}

/** Latencies and tokens per second of the last minute, in words. */
function last_minute(run) {
  const {iterations} = run, since = Math.max(run.begin, run.end - 60);
  const first = search(iterations.length, i => iterations[i].end > since);
  const seconds_of = pairs => {
    const start = search(pairs.length, i => pairs[i][0] >= first);
    return Float64Array.from(pairs.slice(start), ([, seconds]) => seconds).sort();
  };
  const ttft = seconds_of(run.ttfts), tbt = seconds_of(run.tbts);
  const tokens = iterations.slice(first).reduce((sum, iteration) => sum + iteration.tokens, 0);
  const rate = format_count(Math.round(tokens / Math.max(run.end - since, 1e-3)));
  return `The last minute: ${rate} tokens computed a second, ` +
    `TTFT P50 ${format_seconds(quantile(ttft, 0.5))}, ` +
    `TBT P99 ${format_seconds(quantile(tbt, 0.99))}, ` +
    `longest gap ${format_seconds(quantile(tbt, 1))}.`;
}
