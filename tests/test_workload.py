"""Workloads, held against published statistics, formulas and lines of a trace by hand."""

import math

import numpy as np
import pytest

from lab.measure import workload
from lab.measure.arrival import LENGTHS, Arrival
from lab.measure.workload import make_lengths, poisson, read_trace, sample_lengths, zipf_lengths

COUNT = 20_000
HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def tolerance(share):
    """Four standard deviations of a share of COUNT samples, a binomial."""
    return 4 * math.sqrt(share * (1 - share) / COUNT)


@pytest.mark.parametrize("name", LENGTHS)
def test_without_a_limit_the_samples_have_the_published_statistics(name, monkeypatch):
    statistics = LENGTHS[name]
    monkeypatch.setitem(LENGTHS, name, statistics._replace(limit=10**9))
    samples = np.array(sample_lengths(name, COUNT, 10**9, seed=0))
    for lengths, published in zip(samples.T, statistics[:2], strict=True):
        for value, share in zip(published, (0.5, 0.9), strict=True):
            below = (lengths < value).mean() + (lengths == value).mean() / 2
            assert below == pytest.approx(share, abs=tolerance(share))
    correlation = np.corrcoef(*np.log(samples.T))[0, 1]
    assert correlation == pytest.approx(0, abs=4 / math.sqrt(COUNT))  # drawn apart


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("max_len", [2, 1000, 16384])
def test_every_sample_fits_the_model(name, max_len):
    for pair in sample_lengths(name, 2000, max_len, seed=3):
        assert min(pair) >= 1
        assert sum(pair) <= max_len


def test_samples_depend_on_the_seed_and_fewer_are_the_first_of_them():
    samples = sample_lengths("sharegpt4", 300, 8192, seed=5)
    assert sample_lengths("sharegpt4", 50, 8192, seed=5) == samples[:50]
    assert sample_lengths("sharegpt4", 300, 8192, seed=6) != samples


@pytest.mark.parametrize("qps", [0.5, 40])
def test_gaps_are_exponential_at_the_rate(qps):
    arrivals = poisson([(1, 1)] * (COUNT + 1), qps, seed=0)
    gaps = np.diff([arrival.time for arrival in arrivals]) * qps  # in mean gaps
    assert arrivals[0].time == 0
    assert gaps.mean() == pytest.approx(1, abs=4 / math.sqrt(COUNT))
    for mean_gaps in (0.1, 1, 3):
        share = 1 - math.exp(-mean_gaps)
        assert (gaps < mean_gaps).mean() == pytest.approx(share, abs=tolerance(share))


def test_prompts_begin_with_one_of_some_prefixes_and_go_on_as_without():
    arrivals = [Arrival(0.0, 5, 5)] * 40
    longer = [arrival._replace(prompt_len=25) for arrival in arrivals]
    prompts = workload.prompts(longer, 1000, 3, shared=(20, 4))
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 4
    assert [prompt[20:] for prompt in prompts] == workload.prompts(arrivals, 1000, 3)
    assert prompts != workload.prompts(longer, 1000, 4, shared=(20, 4))


def test_lengths_are_sampled_or_repeated_in_equal_shares():
    assert make_lengths("arxiv", 9, 64, 5) == sample_lengths("arxiv", 9, 64, 5)
    assert make_lengths(" 5 + 3,1+1,2+2", 5, 8, 0) == [(5, 3), *[(1, 1)] * 2, *[(2, 2)] * 2]
    for lengths, count in (("sharegpt", 9), ("0+1", 9), ("5+4", 9), ("5+3,1+1,2+2", 2)):
        with pytest.raises(ValueError):
            make_lengths(lengths, count, 8, 0)


def test_a_trace_is_sorted_cut_to_what_fits_and_begins_at_0(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(HEADER + "5,99,1\n1,90,11\n2.5,90,10\n6,90,90\n3,1,100\n2.5,50,50\n", "utf-8")
    fitting = [Arrival(0.0, 90, 10), Arrival(0.0, 50, 50), Arrival(2.5, 99, 1)]  # ties as in it
    assert read_trace(file, max_len=100) == (fitting, 3)
    assert read_trace(file, max_len=100, count=2) == (fitting[:2], 1)  # of those before the last
    with pytest.raises(ValueError):
        read_trace(file, max_len=10)
    assert [a.time for a in workload.rescale(fitting, qps=4)] == [0, 0, 0.5]


@pytest.mark.parametrize("theta", [0.0, 0.4, 1.0])
def test_zipf_lengths_have_their_shares(theta):
    lengths = zipf_lengths(100, 400, theta, 10, COUNT, seed=7)
    assert all(abs(output - (prompt + output) / 11) <= 0.5 for prompt, output in lengths)
    totals = np.array(lengths).sum(axis=1)
    odds = np.arange(1, 302) ** -theta
    for longest in (150, 250, 350):
        share = odds[: longest - 99].sum() / odds.sum()
        assert (totals <= longest).mean() == pytest.approx(share, abs=tolerance(share))
