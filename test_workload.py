"""Workloads have the lengths and arrivals that they say, and a bad trace is refused in one clear line. No model."""

import csv
import io
import math
from statistics import NormalDist

import numpy as np
import pytest

import workload
from workload import (
    LENGTHS,
    Arrival,
    fixed_lengths,
    poisson,
    prompts,
    read_trace,
    rescale,
    sample_lengths,
)

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def share_below(values, threshold):
    """The share of whole numbers below the threshold; those on it count half."""
    values = np.asarray(values)
    return (values < threshold).mean() + (values == threshold).mean() / 2


def tolerance(share, count):
    """Four standard deviations of a share of `count` samples, a binomial."""
    return 4 * math.sqrt(share * (1 - share) / count)


def log_normal(median, p90):
    """The normal distribution of the logarithm."""
    return NormalDist(math.log(median), math.log(p90 / median) / 1.2815515655446004)


def quantile_under_limit(statistics, share, of_prompt):
    """Quantile of the prompt, or of the output, given prompt + output <= limit: by quadrature, not by sampling."""
    own, other = log_normal(*statistics[:2]), log_normal(*statistics[2:4])
    if not of_prompt:
        own, other = other, own
    lengths = [math.exp(own.inv_cdf((i + 0.5) / 4000)) for i in range(4000)]
    weights = [other.cdf(math.log(statistics.limit - n)) if n < statistics.limit else 0.0 for n in lengths]
    return lengths[int(np.searchsorted(np.cumsum(weights), share * sum(weights)))]


# -----------------------------------------------------------------------------------------------------
# lengths


def test_the_published_statistics_are_those_of_table_2():
    assert LENGTHS["sharegpt4"]._asdict() == dict(
        prompt_median=1730, prompt_p90=5696, output_median=415, output_p90=834, limit=8192
    )
    assert LENGTHS["arxiv"]._asdict() == dict(
        prompt_median=7059, prompt_p90=12985, output_median=208, output_p90=371, limit=16384
    )


@pytest.mark.parametrize("name", LENGTHS)
def test_without_a_limit_the_samples_have_the_published_statistics(name, monkeypatch):
    statistics = LENGTHS[name]
    monkeypatch.setitem(workload.LENGTHS, name, statistics._replace(limit=10**9))
    prompt, output = zip(*sample_lengths(name, 100_000, 10**9, seed=0))
    for lengths, median, p90 in ((prompt, *statistics[:2]), (output, *statistics[2:4])):
        assert share_below(lengths, median) == pytest.approx(0.5, abs=tolerance(0.5, 100_000))
        assert share_below(lengths, p90) == pytest.approx(0.9, abs=tolerance(0.9, 100_000))
    logs = np.log(prompt), np.log(output)
    assert np.corrcoef(*logs)[0, 1] == pytest.approx(0, abs=4 / math.sqrt(100_000))  # drawn apart


@pytest.mark.parametrize("name", LENGTHS)
def test_the_limit_shortens_the_samples_as_redrawing_must(name):
    lengths = sample_lengths(name, 20_000, 10**9, seed=0)
    for which, values in enumerate(zip(*lengths)):
        for share in (0.5, 0.9):
            expected = quantile_under_limit(LENGTHS[name], share, of_prompt=which == 0)
            assert share_below(values, expected) == pytest.approx(share, abs=tolerance(share, 20_000))
    totals = [prompt + output for prompt, output in lengths]
    assert max(totals) <= LENGTHS[name].limit
    assert totals.count(LENGTHS[name].limit) < 20  # nothing piles up there


@pytest.mark.parametrize(
    "name, median, p90, output_median", [("sharegpt4", 1623, 4553, 414), ("arxiv", 6887, 11876, 208)]
)
def test_the_docstring_says_what_the_limit_does(name, median, p90, output_median):
    statistics = LENGTHS[name]
    assert quantile_under_limit(statistics, 0.5, of_prompt=True) == pytest.approx(median, rel=0.002)
    assert quantile_under_limit(statistics, 0.9, of_prompt=True) == pytest.approx(p90, rel=0.002)
    assert quantile_under_limit(statistics, 0.5, of_prompt=False) == pytest.approx(output_median, rel=0.005)
    assert f"{median:,}" in sample_lengths.__doc__ and f"{p90:,}" in sample_lengths.__doc__


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("max_len", [2, 3, 7, 64, 257, 1000, 8192, 16384])
def test_every_sample_fits_the_model(name, max_len):
    for prompt_len, output_len in sample_lengths(name, 2000, max_len, seed=3):
        assert prompt_len >= 1 and output_len >= 1 and prompt_len + output_len <= max_len
        assert type(prompt_len) is int and type(output_len) is int


@pytest.mark.parametrize("name", LENGTHS)
def test_a_small_model_gets_the_same_samples_in_proportion_and_a_large_one_the_same(name):
    limit = LENGTHS[name].limit
    full = sample_lengths(name, 500, limit, seed=1)
    for (prompt, output), (small_prompt, small_output) in zip(full, sample_lengths(name, 500, limit // 4, seed=1)):
        assert abs(small_prompt - prompt / 4) <= 0.5 and abs(small_output - output / 4) <= 0.5  # rounded
    assert sample_lengths(name, 500, 100 * limit, seed=1) == full


def test_rounding_up_never_takes_the_last_token(monkeypatch):
    monkeypatch.setitem(workload.LENGTHS, "arxiv", workload.LengthStatistics(10, 11, 80, 90, limit=100))
    assert set(sample_lengths("arxiv", 100, 3, seed=0)) == {(1, 2)}  # 0.3 and 2.4 of 3 tokens
    assert set(sample_lengths("arxiv", 100, 2, seed=0)) == {(1, 1)}  # 0.2 and 1.6 of 2
    monkeypatch.setitem(workload.LENGTHS, "arxiv", workload.LengthStatistics(500, 501, 500, 501, limit=1000))
    halves = set(sample_lengths("arxiv", 100, 3, seed=0))  # 1.5 and 1.5 of 3 are both rounded to 2
    assert halves and all(sum(pair) <= 3 for pair in halves)


def test_samples_depend_on_the_seed_and_fewer_are_the_first_of_them():
    samples = sample_lengths("sharegpt4", 300, 8192, seed=5)
    assert sample_lengths("sharegpt4", 300, 8192, seed=5) == samples
    assert sample_lengths("sharegpt4", 50, 8192, seed=5) == samples[:50]
    assert sample_lengths("sharegpt4", 300, 8192, seed=6) != samples


def test_fixed_lengths_are_the_same_for_all():
    assert fixed_lengths(5, 3, count=2, max_len=8) == [(5, 3), (5, 3)]


# -----------------------------------------------------------------------------------------------------
# arrivals and prompts


@pytest.mark.parametrize("qps", [0.5, 40])
def test_gaps_are_exponential_at_the_rate(qps):
    arrivals = poisson([(1, 1)] * 20_001, qps, seed=0)
    gaps = np.diff([arrival.time for arrival in arrivals]) * qps  # in mean gaps
    assert arrivals[0].time == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1, abs=4 * math.sqrt(1 / 20_000))
    assert gaps.var() == pytest.approx(1, abs=4 * math.sqrt(8 / 20_000))  # the fourth central moment is 9
    for mean_gaps in (0.1, 1, 3):
        share = 1 - math.exp(-mean_gaps)
        assert (gaps < mean_gaps).mean() == pytest.approx(share, abs=tolerance(share, 20_000))


def test_two_rates_see_the_same_requests_and_the_same_gaps_up_to_a_factor():
    lengths = sample_lengths("arxiv", 200, 4096, seed=2)
    slow, fast = poisson(lengths, 3, seed=2), poisson(lengths, 7.5, seed=2)
    assert [arrival[1:] for arrival in slow] == [arrival[1:] for arrival in fast] == lengths
    assert [arrival.time / 2.5 for arrival in slow] == pytest.approx([arrival.time for arrival in fast])
    assert poisson(lengths, 3, seed=2) == slow
    assert poisson(lengths[:50], 3, seed=2) == slow[:50]
    assert poisson(lengths, 3, seed=4) != slow


def test_lengths_gaps_and_prompts_of_one_seed_do_not_share_random_numbers():
    lengths_rng, gaps_rng, prompts_rng = (workload.make_rng(stream, seed=9) for stream in (1, 2, 3))
    bits = [rng.integers(2**62, size=100).tolist() for rng in (lengths_rng, gaps_rng, prompts_rng)]
    assert len({*bits[0], *bits[1], *bits[2]}) == 300


def test_rescale_runs_a_trace_at_another_rate():
    arrivals = [Arrival(2.0, 5, 6), Arrival(3.0, 7, 8), Arrival(6.0, 9, 10)]  # two gaps in 4 s: 0.5 per second
    assert rescale(arrivals, 2) == [Arrival(0, 5, 6), Arrival(0.25, 7, 8), Arrival(1.0, 9, 10)]


def test_prompts_are_random_tokens_of_the_vocabulary():
    arrivals = [Arrival(0.0, 700, 1), Arrival(1.0, 1, 5), Arrival(1.0, 300, 2)]
    made = prompts(arrivals, vocab_size=7, seed=0)
    assert [len(prompt) for prompt in made] == [700, 1, 300]
    assert {token for prompt in made for token in prompt} == set(range(7))
    assert all(type(token) is int for prompt in made for token in prompt)
    assert made[0][:300] != made[2]
    assert prompts(arrivals, 7, seed=0) == made and prompts(arrivals, 7, seed=1) != made


@pytest.mark.parametrize("qps", [0, -1, math.nan, math.inf, "3", None])
def test_a_bad_rate_is_refused(qps):
    arrivals = [Arrival(0.0, 1, 1), Arrival(1.0, 1, 1)]
    for refuses in (lambda: poisson([(1, 1)], qps, seed=0), lambda: rescale(arrivals, qps)):
        with pytest.raises(ValueError, match=f"qps={qps!r}: must be a finite number above 0$"):
            refuses()


@pytest.mark.parametrize("arrivals", [[], [Arrival(1.0, 1, 1)], [Arrival(1.0, 1, 1)] * 3])
def test_arrivals_without_a_rate_cannot_be_rescaled(arrivals):
    with pytest.raises(ValueError, match=f"{len(arrivals)}, all at one time, have no rate"):
        rescale(arrivals, 1)


def test_bad_arguments_are_refused():
    for refuses, match in (
        (lambda: sample_lengths("sharegpt", 1, 64, 0), "name='sharegpt': must be one of sharegpt4, arxiv"),
        (lambda: sample_lengths("arxiv", 0, 64, 0), "count=0: .* at least 1"),
        (lambda: sample_lengths("arxiv", 1, 1, 0), "max_len=1: .* at least 2"),
        (lambda: sample_lengths("arxiv", 1, 64, -1), "seed=-1: .* at least 0"),
        (lambda: fixed_lengths(0, 1, 1, 8), "prompt_len=0: .* at least 1"),
        (lambda: fixed_lengths(1, 0, 1, 8), "output_len=0: .* at least 1"),
        (lambda: fixed_lengths(1, 1, 0, 8), "count=0: .* at least 1"),
        (lambda: fixed_lengths(5, 4, 1, 8), r"prompt_len=5 \+ output_len=4: must not exceed max_len=8"),
        (lambda: prompts([], 0, 0), "vocab_size=0: .* at least 1"),
        (lambda: read_trace("no-such-file", 1), "max_len=1: .* at least 2"),
        (lambda: read_trace("no-such-file", 8, count=0), "count=0: .* at least 1"),
        (lambda: read_trace("no-such-file", 8, scale=0), "scale=0: .* above 0 and at most 1"),
        (lambda: read_trace("no-such-file", 8, scale=1.5), "scale=1.5: .* above 0 and at most 1"),
        (lambda: read_trace("no-such-file", 8, scale=math.nan), "scale=nan: .* above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=match):
            refuses()


# -----------------------------------------------------------------------------------------------------
# traces


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
    assert read_trace(file, max_len=1000) == (
        [Arrival(0.0, 374, 44), Arrival(0.0, 2, 900), Arrival(0.5, 1, 1), Arrival(2.5, 30, 4)],  # ties as in the file
        0,
    )
    assert read_trace(str(file), max_len=1000) == read_trace(file, max_len=1000)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + HEADER + "1,374,44\n3,5,6\n",  # a byte order mark
        (HEADER + "1,374,44\n3,5,6\n").replace("\n", "\r\n"),
        HEADER + "1,374,44\n3,5,6",  # no newline at the end
        HEADER + "\n1,374,44\n\n3,5,6\n\n",  # blank lines
        HEADER + "1e0,374.0,44.0\n3.00,5,6.0\n",
        "num_decode_tokens,arrived_at,num_prefill_tokens\n44,1,374\n6,3,5\n",
        'id,num_prefill_tokens,"note",arrived_at,num_decode_tokens\nx,374,"a, b",1,44\ny,5,,3,6\n',
        "arrived_at, num_prefill_tokens, num_decode_tokens\n1, 374, 44\n3, 5, 6\n",
    ],
)
def test_the_same_trace_in_other_spellings(write, content):
    arrivals, left_out = read_trace(write(content), max_len=1000)
    assert arrivals == [Arrival(0.0, 374, 44), Arrival(2.0, 5, 6)] and left_out == 0
    assert all([type(value) for value in arrival] == [float, int, int] for arrival in arrivals)


def test_requests_that_do_not_fit_are_left_out_and_counted(write):
    file = write(HEADER + "1,90,11\n2,90,10\n3,1,100\n4,50,50\n5,99,1\n")
    assert read_trace(file, max_len=100) == ([Arrival(0.0, 90, 10), Arrival(2.0, 50, 50), Arrival(3.0, 99, 1)], 2)


def test_a_trace_can_be_scaled_down_to_fit(write):
    file = write(HEADER + "0,1000,200\n1,3,4000\n2,9000,2000\n")
    assert read_trace(file, max_len=401, scale=0.1) == ([Arrival(0.0, 100, 20), Arrival(1.0, 1, 400)], 1)


def test_count_keeps_the_first_that_fit(write):
    file = write(HEADER + "5,10,1\n1,10,1\n2,90,90\n3,20,1\n4,90,90\n")
    assert read_trace(file, max_len=100, count=2) == ([Arrival(0.0, 10, 1), Arrival(2.0, 20, 1)], 1)
    assert read_trace(file, max_len=100, count=9) == read_trace(file, max_len=100)


def test_a_trace_in_which_nothing_fits_is_refused(write):
    file = write(HEADER + "0,50,60\n1,50,51\n")
    with pytest.raises(
        ValueError, match="trace.csv: none of its 2 requests fits max_len=100 at scale=1: .* 101 tokens"
    ):
        read_trace(file, max_len=100)


@pytest.mark.parametrize(
    "content, match",
    [
        ("", r" line 1: column 'arrived_at' is 0 times in the header \[\]: must have each of arrived_at, num_pre"),
        ("\ufeff", r" line 1: column 'arrived_at' is 0 times in the header \[\]"),
        ("1,2,3\n4,5,6\n", r" line 1: column 'arrived_at' is 0 times in the header \['1', '2', '3'\]"),
        ("arrived_at,num_decode_tokens\n1,2\n", " line 1: column 'num_prefill_tokens' is 0 times"),
        (HEADER.strip() + ",arrived_at\n1,2,3,4\n", " line 1: column 'arrived_at' is 2 times"),
        (HEADER, ": no requests after the header"),
        (HEADER + "1,2,3\n1,2\n", r" line 3: 2 fields \['1', '2'\]: must be 3, as in the header"),
        (HEADER + "1,2,3,4\n", " line 2: 4 fields .*: must be 3"),
        (HEADER + "1,2,3\n\nsoon,2,3\n", " line 4: arrived_at='soon': must be a finite number of seconds, 0 or more"),
        (HEADER + "-0.5,2,3\n", " line 2: arrived_at='-0.5': must be a finite"),
        (HEADER + "nan,2,3\n", " line 2: arrived_at='nan': must be a finite"),
        (HEADER + "inf,2,3\n", " line 2: arrived_at='inf': must be a finite"),
        (HEADER + "1,,3\n", " line 2: num_prefill_tokens='': must be a whole number of at least 1"),
        (HEADER + "1,0,3\n", " line 2: num_prefill_tokens='0': must be a whole"),
        (HEADER + "1,2.5,3\n", " line 2: num_prefill_tokens='2.5': must be a whole"),
        (HEADER + "1,2,-3\n", " line 2: num_decode_tokens='-3': must be a whole"),
        (HEADER + "1,2,inf\n", " line 2: num_decode_tokens='inf': must be a whole"),
        (HEADER + "1,2,nan\n", " line 2: num_decode_tokens='nan': must be a whole"),
        (HEADER + '1,2,"3\n', " line 2: must be CSV: unexpected end of data"),
        (HEADER.encode() + b"1,2,3\n1,\xff,3\n", " line 3: byte 0xff: must be UTF-8 text"),
        (b"\xef\xbb\xbf" + HEADER.encode() + b"\xff,2,3\n", " line 2: byte 0xff: must be UTF-8 text"),
    ],
)
def test_a_malformed_trace_is_refused_in_one_clear_line(write, content, match):
    file = write(content)
    with pytest.raises(ValueError, match=f"^{file}{match}") as error:
        read_trace(file, max_len=100)
    assert type(error.value) is ValueError and "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_huge_field_does_not_flood_the_terminal(write):
    for field in ("9" * 500, "x" * 100_000, "x" * (csv.field_size_limit() + 1)):
        with pytest.raises(ValueError) as error:
            read_trace(write(f"{HEADER}1,{field},3\n"), max_len=100)
        assert " line 2: " in str(error.value) and len(str(error.value)) < 300


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    for file in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(OSError):
            read_trace(file, max_len=100)


def test_arrivals_survive_a_round_trip_through_a_trace(write):
    arrivals = poisson(sample_lengths("sharegpt4", 100, 512, seed=0), 4, seed=0)
    text = io.StringIO()
    csv.writer(text).writerows([workload.TRACE_COLUMNS, *arrivals])
    assert read_trace(write(text.getvalue()), max_len=512) == (arrivals, 0)
