// What an iteration costs: the weights are read once for all rows of a batch, and each row is
// computed. Read next: trace.js.

/** Seconds of the matrix products of so many rows: of reading, of computing, and of both at once.
 * Rows are computed in tiles. The machine is a RowCosts of html.py. */
function costs_of_rows({read_s, row_s, tile}, rows) {
  const compute_s = Math.ceil(rows / tile) * tile * row_s;
  return {read_s: rows ? read_s : 0, compute_s, both_s: rows ? Math.max(read_s, compute_s) : 0};
}
function explain_rows(machine, decodes, chunk) {
  const seconds = rows => costs_of_rows(machine, rows).both_s;
  const ridge = Math.floor(machine.read_s / machine.row_s / machine.tile) * machine.tile;
  const some_decodes = counted(decodes, "decode"), chunk_text = `a chunk of ${chunk}`;
  if (!decodes && !chunk) return "Nothing is computed.";
  if (!chunk)
    return `${some_decodes}: ${format_seconds(seconds(decodes))}, as one. Up to ${ridge} rows ` +
      "reading takes longer than computing, and another row costs nothing.";
  if (!decodes) return `${chunk_text}: ${format_seconds(seconds(chunk))}.`;
  const added_s = seconds(decodes + chunk) - seconds(chunk);
  const added = added_s > 1e-9 ? format_seconds(added_s) : "nothing";
  return `${some_decodes} beside ${chunk_text} add ${added} to its ` +
    `${format_seconds(seconds(chunk))}; alone they take ${format_seconds(seconds(decodes))}, as ` +
    "all weights are read for them once more.";
}
function draw_costs() {
  const machine = data.costs.machines[$("costmachine").value];
  const decodes = Number($("costdecodes").value), chunk = Number($("costchunk").value);
  const costs = costs_of_rows(machine, decodes + chunk);
  const most = Number($("costdecodes").max) + Number($("costchunk").max);
  const longest = costs_of_rows(machine, most).both_s;
  $("costdecodesnumber").textContent = decodes;
  $("costchunknumber").textContent = chunk;
  $("rowsdecode").style.height = `${decodes / 2}px`;
  $("rowsprefill").style.height = `${chunk / 2}px`;
  for (const [id, seconds] of [["read", costs.read_s], ["compute", costs.compute_s]]) {
    $(`${id}bar`).style.width = `${100 * seconds / longest}%`;
    $(`${id}text`).textContent = format_seconds(seconds);
    $(`${id}row`).classList.toggle("counts", seconds === costs.both_s && seconds > 0);
  }
  $("costline").textContent = sentence(explain_rows(machine, decodes, chunk));
}
function start_costs() {
  $("cost").hidden = false;
  $("costwhole").innerHTML = explain_costs();
  $("costdecodes").value = data.costs.decodes;
  $("costchunk").value = data.costs.chunk;
  $("costmachine").append(...data.costs.machines.map(({name}, i) => new Option(name, i)));
  for (const id of ["costmachine", "costdecodes", "costchunk"]) $(id).oninput = draw_costs;
  draw_costs();
}
