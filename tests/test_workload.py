"""Workloads, held against published statistics, formulas and lines of a trace by hand."""

import math

import numpy as np
import pytest

from lab.measure import workload
from lab.measure.arrival import LENGTHS, Arrival
from lab.measure.workload import (
    make_lengths,
    poisson,
    read_trace,
    sample_lengths,
    zipf_lengths,
)

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def share_below(values, threshold):
    """The share of whole numbers below the threshold; those on it count half."""
    values = np.asarray(values)
    return (values < threshold).mean() + (values == threshold).mean() / 2


def tolerance(share, count):
    """Four standard deviations of a share of `count` samples, a binomial."""
    return 4 * math.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize("name", LENGTHS)
def test_without_a_limit_the_samples_have_the_published_statistics(name, monkeypatch):
    n = 100_000
    statistics = LENGTHS[name]
    monkeypatch.setitem(LENGTHS, name, statistics._replace(limit=10**9))
    samples = list(zip(*sample_lengths(name, n, 10**9, seed=0), strict=True))
    for lengths, (median, p90) in zip(samples, statistics[:2], strict=True):
        assert share_below(lengths, median) == pytest.approx(0.5, abs=tolerance(0.5, n))
        assert share_below(lengths, p90) == pytest.approx(0.9, abs=tolerance(0.9, n))
    correlation = np.corrcoef(*np.log(samples))[0, 1]
    assert correlation == pytest.approx(0, abs=4 / math.sqrt(n))  # drawn apart


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("max_len", [2, 64, 1000, 16384])
def test_every_sample_fits_the_model(name, max_len):
    for pair in sample_lengths(name, 2000, max_len, seed=3):
        assert min(pair) >= 1 and sum(pair) <= max_len
        assert [type(length) for length in pair] == [int, int]


def test_samples_depend_on_the_seed_and_fewer_are_the_first_of_them():
    samples = sample_lengths("sharegpt4", 300, 8192, seed=5)
    assert sample_lengths("sharegpt4", 50, 8192, seed=5) == samples[:50]
    assert sample_lengths("sharegpt4", 300, 8192, seed=6) != samples


@pytest.mark.parametrize("qps", [0.5, 40])
def test_gaps_are_exponential_at_the_rate(qps):
    arrivals = poisson([(1, 1)] * 20_001, qps, seed=0)
    gaps = np.diff([arrival.time for arrival in arrivals]) * qps  # in mean gaps
    assert arrivals[0].time == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1, abs=4 * math.sqrt(1 / 20_000))
    assert gaps.var() == pytest.approx(1, abs=4 * math.sqrt(8 / 20_000))  # fourth moment: 9
    for mean_gaps in (0.1, 1, 3):
        share = 1 - math.exp(-mean_gaps)
        assert (gaps < mean_gaps).mean() == pytest.approx(share, abs=tolerance(share, 20_000))


def test_lengths_gaps_and_prompts_of_one_seed_do_not_share_random_numbers(monkeypatch):
    streams = []
    make_rng = workload.make_rng

    def spy(stream, seed):
        streams.append(stream)
        return make_rng(stream, seed)

    monkeypatch.setattr(workload, "make_rng", spy)
    arrivals = poisson(sample_lengths("arxiv", 9, 64, 9), 1.0, 9)
    assert workload.prompts(arrivals, 7, 9, (2, 1)) and workload.zipf_lengths(4, 9, 0, 1.0, 9, 9)
    assert sorted(streams) == [1, 2, 3, 4, 5, *[6] * 9]  # 6 is the prefix, the same for all 9


def test_rescale_runs_a_trace_at_another_rate():
    arrivals = [Arrival(2.0, 5, 6), Arrival(3.0, 7, 8, "high"), Arrival(6.0, 9, 10)]  # 0.5 per s
    expected = [Arrival(0, 5, 6), Arrival(0.25, 7, 8, "high"), Arrival(1.0, 9, 10)]
    assert workload.rescale(arrivals, 2) == expected


def test_prompts_begin_with_one_of_some_prefixes_and_go_on_as_without():
    arrivals = [Arrival(0.0, 5, 5)] * 40
    longer = [arrival._replace(prompt_len=25) for arrival in arrivals]

    def prefixes(token_lists):
        return {tuple(prompt[:20]) for prompt in token_lists}

    same, again, other = (workload.prompts(longer, 1000, seed, (20, 4)) for seed in (3, 3, 4))
    assert same == again and not prefixes(same) & prefixes(other)
    assert len(prefixes(same)) == 4 and all(len(prompt) == 25 for prompt in same)
    suffixes = [prompt[20:] for prompt in same]
    assert suffixes == workload.prompts(arrivals, 1000, 3) and len(set(map(tuple, suffixes))) == 40


def test_lengths_are_sampled_or_repeated_in_equal_shares():
    assert make_lengths("arxiv", 9, 64, 5) == sample_lengths("arxiv", 9, 64, 5)
    assert make_lengths("5+3", 2, 8, 0) == [(5, 3), (5, 3)]
    assert make_lengths(" 5 + 3,1+1,2+2", 5, 8, 0) == [(5, 3), *[(1, 1)] * 2, *[(2, 2)] * 2]
    for lengths, count in (("sharegpt", 9), ("0+1", 9), ("5+4", 9), ("5+3,1+1,2+2", 2)):
        with pytest.raises(ValueError):
            make_lengths(lengths, count, 8, 0)


@pytest.fixture
def write(tmp_path):
    """A function that writes text or bytes to a file and returns its path."""

    def write(content):
        file = tmp_path / "trace.csv"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return write


def test_a_trace_is_sorted_and_begins_at_0(write):
    file = write(HEADER + "12.5,30,4\n10.0,374,44\n10.5,1,1\n10.0,2,900\n")
    arrivals, left_out = read_trace(file, max_len=1000)
    assert arrivals[:2] == [Arrival(0.0, 374, 44), Arrival(0.0, 2, 900)]  # ties as in the file
    assert arrivals[2:] == [Arrival(0.5, 1, 1), Arrival(2.5, 30, 4)] and left_out == 0
    assert read_trace(str(file), max_len=1000) == (arrivals, left_out)
    with pytest.raises(OSError):
        read_trace(file.with_name("missing.csv"), max_len=1000)


def test_a_trace_is_cut_to_what_fits_and_the_rest_is_counted(write):
    file = write(HEADER + "5,99,1\n1,90,11\n2,90,10\n6,90,90\n3,1,100\n4,50,50\n")
    fit = [Arrival(0.0, 90, 10), Arrival(2.0, 50, 50), Arrival(3.0, 99, 1)]
    assert read_trace(file, max_len=100) == read_trace(file, max_len=100, count=9) == (fit, 3)
    assert read_trace(file, max_len=100, count=2) == (fit[:2], 2)  # of those before the last
    assert read_trace(file, max_len=100, count=3) == (fit, 2)
    with pytest.raises(ValueError):
        read_trace(write(HEADER + "0,50,60\n1,50,51\n"), max_len=100)


@pytest.mark.parametrize("theta", [0.0, 0.4, 1.0])
def test_zipf_lengths_have_their_shares(theta):
    lengths = zipf_lengths(100, 400, theta, 10, 4000, seed=7)
    assert lengths == zipf_lengths(100, 400, theta, 10, 4000, seed=7)
    assert all(isinstance(n, int) and n >= 1 for pair in lengths for n in pair)
    assert all(abs(output - (prompt + output) / 11) <= 0.5 for prompt, output in lengths)
    totals = np.array(lengths).sum(axis=1)
    assert totals.min() >= 100 and totals.max() <= 400
    odds = np.arange(1, 302) ** -theta
    for longest in (150, 250, 350):  # six standard deviations of a share of 4,000
        share = odds[: longest - 99].sum() / odds.sum()
        assert (totals <= longest).mean() == pytest.approx(share, abs=0.0474)
