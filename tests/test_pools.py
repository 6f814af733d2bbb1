"""Two pools, held against counts of owners and tokens: nobody decodes what has not been sent."""

import random
from collections import Counter

import pytest

from kv_cache import Pages
from lab.simulator.two_pools import Pools, TwoPools
from policies.pages import make_pages
from tests.by_hand import request_of
from tests.helpers import advance, check_integrity, owned, with_slow

MAX_LEN = 24


def two_pools(prefill=1, decode=1, pages=24, caching=False, **options):
    """Instances with so many pages of 4 tokens each; `options` are those of TwoPools."""
    sizes = dict(
        chunk=64,
        max_batch=4,
        max_len=MAX_LEN,
        clock=lambda: 0.0,
    )
    return TwoPools(
        [make_pages(pages, 4, caching) for _ in range(prefill)],
        [Pages(pages, 4) for _ in range(decode)],
        **sizes | options,
    )


def check_owners(two):
    """Each page is in the block tables of its instance, of running requests or of transfers, and
    nothing runs twice."""
    for instance in two.schedulers:
        tables = [each.pages for each in instance.running]
        for transfer in two.transfers.values():
            if transfer.source is instance:
                tables.append(transfer.abandoned_pages)
                if transfer.request not in instance.running:
                    tables.append(transfer.request.pages)
            if transfer.target is instance:
                tables.append(transfer.target_pages)
        check_integrity(instance.pages, tables)
    running = [each for instance in two.schedulers for each in instance.running]
    assert len(set(running)) == len(running)


class Drive:
    """Lets instances and links of two pools take turns at random. Batches are in flight meanwhile.

    `landed` has (id, preemptions) of each request whose transfer has ended."""

    def __init__(self, two, draw):
        self.two = two
        self.draw = draw
        self.layer_wise = draw.random() < 0.5
        self.flights = {}  # instance -> its batch
        self.links = []  # transfers under way
        self.landed = set()
        self.tokens = Counter()  # that each request got

    def step(self):
        """Let one thing happen that could happen next."""
        ready = [each for each in self.links if each.request not in each.source.running]
        turn = self.draw.choice([*self.two.schedulers, *ready])
        if turn in ready:
            self.land(turn)
        elif turn in self.flights:
            moved = advance(turn, self.flights.pop(turn), token=1)
            self.tokens.update(each.id for each, _ in moved)
        else:
            self.begin_batch(turn)
        self.links += self.two.start_transfers()
        check_owners(self.two)

    def begin_batch(self, instance):
        batch = instance.next_batch()
        if not batch:
            return
        self.flights[instance] = batch
        if instance.only_decodes:
            for chunk in batch:
                assert chunk.request.is_decoding
                assert (chunk.request.id, chunk.request.preemptions) in self.landed
        elif self.layer_wise:
            instance.announce(batch)

    def land(self, transfer):
        self.links.remove(transfer)
        if self.two.end_transfer(transfer):
            moved = transfer.request
            assert moved.num_computed == transfer.tokens
            self.landed.add((moved.id, moved.preemptions))


def drive_random_load(seed):
    """Serve a random load with aborts, with memory for hardly more than one request, or much more.
    Checks all owners after each event, and the ends. Returns how many were preempted and aborted"""
    draw = random.Random(seed)
    two = two_pools(
        draw.randint(1, 3),
        draw.randint(1, 3),
        pages=draw.choice([6, 7, 9, 24]),
        caching=draw.random() < 0.5,
        chunk=draw.choice([1, 3, 8, 24]),
        max_batch=draw.choice([1, 2, 6]),
        cuts_prompts=draw.random() < 0.5,
    )
    drive = Drive(two, draw)
    requests = []
    for number in range(draw.randint(1, 10)):
        prompt_len = draw.randint(1, MAX_LEN - 1)
        output_len = draw.randint(1, MAX_LEN - prompt_len)
        prompt = [draw.randint(0, 1)] * prompt_len
        requests.append(request_of(number, prompt, output_len))
    coming = list(requests)
    first = two.schedulers[0]
    while coming or first.requests or drive.flights or drive.links:
        if coming and draw.random() < 0.2:
            first.add(coming.pop(0))
        if first.requests and draw.random() < 0.01:
            first.abort(draw.choice(list(first.requests)))
        drive.step()
    for each in requests:
        if each.finish_reason != "abort":
            assert drive.tokens[each.id] == len(each.token_times) == each.max_new_tokens
    assert not two.transfers
    assert [owned(instance.pages) for instance in two.schedulers] == [[]] * len(two.schedulers)
    aborted = [each for each in requests if each.finish_reason == "abort"]
    return sum(each.preemptions for each in requests), len(aborted)


@pytest.mark.parametrize("first", with_slow(range(0, 2000, 250), fast=[0]))
def test_no_page_and_no_token_is_lost_in_random_loads_with_aborts(first):
    ends = [drive_random_load(seed) for seed in range(first, first + 250)]
    preemptions, aborts = map(sum, zip(*ends, strict=True))
    assert preemptions > 20  # both were tried
    assert aborts > 20


def prefill(two, *lengths):
    """Let the first instance prefill requests of these lengths of prompt and output."""
    instance = two.prefills[0]
    count = len(instance.requests)
    for i, pair in enumerate(lengths, count):
        instance.add(request_of(i, *pair))
    advance(instance, instance.next_batch(), token=1)


def started(two):
    """The ids of requests whose transfer starts."""
    return [transfer.request.id for transfer in two.start_transfers()]


def test_the_first_in_line_blocks_the_others():
    two = two_pools(pages=8)
    prefill(two, (12, 12))
    (first,) = two.start_transfers()
    assert len(first.target_pages) == 4  # 12 tokens, and the next one
    prefill(two, (16, 4), (3, 4))
    assert started(two) == []  # the short one would fit beside it
    two.end_transfer(first)
    assert started(two) == []
    two.prefills[0].abort(0)
    assert started(two) == [1, 2]


def test_a_transfer_goes_to_the_instance_with_most_free_pages():
    two = two_pools(decode=3)
    prefill(
        two,
        (9, 4),
        (4, 4),
        (4, 4),
        (4, 4),
    )
    targets = [transfer.target for transfer in two.start_transfers()]
    assert targets == [*two.decodes, two.decodes[1]]


def test_no_more_requests_decode_than_may_at_once():
    two = two_pools(max_batch=2, pages=64)
    for _ in range(3):
        prefill(two, (5, 4))
    first, _ = two.start_transfers()
    two.end_transfer(first)
    assert started(two) == []


def test_a_request_that_ends_with_its_first_token_is_not_sent():
    two = two_pools()
    instance = two.prefills[0]
    stopped = request_of(1, 5)
    stopped.stop = frozenset([7])
    instance.add(request_of(0, 5, output_len=1))
    instance.add(stopped)
    batch = instance.next_batch()
    instance.announce(batch)
    (transfer,) = two.start_transfers()
    assert transfer.request is stopped
    advance(instance, batch, token=7)
    assert not two.end_transfer(transfer)


def test_a_preempted_request_is_sent_back_to_the_front_of_the_queue():
    two = two_pools(pages=6)
    prefill(two, (11, 10))
    prefill(two, (7, 10))
    for transfer in two.start_transfers():
        two.end_transfer(transfer)
    two.prefills[0].add(request_of(2, 5))
    (decode,) = two.decodes
    while not decode.waiting[0].preemptions:
        advance(decode, decode.next_batch(), token=1)
    assert [each.id for each in decode.waiting] == [1, 2]
    assert [each.id for each in decode.running] == [0]


def test_two_numbers_name_two_pools():
    assert Pools.parse("01:12") == Pools(1, 12)
    for text in ("2", ":2", "0:1", "1:0", "2:2:2", "-1:2"):
        with pytest.raises(ValueError):
            Pools.parse(text)
