"""Two pools: no page is lost, no token either, and nobody decodes what has not been sent."""

import random
from collections import Counter
from itertools import count

import pytest

from kv_cache import Pages
from lab.simulator.two_pools import Pools, TwoPools
from policies.pages import make_pages
from scheduler import Request
from tests.helpers import advance, check_integrity, owned, with_slow

PAGE_SIZE = 4
MAX_LEN = 24


def two_pools(pools=Pools(1, 1), pages=24, caching=False, **options):
    """Instances with so many pages each; `options` are those of TwoPools."""
    options = {"chunk": 8, "max_batch": 4, "max_len": MAX_LEN, "clock": lambda: 0.0} | options
    return TwoPools(
        [make_pages(pages, PAGE_SIZE, caching) for _ in range(pools.prefill)],
        [Pages(pages, PAGE_SIZE) for _ in range(pools.decode)],
        **options,
    )


def request(number, prompt_len=5, output_len=4, fill=0):
    """A request that arrives at the time of its number; its prompt is all `fill`."""
    return Request(number, [fill] * prompt_len, prompt_len, output_len, arrival=number)


def check_owners(two):
    """Each page is in the block tables of its instance, of running requests or of transfers, and
    nothing runs twice."""
    for instance in two.schedulers:
        tables = [r.pages for r in instance.running]
        for transfer in two.transfers.values():
            if transfer.source is instance:
                tables.append(transfer.abandoned_pages)
                if transfer.request not in instance.running:
                    tables.append(transfer.request.pages)
            if transfer.target is instance:
                tables.append(transfer.target_pages)
        check_integrity(instance.pages, tables)
    running = Counter(r for instance in two.schedulers for r in instance.running)
    assert set(running.values()) <= {1}


def sending(request):
    """Names how often a request was sent: after each preemption once more."""
    return request.id, request.preemptions


class Drive:
    """Lets instances and links of two pools take turns at random. Batches are in flight meanwhile.

    `landed` has the `sending` of each request whose transfer has ended."""

    def __init__(self, two, draw, layer_wise):
        self.two = two
        self.draw = draw
        self.layer_wise = layer_wise
        self.flights = {}  # instance -> its batch
        self.links = []  # transfers under way
        self.landed = set()
        self.tokens = Counter()  # that each request got

    def turns(self):
        """What could happen next."""
        turns = []
        for instance in self.two.schedulers:
            turn = self.end_batch if instance in self.flights else self.begin_batch
            turns.append((turn, instance))
        for transfer in self.links:
            if transfer.request not in transfer.source.running:  # its prefill has ended
                turns.append((self.land, transfer))
        return turns

    def begin_batch(self, instance):
        batch = instance.next_batch()
        if not batch:
            return
        self.flights[instance] = batch
        if instance in self.two.prefills:
            if self.layer_wise:
                instance.announce(batch)
        else:
            assert all(chunk.request.is_decoding for chunk in batch)
            assert {sending(chunk.request) for chunk in batch} <= self.landed

    def end_batch(self, instance):
        batch = self.flights.pop(instance)
        self.tokens.update(r.id for r, _ in advance(instance, batch, token=1))

    def land(self, transfer):
        self.links.remove(transfer)
        if self.two.end_transfer(transfer):
            assert transfer.request.num_computed == transfer.tokens
            self.landed.add(sending(transfer.request))

    def step(self):
        turn, subject = self.draw.choice(self.turns())
        turn(subject)
        self.links += self.two.start_transfers()
        check_owners(self.two)


def random_pools(draw):
    """Two pools of random sizes, with hardly more memory than for one request, or much more."""
    return two_pools(
        Pools(draw.randint(1, 3), draw.randint(1, 3)),
        pages=draw.choice([6, 7, 9, 24]),
        caching=draw.random() < 0.5,
        chunk=draw.choice([1, 3, 8, 24]),
        max_batch=draw.choice([1, 2, 6]),
        cuts_prompts=draw.random() < 0.5,
    )


def drive_random_load(seed):
    """Serve a random load with aborts. Checks all owners after each event, and the ends."""
    draw = random.Random(seed)
    two = random_pools(draw)
    drive = Drive(two, draw, layer_wise=draw.random() < 0.5)
    requests = []
    for number in range(draw.randint(1, 10)):
        prompt_len = draw.randint(1, MAX_LEN - 1)
        output_len = draw.randint(1, MAX_LEN - prompt_len)
        requests.append(request(number, prompt_len, output_len, draw.randint(0, 1)))
    to_come = list(requests)
    aborted = set()
    for turn in count():
        assert turn < 20_000, "it does not end"
        if to_come and draw.random() < 0.2:
            two.prefills[0].add(to_come.pop(0))
        if two.schedulers[0].requests and draw.random() < 0.01:
            victim = draw.choice(list(two.schedulers[0].requests.values()))
            scheduler = next((s for s in two.schedulers if victim in s.running), two.schedulers[0])
            scheduler.finish(victim, "abort")
            aborted.add(victim)
        drive.step()
        if not (to_come or two.schedulers[0].requests or drive.flights or drive.links):
            break
    for r in requests:
        if r not in aborted:
            assert r.finish_reason == "length"
            assert drive.tokens[r.id] == len(r.token_times) == r.max_new_tokens
    assert not (two.schedulers[0].waiting or two.transfers)
    for instance in two.schedulers:
        assert instance.pages.num_free == instance.pages.total
        assert not instance.running
    return sum(r.preemptions for r in requests), len(aborted)


@pytest.mark.parametrize("first", with_slow(range(0, 2000, 250), fast=[0]))
def test_no_page_and_no_token_is_lost_in_random_loads_with_aborts(first):
    ends = [drive_random_load(seed) for seed in range(first, first + 250)]
    preemptions, aborts = map(sum, zip(*ends, strict=True))
    assert preemptions > 20 and aborts > 20  # both were tried


def prefill(two, *requests, source=0):
    """Let an instance prefill these requests."""
    instance = two.prefills[source]
    for r in requests:
        instance.add(r)
    advance(instance, instance.next_batch(), token=1)


def test_the_first_in_line_blocks_the_others():
    two = two_pools(pages=8, chunk=64)
    long_one = request(1, prompt_len=16)
    short_one = request(2, prompt_len=3)
    prefill(two, request(0, prompt_len=12, output_len=12))
    (first,) = two.start_transfers()
    assert first.target_pages and len(first.target_pages) == 4  # 12 tokens, and the next one
    prefill(two, long_one, short_one)
    assert two.start_transfers() == []  # the short one would fit beside it
    two.end_transfer(first)
    two.decodes[0].finish(first.request, "abort")
    assert [transfer.request for transfer in two.start_transfers()] == [long_one, short_one]


def test_a_transfer_goes_to_the_instance_with_most_free_pages():
    two = two_pools(Pools(1, 3), chunk=64)
    prefill(two, *[request(number, prompt_len) for number, prompt_len in enumerate([9, 4, 4, 4])])
    targets = [transfer.target for transfer in two.start_transfers()]
    assert targets == [*two.decodes, two.decodes[1]]


def test_no_more_requests_decode_than_may_at_once():
    two = two_pools(max_batch=2, pages=64, chunk=64)
    for number in range(3):
        prefill(two, request(number))
    sent = two.start_transfers()
    assert [transfer.request.id for transfer in sent] == [0, 1]
    two.end_transfer(sent[0])
    assert two.start_transfers() == []


def test_a_request_that_ends_with_its_first_token_is_not_sent():
    two = two_pools(chunk=64)
    instance = two.prefills[0]
    one_token = request(0, output_len=1)
    stopped = request(1)
    stopped.stop = frozenset([7])
    for each in (one_token, stopped):
        instance.add(each)
    batch = instance.next_batch()
    instance.announce(batch)
    assert [transfer.request for transfer in two.transfers.values()] == [stopped]
    (transfer,) = two.start_transfers()
    advance(instance, batch, token=7)
    assert stopped.finish_reason == "stop"
    assert not two.end_transfer(transfer)
    assert [owned(side.pages) for side in two.schedulers] == [[], []]


def test_an_id_may_be_used_again_while_its_first_request_is_being_sent():
    two = two_pools(chunk=64)
    first, second = request(0), request(0)
    prefill(two, first)
    (transfer,) = two.start_transfers()
    two.prefills[0].finish(first, "abort")
    prefill(two, second)
    assert [*two.transfers] == [first, second]
    assert not two.end_transfer(transfer)
    (transfer,) = two.start_transfers()
    assert two.end_transfer(transfer) and two.decodes[0].running == [second]
    two.decodes[0].finish(second, "abort")
    assert [owned(side.pages) for side in two.schedulers] == [[], []]


def test_a_preempted_request_is_sent_back_to_the_front_of_the_queue():
    two = two_pools(pages=6, chunk=64)
    prefill(two, request(0, prompt_len=11, output_len=10))
    prefill(two, request(1, prompt_len=7, output_len=10))
    for transfer in two.start_transfers():
        two.end_transfer(transfer)
    newcomer = request(2)
    two.prefills[0].add(newcomer)
    (decode,) = two.decodes
    while not two.schedulers[0].waiting[0].preemptions:
        advance(decode, decode.next_batch(), token=1)
    assert [r.id for r in two.schedulers[0].waiting] == [1, 2]
    assert [r.id for r in decode.running] == [0]


def test_two_numbers_name_two_pools():
    assert Pools.parse("01:12") == Pools(1, 12)


@pytest.mark.parametrize("text", ["", "2", ":2", "0:1", "1:0", "2:2:2", "-1:2", "²:1"])
def test_another_text_names_no_pools(text):
    with pytest.raises(ValueError, match="^pools='?.*: must be PREFILL:DECODE"):
        Pools.parse(text)
