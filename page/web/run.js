"use strict";
// A run: its records, and the state of every request at every iteration. Read next: sentences.js.

/** @typedef {{id: number, arrival: number, prompt_len: number, max_new_tokens: number,
 *             priority: number}} Arrived */
/** @typedef {[from: number, to: number, iteration: number]} Span seconds, and where it ends */
/** The history of a request. Each gap leads from one token to the next, without a hole.
 * `first_token`: the number of the token with which its first gap begins, from 1.
 * @typedef {{waits: Span[], chunks: Span[], gaps: Span[], first_token: number}} Lane */
/** The state of a request. `since`: when it began to wait; `cached`: tokens that were found in the
 * cache at admission; `first`, `last`: when its first and last token came, once there are any.
 * @typedef {{id: number, since: number, computed: number, cached: number, output: number,
 *            pages: number[], waits: boolean, ended: ?string, micro_batch?: number,
 *            first?: number, last?: number}} Progress */
/** A gap between two tokens of request `id`, in seconds. `token`: the number of the later one.
 * @typedef {{id: number, since: number, until: number, token: number}} Gap */

/** @param {string} id */
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const SLO = data.slo_s ?? Infinity;  // seconds: a longer gap is a stall, if others' prefill is in it
const CHECKPOINT_EVERY = 256;  // iterations

class Run {
  constructor(name, settings) {
    this.name = name;
    this.settings = settings;
    this.iterations = [];
    this.requests = new Map();  // id -> Arrived
    this.lanes = new Map();  // id -> Lane
    this.ttfts = [];  // [iteration, seconds], in order
    this.tbts = [];  // [iteration, seconds, request id, start of the gap], in order
    this.stalls = [];  // {k, id, since}: gaps above the SLO with others' prefill, by iteration
    this.transfers = [];  // between two pools: Transfer, in the order in which they began
    this.checkpoints = [];  // the state before each CHECKPOINT_EVERY-th iteration
    this.arrivals = new Map();  // iteration -> the requests that are recorded first before it
    this.state = {k: 0, progress: new Map()};  // before iteration k: request id -> Progress
    this.shown_state = null;
  }
  get end() { return this.iterations.at(-1)?.latest_end ?? 0; }
  get begin() { return this.first_arrival ?? this.iterations[0]?.start ?? 0; }
  get origin() { return data.live ? this.begin : 0; }  // the time that is written as 0 s

  apply(record) {
    if (record.live) {
      Object.assign(this.settings, record.settings);
      for (const request of record.live) this.add_request(request, request);
    } else if (record.transfer) {
      add_transfer(this.transfers, record.transfer);
    } else if (record.request) {
      this.add_request(record.request);
    } else {
      this.add_iteration(record);
    }
  }
  /** @param snapshot given if the request has been served before the first record */
  add_request(request, snapshot) {
    const first_token = snapshot ? Math.max(1, snapshot.output) : 1;
    this.requests.set(request.id, request);
    this.lanes.set(request.id, {waits: [], chunks: [], gaps: [], first_token});
    this.first_arrival = Math.min(this.first_arrival ?? request.arrival, request.arrival);
    const k = this.iterations.length;
    if (!this.arrivals.has(k)) this.arrivals.set(k, []);
    this.arrivals.get(k).push(request);
    const progress = new_progress(request);
    if (snapshot) {
      [progress.first, progress.last] = snapshot.times;
      progress.since = progress.last ?? request.arrival;  // if it waits, then not for longer
      progress.computed = snapshot.num_computed;
      progress.output = snapshot.output;
      progress.pages = [...snapshot.pages];
      progress.waits = !snapshot.pages.length;
    }
    this.state.progress.set(request.id, progress);
  }
  /** Add what is counted from a record (Iterated of records.py) to it: tokens, prefill, cache_hits,
   * preemptions, cached_tokens and latest_end so far, and the longest_gap that ends in it. */
  add_iteration(iteration) {
    const k = this.iterations.length, {progress} = this.state;
    const before = this.iterations[k - 1];
    this.state.k = k;
    if (k % CHECKPOINT_EVERY === 0) this.checkpoints.push(copy_state(this.state));
    iteration.prefill = iteration.chunks.reduce((sum, [, , length]) => sum + length, 0);
    iteration.tokens = iteration.prefill + iteration.decodes.length;
    iteration.preemptions = iteration.preempted.length + (before?.preemptions ?? 0);  // so far
    iteration.latest_end = Math.max(iteration.end, before?.latest_end ?? 0);
    iteration.longest_gap = null;
    for (const times of iteration.stages ?? []) {  // on the clock of the run, as all else
      times[0] += iteration.start;
      times[1] += iteration.start;
    }
    this.iterations.push(iteration);
    for (const id of iteration.preempted)
      if (progress.has(id)) progress.get(id).since = iteration.start;
    for (const [id] of iteration.chunks) {
      const {waits, since} = progress.get(id), lane = this.lanes.get(id);
      const waited = waits || iteration.preempted.includes(id);
      if (waited && iteration.start > since) lane.waits.push([since, iteration.start, k]);
      lane.chunks.push([iteration.start, iteration.end, k]);
    }
    begin_iteration(this.state, iteration);
    const hits = iteration.cache_hits.reduce((sum, [, tokens]) => sum + tokens, 0);
    iteration.cached_tokens = hits + (before?.cached_tokens ?? 0);  // so far
    finish_iteration(this.state, iteration, this.requests, (id, since, until, is_first) => {
      if (is_first) this.ttfts.push([k, until - this.requests.get(id).arrival]);
      else this.add_gap(k, id, since, until);
    });
  }
  add_gap(k, id, since, until) {
    const iteration = this.iterations[k], {gaps, first_token} = this.lanes.get(id);
    this.tbts.push([k, until - since, id, since]);
    gaps.push([since, until, k]);
    if (this.is_stall(id, since, until)) this.stalls.push({k, id, since});
    const longest = iteration.longest_gap;
    if (!longest || longest.until - longest.since < until - since)
      iteration.longest_gap = {id, since, until, token: first_token + gaps.length};
  }
  /** Whether a wait of request `id` is a generation stall, as find_stalls of lab/measure/metrics.py
   * counts it: longer than the SLO, and others' prefill was computed in it. */
  is_stall(id, since, until) {
    if (until - since <= SLO) return false;
    const {micro_batch = 0} = this.state.progress.get(id);
    return prefill_of_others(this.iterations, since, until, id, micro_batch).length > 0;
  }
  /** The longest gap between tokens of the run, or null. @returns {?Gap} */
  longest_gap() {
    const k = index_of_largest(this.iterations, ({longest_gap: gap}) =>
      gap ? gap.until - gap.since : 0);
    return k === null ? null : this.iterations[k].longest_gap;
  }
  /** Seconds from the arrival of request `id` to its first token, or null. */
  ttft_of(id) {
    const {first} = this.state.progress.get(id);
    return first === undefined ? null : first - this.requests.get(id).arrival;
  }
  /** When request `id` has ended: its last token's or chunk's time; Infinity if it has not. */
  end_of(id) {
    const {ended, since} = this.state.progress.get(id), lane = this.lanes.get(id);
    if (ended === null) return Infinity;
    return Math.max(since, lane.gaps.at(-1)?.[1] ?? 0, lane.chunks.at(-1)?.[1] ?? 0);
  }
  /** The state when iteration k had been decided: counters before it, pages with the new ones. */
  at(k) {
    let state = this.shown_state;
    if (state?.k === k) return state;
    if (state && state.k < k && k - state.k < CHECKPOINT_EVERY) {
      finish_iteration(state, this.iterations[state.k], this.requests);
      state.k++;
    } else {
      state = copy_state(this.checkpoints[Math.floor(k / CHECKPOINT_EVERY)]);
    }
    for (;; state.k++) {
      const iteration = this.iterations[state.k];
      for (const request of this.arrivals.get(state.k) ?? [])
        if (!state.progress.has(request.id)) state.progress.set(request.id, new_progress(request));
      begin_iteration(state, iteration);
      if (state.k === k) {
        this.shown_state = state;
        return state;
      }
      finish_iteration(state, iteration, this.requests);
    }
  }
  /** The state after iteration k, with the requests that arrived while it was computed. */
  after(k) {
    const state = copy_state(this.at(k)), iteration = this.iterations[k];
    finish_iteration(state, iteration, this.requests);
    for (const request of this.arrivals.get(k + 1) ?? [])
      if (!state.progress.has(request.id)) state.progress.set(request.id, new_progress(request));
    return state;
  }
  /** The waits for a next token that go on at a time, [seconds, whether it is a stall]. */
  waits_in(state, time) {
    return [...state.progress.values()]
      .filter(({last, ended}) => last !== undefined && !ended && last < time)
      .map(({id, last}) => [time - last, this.is_stall(id, last, time)]);
  }
  /** The progress of requests that wait at a time, in the order of the queue of an iteration. */
  waiting(state, iteration, time = iteration.start) {
    const waiting = [...state.progress.values()].filter(({id, waits, ended}) =>
      waits && !ended && this.requests.get(id).arrival <= time);
    const places = new Map(iteration.queue.map((id, i) => [id, i]));
    const place_of = ({id}) => places.get(id) ?? 1e9;
    return waiting.sort((a, b) => place_of(a) - place_of(b) || a.id - b.id);
  }
  /** All latencies up to and with iteration k, in seconds, sorted. */
  so_far(k) {
    const sorted_until = pairs => {
      const length = search(pairs.length, i => pairs[i][0] > k);
      return Float64Array.from({length}, (_, i) => pairs[i][1]).sort();
    };
    return {ttft: sorted_until(this.ttfts), tbt: sorted_until(this.tbts)};
  }
  /** The row of this run in the table of policies. Latencies are in seconds, null if there are
   * none; tokens_per_s counts prompts and outputs; `cache` is the share of the KV cache in use,
   * on average over the time of the iterations. */
  metrics() {
    const {ttft, tbt} = this.so_far(Infinity);
    let tokens = 0, busy_s = 0, page_s = 0;
    for (const {id, first, output} of this.state.progress.values())
      if (first !== undefined) tokens += this.requests.get(id).prompt_len + output;
    for (const {start, end, free_pages} of this.iterations) {
      busy_s += end - start;
      page_s += (this.settings.pages - free_pages) * (end - start);
    }
    return {
      ttft_p50: quantile(ttft, 0.5),
      ttft_p90: quantile(ttft, 0.9),
      tbt_p99: quantile(tbt, 0.99),
      longest: quantile(tbt, 1),
      stalls: this.stalls.length,
      tokens_per_s: tokens / (this.end - this.origin),
      cache: page_s / (this.settings.pages * busy_s),
    };
  }
}

/** @returns {Progress} */
function new_progress({id, arrival}) {
  return {
    id, since: arrival, computed: 0, cached: 0, output: 0, pages: [], waits: true, ended: null,
  };
}
function copy_state({k, progress}) {  // without requests that have ended
  const copy = new Map();
  for (const [id, request] of progress)
    if (!request.ended) copy.set(id, {...request, pages: [...request.pages]});
  return {k, progress: copy};
}

/** The first of 0 ... n - 1 that passes a test which all after it pass, too; n if there is none. */
function search(n, passes) {
  let low = 0, high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (passes(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}
/** The index of the item with the largest value above 0, the first of equals; null without any. */
function index_of_largest(list, value) {
  let best = null, largest = 0;
  list.forEach((item, i) => {
    if (value(item) <= largest) return;
    best = i;
    largest = value(item);
  });
  return best;
}
/** The last iteration that had begun at a time. */
function index_at({iterations}, time) {
  return Math.max(0, search(iterations.length, i => iterations[i].start > time) - 1);
}
/** As numpy's: linear between the neighbours. */
function quantile(sorted, q) {
  if (!sorted.length) return null;
  const last = sorted.length - 1;
  const place = last * q, low = Math.floor(place), high = Math.min(low + 1, last);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** Apply what was decided: requests lose pages, and others get some. Sets iteration.cache_hits,
 * [[request, tokens]]: if a first chunk begins behind the computed tokens, then pages with the
 * tokens before it were found in the cache. */
function begin_iteration({progress}, iteration) {
  for (const id of iteration.preempted) {
    const request = progress.get(id);
    if (request) Object.assign(request, {computed: 0, cached: 0, pages: [], waits: true});
  }
  for (const [id, first, ...pages] of iteration.pages) {
    const request = progress.get(id);
    request.pages.length = first;
    request.pages.push(...pages);
    request.micro_batch = iteration.micro_batch;
    request.waits = false;
  }
  iteration.cache_hits = [];
  for (const [id, start] of iteration.chunks) {
    const request = progress.get(id);
    if (start <= request.computed) continue;
    request.computed = start;
    request.cached = start;
    iteration.cache_hits.push([id, start]);
  }
}
/** Apply what was computed: counters move on, and tokens appear.
 * @param on_token called with id, time of the token before, its own time, whether it is the first
 */
function finish_iteration({progress}, iteration, requests, on_token = null) {
  const add_token = request => {
    on_token?.(request.id, request.last, iteration.end, request.first === undefined);
    request.first ??= iteration.end;
    request.last = iteration.end;
    request.output++;
  };
  for (const [id, start, length] of iteration.chunks) {
    const request = progress.get(id);
    request.computed = start + length;
    if (request.computed === requests.get(id).prompt_len + request.output) add_token(request);
  }
  for (const id of iteration.decodes) {
    const request = progress.get(id);
    request.computed++;
    add_token(request);
  }
  for (const [id, reason] of iteration.ended) {
    const request = progress.get(id);
    if (request) Object.assign(request, {ended: reason ?? "abort", pages: [], waits: false});
  }
}
/** [[request, tokens]]: the prefill of other requests between two tokens of request `id`, in its
 * micro-batch. An iteration counts if it begins there, as in find_stalls of
 * lab/measure/metrics.py. */
function prefill_of_others(iterations, since, until, id, micro_batch) {
  const tokens_of = new Map();
  const first = search(iterations.length, i => iterations[i].start >= since);
  for (let i = first; iterations[i]?.start < until; i++) {
    if (iterations[i].micro_batch !== micro_batch) continue;
    for (const [other, , n] of iterations[i].chunks)
      if (other !== id) tokens_of.set(other, (tokens_of.get(other) ?? 0) + n);
  }
  return [...tokens_of];
}
