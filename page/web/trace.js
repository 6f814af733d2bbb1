// A trace for ui.perfetto.dev, in Chrome's Trace Event Format. Read next: main.js.

const us = seconds => Math.round(1e6 * seconds);  // both ends of a slice alike: none can overlap
function slice(pid, lane, name, from, to, args) {
  return {name, pid, tid: lane + 1, ph: "X", ts: us(from), dur: us(to) - us(from), args};
}
function instant(pid, lane, name, at, args) {
  return {name, pid, tid: lane + 1, ph: "i", s: "t", ts: us(at), args};
}

function trace(runs) {  // as text, an event a line; those of the same time stay in their order
  const events = runs.flatMap((run, i) =>
    [...trace_batches(run, 2 * i + 1), ...trace_requests(run, 2 * i + 2)]);
  events.sort((a, b) => a.pid - b.pid || (a.ts ?? -1) - (b.ts ?? -1));
  const lines = events.map(event => JSON.stringify(event)).join(",\n");
  return `{"displayTimeUnit": "ms", "traceEvents": [\n${lines}\n]}\n`;
}
function labels(pid, process_name, lanes) {  // of a process and its lanes, [lane, name], in order
  const label = (kind, name, tid) => [
    {ph: "M", name: `${kind}_name`, pid, tid, args: {name}},
    {ph: "M", name: `${kind}_sort_index`, pid, tid, args: {sort_index: tid ?? pid}}];
  const lane_labels = lanes.flatMap(([lane, name]) => label("thread", name, lane + 1));
  return [...label("process", process_name), ...lane_labels];
}
function* trace_batches({name, iterations, settings: {micro_batches, instances}}, pid) {
  const lanes = Array.from({length: micro_batches}, (_, n) =>
    [n, instances?.[n] ?? (micro_batches > 1 ? `micro-batch ${n}` : "iterations")]);
  yield* labels(pid, `${name}: engine`, lanes);
  const last = {};  // curve -> its last values
  for (const iteration of iterations) {
    const {start, end, prefill, tokens, budget, micro_batch} = iteration;
    yield slice(pid, micro_batch, kind_of_batch(iteration), start, end);
    const curves = {
      tokens: {prefill, decode: tokens - prefill},
      "free pages": {pages: iteration.free_pages},
      requests: {running: iteration.running, waiting: iteration.waiting},
      "token budget": budget === null ? last["token budget"] : {tokens: budget},
    };
    for (const [curve, args] of Object.entries(curves)) {  // they are steps: only changes count
      if (JSON.stringify(args) === JSON.stringify(last[curve])) continue;
      last[curve] = args;
      yield {name: curve, pid, ph: "C", ts: us(start), args};
    }
  }
}
function kind_of_batch({prefill, tokens}) {
  if (!prefill) return "decode";
  return prefill === tokens ? "prefill" : "hybrid";
}
function* trace_requests(run, pid) {
  const ids = [...run.lanes.keys()];
  yield* labels(pid, `${run.name}: requests`, ids.map(id => [id, `request ${id}`]));
  yield* trace_gaps(run, pid);  // before the chunks: a slice comes before those that it holds
  for (const {start, end, chunks, preempted, cache_hits} of run.iterations) {
    for (const id of preempted) yield instant(pid, id, "preempted", start);
    for (const [id, tokens] of cache_hits)
      yield instant(pid, id, `${counted(tokens, "token")} found in the cache`, start, {tokens});
    for (const [id, , n] of chunks) yield slice(pid, id, `prefill chunk of ${n}`, start, end);
  }
  for (const {id, tokens, prefilled, start, end} of run.transfers) {  // after the first token
    if (start > prefilled) yield slice(pid, id, "waiting for memory", prefilled, start);
    yield slice(pid, id, `${counted(tokens, "token")} on the link`, Math.max(start, prefilled),
      end, {tokens});
  }
  for (const [id, {waits: spans}] of run.lanes) {
    for (const [from, to] of spans) yield slice(pid, id, "waiting", from, to);
    const {ended: reason, waits, since} = run.state.progress.get(id);
    const name = reason === "abort" ? "aborted" : "finished";
    if (reason) yield instant(pid, id, name, run.end_of(id), {reason});
    else if (waits && since < run.end) yield slice(pid, id, "waiting", since, run.end);
  }
}
function* trace_gaps(run, pid) {  // gaps with others' prefill, and rows of decodes without one
  const {iterations} = run;
  const micro_batches = new Map();  // request -> its micro-batch
  for (const {chunks, decodes, micro_batch} of iterations)
    for (const id of [...chunks.map(([id]) => id), ...decodes]) micro_batches.set(id, micro_batch);
  const rows = new Map();  // request -> the slice of its last decodes in a row
  for (const [k, , id, since] of run.tbts) {
    const {start, end, chunks, micro_batch} = iterations[k];
    const own_micro_batch = micro_batches.get(id) ?? micro_batch;
    const others = prefill_of_others(iterations, since, end, id, own_micro_batch);
    const prefill_tokens = others.reduce((sum, [, tokens]) => sum + tokens, 0);
    const row = rows.get(id);
    if (prefill_tokens) {
      const [cause] = others[index_of_largest(others, ([, tokens]) => tokens)];
      const kind = end - since > SLO ? "stall" : "gap";
      yield slice(pid, id, `${kind}, caused by ${cause}`, since, end, {prefill_tokens});
      rows.delete(id);
    } else if (chunks.some(([other]) => other === id)) {
      rows.delete(id);
    } else if (row) {
      row.dur = us(end) - row.ts;
      row.args.tokens++;
    } else {
      const new_row = slice(pid, id, "decodes", start, end, {tokens: 1});
      rows.set(id, new_row);
      yield new_row;
    }
  }
}
function save() {
  const link = document.createElement("a"), text = trace(panes.map(pane => pane.run));
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = `${data.title}.trace.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

