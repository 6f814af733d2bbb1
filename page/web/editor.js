// Writing a policy in the page, or the solution of an exercise: Python runs in a worker.
// Read first: lab/explore/answer.py, worker.js, choices.js.

const LIMIT_S = 10;  // of one answer: what takes longer is a loop without an end
const STOPPED = "stopped";
const NO_EXERCISE = "policy";
const INDENT = "    ";
const BASE = "sarathi-serve";  // a policy that was written here is compared with it
const LOADS_THAT_TELL = ["one long among short", "tight memory"];  // of most ideas
const own_sources = new Map();  // a policy that was written here, as the page names it -> its source
let bundle = null;  // see lab/explore/bundle.py, once it is loaded
let worker = null;  // in which Python runs, once it is loaded
let stop_waiting = null;  // ends the wait for the worker, with a reason
let telling_load = "";  // at which the policy that was run last changes something, or the chosen one

// ---- Python -------------------------------------------------------------------------------------

/** The next message of the worker. Rejects with one line, and as its cause with the whole message if
 * that is longer; after that there is no worker. */
function next_message(limit_s) {
  return new Promise((resolve, reject) => {
    const fail = (reason, details = "") => {
      clearTimeout(timer);
      worker?.terminate();
      worker = null;
      reject(new Error(reason, {cause: details}));
    };
    const timer = limit_s === undefined ? 0 : setTimeout(
      () => fail(`stopped after ${limit_s} s: a loop without an end?`), 1e3 * limit_s);
    stop_waiting = fail;
    worker.onerror = event => fail(event.message || "the worker failed");
    worker.onmessage = ({data: message}) => {
      if (message.failed !== undefined) {
        const details = message.failed.trim();
        fail(details.split("\n").at(-1), details);
        return;
      }
      clearTimeout(timer);
      resolve(message);
    };
  });
}
/** The script of the worker. A page in a file may not start a module from a blob. */
function worker_address() {
  const {worker: script} = data.editor;
  if (location.protocol === "file:") return `data:text/javascript,${encodeURIComponent(script)}`;
  return URL.createObjectURL(new Blob([script], {type: "text/javascript"}));
}
async function load_python() {
  say_result("Loading Python …");
  const pyodide = new URL(data.editor.pyodide, location.href).href;
  try {
    bundle ??= await unpack(data.editor.bundle);
    worker = new Worker(worker_address(), {type: "module"});
    worker.postMessage({pyodide, files: bundle.files});
    await next_message();
  } catch (error) {
    if (error.message === STOPPED) throw error;
    const {file} = data.editor.bundle, folder = new URL(".", location.href).href;
    const addresses = data.editor.pyodide_files.map(name => pyodide + name);
    const absent = await why_not_loaded([...(file ? [folder + file] : []), ...addresses]);
    const reason = absent ?? "all files are there, but it does not start in this browser";
    throw new Error(
      `Python could not be loaded: ${reason}. Everything else on this page works without it.`,
      {cause: absent ? "" : error.cause || error.message});
  }
}
/** The reason why one of these files could not be loaded; null if all can be. */
async function why_not_loaded(addresses) {
  for (const address of addresses) {
    const {protocol, host} = new URL(address);
    if (protocol === "file:") return "a page in a folder may not read files beside it";
    let answer;
    try {
      answer = await fetch(address, {method: "HEAD", cache: "no-store"});
    } catch {
      return navigator.onLine ? `${host} cannot be reached` : "there is no network";
    }
    if (answer.status === 404) return `file not found: ${address}`;
    if (!answer.ok) return `${address} is refused with status ${answer.status}`;
  }
  return null;
}
/** What lab/explore/answer.py answers. Throws an Error of one line. */
async function ask(question) {
  if (!worker) await load_python();
  say_result("Running …");
  worker.postMessage({question: JSON.stringify(question)});
  return JSON.parse((await next_message(LIMIT_S)).answer);
}

// ---- A policy of one's own ----------------------------------------------------------------------

/** Run a source at a load and the chosen chunk size, and add its run to those of the page.
 * @returns the policy's name in the page; null if it made no batch */
async function add_own_run(source, load_name = chosen.load) {
  if (!worker) await load_python();
  const {chunk} = chosen;
  const reply = await ask({
    kind: "run", source, chunk, load: bundle.loads[load_name], slo_s: data.slo_s,
  });
  show_reply(reply.problem || `${reply.policy}: no rule is broken.`, reply.problem, reply);
  if (!reply.records.some(record => record.decodes)) return null;
  const policy = reply.policy + YOURS;
  const is_other = own_sources.get(policy) !== source;
  const name = [policy, reply.has_chunk ? chunk : NOT_CHOSEN, load_name].join(" | ");
  data.runs = data.runs.filter(entry =>
    entry.name !== name && !(is_other && parts_of(entry.name)[0] === policy));
  data.runs.push({name, settings: reply.settings, records: reply.records});
  own_sources.set(policy, source);
  if (!axes[0][1].includes(policy)) {
    axes[0][1].push(policy);
    $("choices").replaceChildren();
    add_buttons();
    add_jump();
  }
  return policy;
}
/** Run what is chosen and was written here, but has no run at the chosen load or chunk size. */
async function add_missing_runs() {
  for (const axis of [axes[0][0], "beside"]) {
    const policy = chosen[axis], source = own_sources.get(policy);
    if (source === undefined || entry_of(policy)) continue;
    const name = await with_button_disabled(() => add_own_run(source));
    if (!name) chosen[axis] = axis === "beside" ? NOBODY : axes[0][1][0];
  }
}
async function run_source() {
  const source = $("source").value, policy = await add_own_run(source);
  if (!policy) return;
  const holds = !$("result").classList.contains("problem");
  await choose(chosen[axes[0][0]] === policy ? {} : {beside: policy});
  telling_load = chosen.load;
  $("seerun").hidden = false;
  if (holds) await say_change(policy, source);  // or else the run ends where it failed
}
/** Say what changes against BASE at the chosen load, or else at the first of LOADS_THAT_TELL where
 * anything does. */
async function say_change(policy, source) {
  const line = $("result").textContent, alike = [];  // loads at which nothing changes
  const say = text => {
    const same = alike.length ? ` At load ${alike.join(", at ")} it changes nothing.` : "";
    say_result(line + same + text);
  };
  for (const load_name of new Set([chosen.load, ...LOADS_THAT_TELL])) {
    const wanted = {...chosen, load: load_name};
    try {
      if (!entry_of(policy, wanted) && !await add_own_run(source, load_name)) return;
      const [run, base] = [await load(entry_of(policy, wanted)), await load(entry_of(BASE, wanted))];
      const change = explain_change(run, base);
      if (change) {
        telling_load = load_name;
        return say(` At load ${load_name}, against ${title_of(base)}: ${change}.`);
      }
    } catch (error) {
      return say(` At load ${load_name}: ${error.message}.`);
    }
    alike.push(load_name);
  }
  say("");
}
/** What differs between a run and one of BASE, in a sentence; "" if nothing does. */
function explain_change(run, base) {
  const earlier = [...run.requests.keys()].map(id => (base.ttft_of(id) ?? 0) - (run.ttft_of(id) ?? 0));
  const most = index_of_largest(earlier, Math.abs);
  const [stalls, base_stalls] = [run, base].map(({stalls}) => stalls.length);
  const [gap, base_gap] = [run, base].map(run => run.metrics().longest);
  if (most === null && stalls === base_stalls && gap === base_gap) return "";
  const direction = earlier[most] > 0 ? "earlier" : "later";
  return [
    most === null ? "no first token comes at another time" : `request ${name_of(run, most)} has ` +
      `its first token ${format_seconds(Math.abs(earlier[most]))} ${direction}`,
    `the longest gap is ${format_seconds(gap)} (${format_seconds(base_gap)})`,
    stalls ? `${counted(stalls, "stall")} (${base_stalls})` : "nobody stalls",
  ].join("; ");
}

// ---- Exercises ----------------------------------------------------------------------------------

const chosen_exercise = () =>
  data.editor.exercises.find(({number}) => String(number) === $("startwith").value);
/** Mark those that have been solved in this browser. */
function draw_progress() {
  const {exercises} = data.editor;
  let solved = 0;
  for (const {number, title} of exercises) {
    const is_solved = kept(SOLVED + number) !== null;
    $("startwith").querySelector(`[value="${number}"]`).textContent =
      `exercise ${number}: ${title}${is_solved ? " ✓ solved" : ""}`;
    solved += is_solved;
  }
  $("progress").textContent = `${solved} of ${exercises.length} exercises solved`;
}
async function check_exercise({number, title}) {
  const reply = await ask({kind: "exercise", number, source: $("source").value});
  show_reply(reply.line, !reply.solved, reply);
  if (reply.solved) {
    keep(SOLVED + number, "yes");
    draw_progress();
  }
  if (reply.page === null) return;
  const address = URL.createObjectURL(new Blob([reply.page], {type: "text/html"}));
  $("exercisepage").src = address;
  $("exercisepage").title = `Exercise ${number}, ${title}: both schedules`;
  $("exerciselink").href = address;
  $("exercisebox").hidden = false;
}

// ---- The editor ---------------------------------------------------------------------------------

function say_result(text, is_problem = false) {
  $("result").textContent = text;
  $("result").classList.toggle("problem", Boolean(is_problem));
}
/** Show a reply: its line, the line of the source that is meant, and what was printed. */
function show_reply(line, is_problem, {details = "", printed}) {
  say_result(line, is_problem);
  const place = is_problem ? /my_policy\.py line (\d+)/.exec(line) : null;
  draw_line_numbers(place ? Number(place[1]) : null);
  $("resultdetails").classList.toggle("text", !is_problem);  // without tables
  $("resultdetails").textContent = [details, printed && `printed:\n${printed}`]
    .filter(Boolean).join("\n\n");
}
async function with_button_disabled(action) {
  const button = $("runsource");
  button.disabled = true;
  $("stoprun").hidden = false;
  try {
    return await action();
  } catch (error) {
    show_reply(error.message, true, {details: error.cause});
    return null;
  } finally {
    button.disabled = false;
    $("stoprun").hidden = true;
    stop_waiting = null;
  }
}
async function run_or_check() {
  if ($("runsource").disabled) return;
  for (const id of ["seerun", "exercisebox"]) $(id).hidden = true;
  const exercise = chosen_exercise();
  await with_button_disabled(() => exercise ? check_exercise(exercise) : run_source());
  $("runsource").focus({preventScroll: true});
}
function draw_line_numbers(marked = null) {
  const count = $("source").value.split("\n").length;
  $("linenumbers").replaceChildren(...Array.from({length: count}, (_, i) => {
    const row = document.createElement("div");
    row.textContent = i + 1;
    row.className = i + 1 === marked ? "marked" : "";
    return row;
  }));
  $("linenumbers").scrollTop = $("source").scrollTop;
}
// What was written and solved stays in this browser; what was written, by what it began with.
const SOLVED = "nanosarathi solved ";
const storage_key = () => `nanosarathi ${$("startwith").value}`;
function kept(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;  // the browser keeps nothing
  }
}
function keep(key, text) {
  try {
    localStorage.setItem(key, text);
  } catch {
    return;
  }
}
const stored_source = () => kept(storage_key());
const store_source = () => keep(storage_key(), $("source").value);
async function original_source() {
  const exercise = chosen_exercise();
  if (!exercise) return data.editor.template;
  bundle ??= await unpack(data.editor.bundle);
  return bundle.files[exercise.file];
}
async function open_source(source) {
  const exercise = chosen_exercise();
  $("source").value = source ?? await original_source();
  $("source").scrollTop = 0;
  $("runsource").textContent = exercise ? "Check (Ctrl+Enter)" : "Run (Ctrl+Enter)";
  for (const id of ["seerun", "exercisebox"]) $(id).hidden = true;
  $("hints").replaceChildren(...(exercise?.hints ?? []).map((hint, i) => {
    const box = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = `Hint ${i + 1}`;
    box.append(summary, hint);
    return box;
  }));
  show_reply("", false, {});
}
/** Type a text, so that it can be undone. */
function type_text(text) {
  if (text) document.execCommand("insertText", false, text);
  else document.execCommand("delete");
}
let leaves_with_tab = false;  // after Escape, Tab leads out of the text
function on_key(event) {
  event.stopPropagation();  // no key of the text is one of the page's
  const area = $("source"), {key} = event;
  const line_start = area.value.lastIndexOf("\n", area.selectionStart - 1) + 1;
  if (key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run_or_check();
  } else if (key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    const line = area.value.slice(line_start, area.selectionStart);
    const deeper = line.trimEnd().endsWith(":") ? INDENT : "";
    type_text("\n" + /^ */.exec(line)[0] + deeper);
  } else if (key === "Tab" && !leaves_with_tab) {
    event.preventDefault();
    indent_lines(area, line_start, event.shiftKey);
  }
  if (key !== "Shift") leaves_with_tab = key === "Escape";
}
/** Tab: four spaces at the cursor, or before all lines that are selected; with Shift four less. */
function indent_lines(area, line_start, less) {
  const {selectionStart: start, selectionEnd: end} = area;
  if (start === end && !less) {
    type_text(INDENT);
    return;
  }
  const lines = area.value.slice(line_start, Math.max(end, line_start));
  area.setSelectionRange(line_start, Math.max(end, line_start));
  const indented = lines.split("\n").map(line =>
    less ? line.replace(/^ {1,4}/, "") : INDENT + line).join("\n");
  if (less && start === end) {  // the cursor may stand before text that stays
    area.setSelectionRange(line_start, line_start + lines.length);
  }
  type_text(indented);
  if (start !== end) area.setSelectionRange(line_start, line_start + indented.length);
}
/** A button in the row of policies that leads to the editor. */
function add_jump() {
  const button = document.createElement("button");
  button.textContent = "write your own";
  button.onclick = jump_to_editor;
  $("choices").firstElementChild.append(button);
}
function jump_to_editor() {
  $("editor").scrollIntoView({block: "start"});
  $("source").focus({preventScroll: true});
}
function start_editor() {
  const {exercises, pyodide} = data.editor;
  $("editor").hidden = false;
  const from_network = /^https?:/.test(pyodide);
  $("pythonfrom").textContent = from_network ? `the network (${new URL(pyodide).host})`
    : "the files beside this page";
  $("startwith").append(
    new Option("a policy of your own", NO_EXERCISE),
    ...exercises.map(({number}) => new Option("", number)),
  );
  draw_progress();
  const say_error = error => say_result(error.message, true);
  $("startwith").oninput = () => open_source(stored_source()).catch(say_error);
  $("startover").onclick = async () => {
    await open_source(await original_source());
    store_source();
  };
  $("source").onkeydown = on_key;
  $("source").oninput = () => {
    store_source();
    draw_line_numbers();
  };
  $("source").onscroll = () => { $("linenumbers").scrollTop = $("source").scrollTop; };
  $("runsource").onclick = run_or_check;
  $("stoprun").onclick = () => stop_waiting?.(STOPPED);
  $("seerun").onclick = async () => {
    await choose({load: telling_load});
    panes[0].box.scrollIntoView({block: "start"});
  };
  open_source(stored_source());
  add_jump();
}
