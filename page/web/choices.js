// Choosing runs: rows of buttons, the table of all policies, and the address that holds what is
// shown. Read next: tour.js.

const NOT_CHOSEN = "*";  // the part of a run's name for which it has no choice
const NOBODY = "nothing";  // with which a run is compared
const YOURS = " (yours)";  // with which the name of a policy ends that was written in the page

// What can be chosen: {row of buttons: labels}. The first row is that of policies.
const axes = Object.entries(data.choices ?? {run: data.runs.map(({name}) => name)});
const chosen = Object.fromEntries(axes.map(([axis, labels]) => {
  const first = axis === "chunk" ? (labels.length - 1) >> 1 : 0;
  return [axis, labels[first]];
}));
chosen.beside = NOBODY;

// ---- Runs ---------------------------------------------------------------------------------------

const loaded = new Map();
async function load(entry) {
  if (loaded.has(entry)) return loaded.get(entry);
  const content = entry.records ?? await unpack(entry);
  const run = new Run(entry.name, entry.settings);
  for (const record of entry.file ? content[entry.name] : content) run.apply(record);
  loaded.set(entry, run);
  return run;
}
const unpacked = new Map();  // the content of files, by their names
async function fetch_file(file) {
  const answer = await fetch(file);
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.body;
}
/** The content of a Packed of html.py: of the page, or of a file beside it. */
async function unpack({data: base64, file}) {
  const decompress = stream =>
    new Response(stream.pipeThrough(new DecompressionStream("gzip"))).json();
  if (!file) {
    const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0));
    return decompress(new Blob([bytes]).stream());
  }
  if (!unpacked.has(file)) unpacked.set(file, fetch_file(file).then(decompress));
  try {
    return await unpacked.get(file);
  } catch {
    unpacked.delete(file);  // it may be there the next time
    const hint = location.protocol === "file:"
      ? ": this folder must be served, as by python -m http.server" : "";
    throw new Error(`${file} could not be loaded${hint}`);
  }
}
const parts_of = name => data.choices ? name.split(" | ") : [name];
/** The run of a policy at what is chosen besides, or at other labels; undefined without one. */
function entry_of(policy, labels = chosen) {
  const wanted = axes.slice(1).map(([axis]) => labels[axis]);
  return data.runs.find(({name}) => {
    const [run_policy, ...parts] = parts_of(name);
    const matches = parts.every((part, i) => part === NOT_CHOSEN || part === wanted[i]);
    return run_policy === policy && matches;
  });
}
/** "sarathi-serve, chunk 256": the policy of a run, and its chunk size. */
function title_of(run) {
  if (data.live) return run.settings.policy;
  const [policy, chunk] = parts_of(run.name);
  const has_chunk = axes[1]?.[0] === "chunk" && chunk !== NOT_CHOSEN;
  return has_chunk ? `${policy}, chunk ${chunk}` : policy;
}
let show_calls = 0;
async function show(entries) {
  const call = ++show_calls, runs = [];
  try {
    for (const entry of entries) runs.push(await load(entry));
  } catch (error) {
    $("decision").textContent = error.message;
    return;
  }
  if (call !== show_calls) return;  // something else was chosen meanwhile
  const {from, to} = !panes.length || is_all_in_view() ? {from: -Infinity, to: Infinity} : view;
  $("runs").innerHTML = "";
  panes = runs.map(run => new Lanes(run));
  for (const pane of panes) pane.label();
  $("other").hidden = panes.length < 2;
  $("below").hidden = panes.length < 2 || !runs[0].settings.letters;
  focus(panes[0]);
  set_view(from, to);
  save_address();
  show_table();
}

// ---- Buttons ------------------------------------------------------------------------------------

/** Show what is chosen; first choose what `wanted` says, {row: the beginning of a label}. */
async function choose(wanted = {}) {
  for (const [axis, labels] of [...axes, ["beside", [NOBODY, ...axes[0][1]]]]) {
    const label = labels.find(label => wanted[axis] === label)
      ?? labels.find(label => wanted[axis] && label.startsWith(wanted[axis]));
    if (label) chosen[axis] = label;
  }
  const [policy_axis, policies] = axes[0];
  if (!can_run(chosen[policy_axis])) {  // this policy has no run of this load
    if (wanted[policy_axis]) choose_parts_of(chosen[policy_axis]);
    else chosen[policy_axis] = policies.find(policy => entry_of(policy));
  }
  await add_missing_runs();
  if (!entry_of(chosen.beside)) chosen.beside = NOBODY;
  const is_same = chosen.beside === chosen[policy_axis];
  $("notice").textContent = is_same
    ? `${chosen.beside} is compared with itself: one picture shows both.` : "";
  const entries = [entry_of(chosen[policy_axis]), entry_of(chosen.beside)].filter(Boolean);
  mark_buttons(entries);
  return show([...new Set(entries)]);
}
/** Whether a policy has a run of what is chosen besides, or was written here and can have one. */
const can_run = policy => entry_of(policy) || own_sources.has(policy);
/** Choose what the first run of a policy has, where that differs from what is chosen. */
function choose_parts_of(policy) {
  const of_policy = data.runs.map(({name}) => parts_of(name)).filter(([name]) => name === policy);
  const load = of_policy[0].at(-1), same_load = of_policy.filter(parts => parts.at(-1) === load);
  const is_chosen = parts => axes.slice(1, -1).every(([axis], i) => chosen[axis] === parts[i + 1]);
  const parts = same_load.find(is_chosen) ?? same_load[0];
  axes.forEach(([axis], i) => { if (parts[i] !== NOT_CHOSEN) chosen[axis] = parts[i]; });
}
function mark_buttons(entries) {
  for (const button of document.querySelectorAll("#choices button[data-axis]")) {
    const {axis, label} = button.dataset;
    button.setAttribute("aria-pressed", String(chosen[axis] === label));
    const place = axes.findIndex(([name]) => name === axis);
    button.disabled = place > 0 && entries.every(({name}) => parts_of(name)[place] === NOT_CHOSEN);
    button.hidden = place === 0 && !can_run(label);  // without a run of this load
  }
  if (!$("beside")) return;
  $("beside").value = chosen.beside;
  for (const option of $("beside").options)
    option.hidden = option.value !== NOBODY && !can_run(option.value);
}
function add_buttons() {
  for (const [axis, labels] of axes) {
    const row = document.createElement("div");
    row.className = "row";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", axis);
    row.innerHTML = `<span class="axis"></span>`;
    row.firstChild.textContent = axis;
    row.append(...labels.map(label => {
      const button = document.createElement("button");
      button.textContent = label;
      button.title = note_of(axis, label);
      Object.assign(button.dataset, {axis, label});
      button.onclick = () => choose({[axis]: label});
      return button;
    }));
    $("choices").append(row);
  }
  const label = document.createElement("label"), select = document.createElement("select");
  select.id = "beside";
  select.append(...[NOBODY, ...axes[0][1]].map(name => new Option(name)));
  select.oninput = () => choose({beside: select.value});
  label.append("compare with ", select);
  $("choices").lastChild.append(label);
}
/** What a policy does, as a run of it says. */
function note_of(axis, label) {
  if (axis !== axes[0][0]) return "";
  const entry = data.runs.find(({name}) => parts_of(name)[0] === label);
  return entry?.settings.note ?? "";
}

// ---- The table of all policies ------------------------------------------------------------------

let table_calls = 0;
/** Write a row for each policy at what is chosen besides, one after another: each takes a while. */
async function show_table() {
  const call = ++table_calls, shown = panes.map(pane => pane.run.name);
  const entries = axes[0][1].map(policy => entry_of(policy)).filter(Boolean);
  $("policies").hidden = entries.length < 2;
  if (entries.length < 2) return;
  const besides = axes.slice(1).map(([axis]) => `${axis} ${chosen[axis]}`).join(", ");
  $("tabletitle").textContent = besides ? `All policies at ${besides}` : "All policies";
  const rows = [];
  for (const entry of entries) {
    if (!loaded.has(entry)) await new Promise(done => setTimeout(done, 30));
    const run = await load(entry);
    if (call !== table_calls) return;
    rows.push(table_row(run, shown.includes(entry.name)));
  }
  const heads = COLUMNS.map(([, head]) => `<th>${head}`).join("");
  $("policytable").tHead.innerHTML = `<tr><th>policy${heads}<th class="note">in an iteration`;
  $("policytable").tBodies[0].replaceChildren(...rows);
}
/** The columns of numbers: [key of Run.metrics, head, how a number is written, whether it is bad]. */
const is_over = seconds => seconds > SLO;
const COLUMNS = [
  ["ttft_p50", "TTFT P50", format_seconds],
  ["ttft_p90", "TTFT P90", format_seconds],
  ["tbt_p99", "TBT P99", format_seconds, is_over],
  ["longest", "longest gap", format_seconds, is_over],
  ["stalls", "stalls", format_count, Boolean],
  ["tokens_per_s", "tokens/s", n => format_count(Math.round(n))],
  ["cache", "KV cache in use", share => `${(100 * share).toFixed(0)} %`],
];
function table_row(run, is_shown) {
  const metrics = run.metrics(), [policy] = parts_of(run.name);
  const row = document.createElement("tr"), button = document.createElement("button");
  row.className = is_shown ? "shown" : "";
  row.insertCell().append(button);
  for (const [key, , format, is_bad] of COLUMNS) {
    const cell = row.insertCell();
    cell.dataset.k = key;
    cell.className = is_bad?.(metrics[key]) ? "over" : "";
    cell.textContent = format(metrics[key]);
  }
  const note = row.insertCell();
  note.className = "soft note";
  note.textContent = run.settings.note ?? "";
  button.textContent = (is_shown ? "● " : "") + title_of(run);
  button.setAttribute("aria-current", String(is_shown));
  button.onclick = () => choose({[axes[0][0]]: policy});
  return row;
}

// ---- The address --------------------------------------------------------------------------------

let address_timer = 0;
/** Write what is shown behind the # of the address, after a while without changes. */
function save_address() {
  clearTimeout(address_timer);
  if (data.live || is_opening()) return;
  address_timer = setTimeout(() => history.replaceState(null, "", "#" + address()), 200);
}
function address() {
  const values = new URLSearchParams();
  for (const [axis] of axes)
    if (data.runs.length > 1) values.set(axis, chosen[axis]);
  if (chosen.beside !== NOBODY) values.set("beside", chosen.beside);
  if (panes[1] && focused === panes[1]) values.set("look", "beside");
  values.set("i", String(cursor + 1));
  if (!is_all_in_view()) {
    values.set("from", view.from.toFixed(4));
    values.set("to", view.to.toFixed(4));
  }
  if (pinned_request !== null) values.set("request", String(pinned_request));
  return values.toString();
}
/** A sentence for each label in the address that the page lacks: what is shown is another run. */
function sentences_of_missing(values) {
  const has_label = (labels, wanted) => labels.some(label => label.startsWith(wanted));
  const rows = [...axes, ["beside", [NOBODY, ...axes[0][1]]]];
  const missing = rows.filter(([axis, labels]) =>
    values[axis] && !has_label(labels, values[axis]));
  return [...new Set(missing.map(([axis]) => values[axis]))].map(label =>
    label.endsWith(YOURS)
      ? `The address names ${label}, which is not there yet: run it in the editor below.`
      : `The address names ${label}, which this page does not have.`);
}
/** Show what the address says; returns whether it says anything. */
async function restore() {
  if (!location.hash) return false;
  leave_opening();
  const values = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  await choose({beside: NOBODY, ...values});
  $("notice").append(sentences_of_missing(values).join(" "));
  if (values.look && panes[1]) focus(panes[1]);
  const from = Number(values.from), to = Number(values.to);
  set_view(...(to > from ? [from, to] : [-Infinity, Infinity]));
  if (Number(values.i) >= 1) go(focused.run, Number(values.i) - 1);
  pinned_request = focused.run.requests.has(Number(values.request)) ? Number(values.request) : null;
  light_request(null);
  return true;
}
/** The first thing that is seen: two runs on one clock. They play once if there are choices; but if
 *  somebody's own policy is among these, it is the first, and it is shown. */
async function open_first() {
  if (await restore()) return;
  if (data.choices) return axes[0][1][0] === "vllm" ? open_opening() : show_first();
  await choose({beside: axes[0][1][1] ?? NOBODY});
  if (data.iteration) go(focused.run, data.iteration - 1);
}
/** The first policy and another one, and the longest gap of the first. */
async function show_first() {
  const labels = axes[0][1], [policy] = labels;
  const beside = ["sarathi-serve", "vllm"].find(name => name !== policy && labels.includes(name));
  await choose({policy, beside: beside ?? NOBODY});
  const gap = focused.run.longest_gap();
  if (gap) go(focused.run, iteration_of_gap(focused.run, gap));
}
