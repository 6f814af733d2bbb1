// Numbers and sentences: what is said of an iteration, and of a gap. Read next: colors.js.

const format_count = n => n.toLocaleString("en");
function counted(n, singular, plural = singular + "s") {
  return `${format_count(n)} ${n === 1 ? singular : plural}`;
}
/** The name of a request: a letter where a run has few and asks for that. */
function name_of(run, id) {
  return run.settings.letters ? String.fromCharCode(65 + id) : String(id);
}
function list_names(run, ids) {
  const names = ids.map(id => name_of(run, id));
  if (names.length === 1) return names[0];
  if (names.length <= 4) return `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
  return `${names.slice(0, 3).join(", ")} and ${names.length - 3} more`;
}
function format_seconds(s) {
  if (s === null) return "–";
  if (s >= 100) return `${s.toFixed(0)} s`;
  return s < 0.9995 ? `${(1e3 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
}
function sentence(text) {
  return text[0].toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");
}

// ---- A gap --------------------------------------------------------------------------------------

/** Why a request waited between two of its tokens, a Gap, in words. */
function explain_gap(run, {id, since, until, token}) {
  const {iterations} = run;
  const subject = `request ${name_of(run, id)}, token ${format_count(token)}`;
  const seconds = format_seconds(until - since);
  const last = index_at(run, until - 1e-7);
  const micro_batch = micro_batch_at(run, id, since, until);
  const others = prefill_of_others(iterations, since, until, id, micro_batch);
  const first = search(iterations.length, i => iterations[i].start >= since);
  const inside = iterations.slice(first, last + 1);
  if (inside.some(({preempted}) => preempted.includes(id)))
    return `${subject}: waited ${seconds}, as it had lost its pages and was computed again`;
  if (!others.length)
    return `${subject}: ${seconds} after the token before${explain_transfer(run, id, since, until)}`;
  return `${subject}: waited ${seconds} for ${name_prompts(run, others)}`;
}
/** The micro-batch of a request: that of the iteration which yields a token of it. */
function micro_batch_at({iterations}, id, since, until) {
  const first = search(iterations.length, i => iterations[i].latest_end >= until);
  const yields = ({end, decodes, chunks}) =>
    end === until && (decodes.includes(id) || chunks.some(([other]) => other === id));
  const begun = search(iterations.length, i => iterations[i].start >= until);
  const iteration = iterations.slice(first, begun).find(yields);
  return iteration?.micro_batch ?? 0;
}
/** "request 44's prompt of 977 tokens". `others`: [[request, tokens computed]]. */
function name_prompts(run, others) {
  const total = others.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (others.length > 1) {
    const names = list_names(run, others.map(([id]) => id));
    return `the prompts of requests ${names}: ${format_count(total)} tokens`;
  }
  const [[id, tokens]] = others;
  const {prompt_len} = run.requests.get(id);
  const prompt = `request ${name_of(run, id)}'s prompt of ${counted(prompt_len, "token")}`;
  return tokens < prompt_len ? `${counted(tokens, "token")} of ${prompt}` : prompt;
}
/** The sentence over a run: its longest gap, and who caused it. */
function summarize_gap(run) {
  const gap = run.longest_gap();
  if (!gap) return "No request has two tokens yet.";
  const seconds = gap.until - gap.since;
  const times = seconds / quantile(run.so_far(Infinity).tbt, 0.5);
  let verdict = seconds > SLO ? "longer than the SLO" : "within the SLO";
  if (run.stalls.some(stall => stall.id === gap.id && stall.since === gap.since)) verdict = "a stall";
  const usual = times >= 1.5 ? ` ${format_ratio(times)} times the usual gap, ${verdict}.` : "";
  return `Longest gap: ${explain_gap(run, gap)}.${usual}`;
}
/** A lane in words. */
function summarize_request(run, id) {
  const {prompt_len} = run.requests.get(id), {gaps} = run.lanes.get(id);
  const longest = Math.max(0, ...gaps.map(([since, until]) => until - since));
  const stalls = run.stalls.filter(stall => stall.id === id).length;
  const parts = [`a prompt of ${counted(prompt_len, "token")}`,
    `first token after ${format_seconds(run.ttft_of(id))}`,
    `longest gap ${format_seconds(longest)}`, counted(stalls, "stall")];
  return sentence(`request ${name_of(run, id)}: ${parts.join(", ")}`);
}
/** Two digits of a small ratio, a large one whole: 1.9, 14, 236. */
const format_ratio = ratio =>
  ratio < 10 ? ratio.toFixed(1) : format_count(Math.round(ratio));
/** How long the stages of a pipeline waited, or "" without any. */
function summarize_bubbles({iterations, settings: {stages}, begin, end}) {
  if (!stages) return "";
  let bubbles_s = 0;
  for (const {stages: times} of iterations)
    for (const [, , bubble = 0] of times) bubbles_s += bubble;
  const share = 100 * bubbles_s / (stages * (end - begin));
  return `Bubbles: ${format_seconds(bubbles_s)} in all, ${share.toFixed(1)} % of the stages' time.`;
}

// ---- An iteration -------------------------------------------------------------------------------

/** Why the policy made this batch, from the facts that were recorded. */
function explain(run, k) {
  const iteration = run.iterations[k], state = run.at(k), sentences = [];
  const length_of = id => run.requests.get(id).prompt_len + state.progress.get(id).output;
  if (iteration.preempted.length) {
    const names = list_names(run, iteration.preempted);
    const [subject, pages] = iteration.preempted.length > 1 ? ["requests", "their"]
      : ["request", "its"];
    const reason = was_short_of_pages(run, k) ? "no page was free: " : "";
    sentences.push(`${reason}${subject} ${names} lost ${pages} pages and will be computed again`);
  }
  sentences.push(explain_batch(run, iteration, length_of));

  const batch = new Set([...iteration.decodes, ...iteration.chunks.map(([id]) => id)]);
  const left_out = [...state.progress.values()].filter(({id, pages, micro_batch}) =>
    pages.length && micro_batch === iteration.micro_batch && !batch.has(id));
  const is_decoding = ({id, computed, output}) => output > 0 && computed + 1 === length_of(id);
  const decodes = left_out.filter(is_decoding);
  const prefills = left_out.filter(request => !is_decoding(request));
  if (decodes.length) {
    const wait = counted(decodes.length, "running decode waits", "running decodes wait");
    const leaves = counted(decodes.length, "request is", "requests are");
    sentences.push(iteration.micro_batch < run.settings.prefills
      ? `${leaves} on the way to a decode instance`
      : iteration.decodes.length ? `${wait}: this policy leaves decodes out`
      : `${wait}: this batch is of prefill alone`);
  }
  if (prefills.length) {
    const no_budget = iteration.budget !== null && iteration.tokens >= iteration.budget;
    const reason = no_budget ? "no budget left" : "this policy does not go on with it here";
    const names = list_names(run, prefills.map(({id}) => id));
    const subject = prefills.length > 1 ? `requests ${names} have begun their prompts and wait`
      : `request ${names} has begun its prompt and waits`;
    sentences.push(`${subject}: ${reason}`);
  }
  if (iteration.why) {
    const behind = iteration.waiting > 1 ? `, and ${iteration.waiting - 1} behind it` : "";
    const reason = explain_waiting(...iteration.why);
    sentences.push(`request ${name_of(run, iteration.queue[0])} waits${behind}: ${reason}`);
  }
  return sentence(sentences.join("; "));
}
/** Whether there were fewer free pages before iteration `k` than decodes, which take one at most. */
const was_short_of_pages = ({iterations}, k) => {
  const {decodes, preempted} = iterations[k];
  return !k || iterations[k - 1].free_pages < decodes.length + preempted.length;
};
/** The chunks and decodes of a batch, in words. `length_of(id)`: the tokens of a request. */
function explain_batch(run, iteration, length_of) {
  const {budget, chunks, decodes, tokens} = iteration, parts = [];
  const cache_hits = new Map(iteration.cache_hits);
  if (decodes.length) {
    const order = chunks.length ? "first" : "and no prefill";
    parts.push(`${counted(decodes.length, "decode")} ${order}`);
  }
  for (const [id, start, n] of chunks.slice(0, 3)) {
    const length = length_of(id), then = parts.length ? "then " : "";
    const owner = `request ${name_of(run, id)}'s`;
    let part = `${owner} whole prompt of ${counted(length, "token")}`;
    if (n !== length) {
      const last = format_count(start + n - 1);
      part = `tokens ${format_count(start)} to ${last} of ${owner} ${format_count(length)}`;
      if (cache_hits.has(id)) part += ` (${counted(start, "token")} found in the cache)`;
    }
    parts.push(then + part);
  }
  if (chunks.length > 3) parts.push(`and chunks of ${chunks.length - 3} more`);
  if (budget !== null && chunks.length) {
    const is_full = tokens >= budget ? " is full" : `: ${format_count(budget - tokens)} are left`;
    parts.push(`and the budget of ${format_count(budget)}${is_full}`);
  }
  return parts.join(", ");
}
/** The reason of why_head_waits of records.py, with its one or two numbers, in words. */
function explain_waiting(reason, a, b) {
  switch (reason) {
    case "batch":
      return `${counted(a, "request runs", "requests run")} already, the most at once`;
    case "pages": {
      const are_free = b === 1 ? "is free" : "are free";
      const kept = a <= b ? ", which are kept for who runs" : "";
      return `it needs ${counted(a, "page")} and ${b} ${are_free}${kept}`;
    }
    case "budget": {
      if (!a) return "no budget left";
      const prompt = `its prompt, ${counted(b, "token")} to compute, is not cut`;
      return `${prompt}, and ${format_count(a)} are left of the budget`;
    }
    default:
      return "this policy lets in nobody more in this iteration";
  }
}
