"""The command lines run, say what they should, and refuse what makes no sense. No timing is asserted here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import cli
import experiments
import measure
import sample
from attention import Extent, make_attention
from conftest import poisoned_cache, run, tiny_model
from engine import Completion, Engine, Iteration
from model import GPT, FlatBatch, GPTConfig, Span
from plot import _bars
from test_scheduler import simulate

TINY = [
    "--model",
    "llama-tiny",
    "--device",
    "cpu",
    "--chunk",
    "32",
    "--batch",
    "3",
    "--seq-len",
    "80",
    "--dtype",
    "float32",
]


def run_offline(*command):
    """A script of this folder in a process of its own, which has no network. Returns its CompletedProcess."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    folder = Path(__file__).parent
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=env)


def test_bench_prints_and_writes_everything(tmp_path, capsys):
    bench.main(
        [
            *TINY,
            "--policies",
            ",".join(experiments.SPECS),
            "--json",
            str(tmp_path / "r.json"),
            "--plot",
            str(tmp_path / "t.png"),
        ]
    )
    text, report = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert report["options"]["chunk"] == 32 and report["options"]["pd_ratio"] == 16
    machine = report["machine"]
    assert machine["torch"] == torch.__version__ and machine["dtype"] == "float32" and machine["model"] == "llama-tiny"
    for heading in (
        machine["device"],
        "TFLOP/s",
        "GB/s",
        "schedule()",
        "SARATHI, Table 2",
        "2. End to end",
        "3. A decode costs",
    ):
        assert heading in text
    table = report["decode_maximal"]
    assert [
        (table[r]["prefill_tokens"], table[r]["decodes"]) for r in ("prefill-only", "decode-only", "decode-maximal")
    ] == [(30, 0), (0, 3), (30, 2)]
    assert table["decode-maximal"]["decode_token_ms"] == pytest.approx(
        (table["decode-maximal"]["total_ms"] - table["prefill-only"]["total_ms"]) / 2
    )
    rows = report["end_to_end"]
    assert set(rows) == set(experiments.SPECS) and rows["request-level"]["gain"] == 1
    for name, row in rows.items():
        assert f"| {name} " in text and f"{row['tokens_per_s']:,.0f}" in text
    # 6 requests of 75 + 5 tokens; the first two want 1 and 3 output tokens; the last token of each is not computed
    computed = 6 * 75 + 5 * 4 + 1 + 3 - 6
    for row in rows.values():
        assert round(row["tokens_per_iteration"] * row["iterations"]) == computed
    assert rows["request-level"]["longest_stall_s"] == 0 and rows["vllm"]["longest_stall_s"] > 0
    assert set(report["advice"]["predicted_gain"]) == {"32", "64"}  # candidates between the batch and the context
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_bench_beside_transformers(capsys):
    pytest.importorskip("transformers")
    bench.main([*TINY, "--policies", "sarathi", "--transformers"])
    assert "(100% of the tokens are equal)" in capsys.readouterr().out  # float32 leaves no doubt


def test_bench_help_explains_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as done:
        bench.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    for option in (
        "model",
        "init-from",
        "device",
        "dtype",
        "batch",
        "seq-len",
        "pd-ratio",
        "chunk",
        "policies",
        "requests",
        "seed",
        "compile",
        "threads",
        "json",
        "plot",
    ):
        assert f"--{option}" in text
    assert text.count("default:") >= 15


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--chunk", "0"], "--chunk 0"),
        (["--batch", "1"], "--batch 1"),
        (["--chunk", "4", "--batch", "6"], "--chunk 4"),
        (["--policies", "sarathi,fifo"], "'fifo'"),
        (["--model", "llama-9b"], "'llama-9b'"),
        (["--pd-ratio", "-1"], "--pd-ratio -1"),
        (["--requests", "0"], "--requests 0"),
        (["--model", "gpt2", "--init-from", "x"], "give one of them"),
        (["--chunk", "2000"], "--chunk 2000"),
        (["--policies", ""], "--policies"),
        (["--pd-ratio", "nan"], "--pd-ratio nan"),
        (["--threads", "0"], "--threads 0"),
        (["--json", "/no/such/dir/f"], "--json"),
        (["--plot", "plot.xyz"], "--plot plot.xyz"),
        (["--model", "gpt2", "--transformers"], "--transformers"),
    ],
)
def test_bench_refuses_what_makes_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(arguments)
    assert message in capsys.readouterr().err


def test_bench_refuses_a_length_the_model_does_not_have():
    with pytest.raises(ValueError, match="--seq-len 2000: this model is limited to 1024"):
        cli.load_model(
            bench.parse_args(["--model", "gpt2", "--seq-len", "2000", "--dtype", "bfloat16", "--device", "cpu"]),
            "seq_len",
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "foo"],
        ["--device", "mps"],
        ["--attention", "xformers", "--device", "cpu"],
        ["--init-from", "/no/such"],
    ],
)
def test_bench_ends_with_one_line_where_a_user_can_help(arguments):
    done = run_offline("bench.py", *arguments)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and arguments[1] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cost_below_the_noise_is_not_a_speedup(monkeypatch):
    """Only the hybrid batch's total is worth a number here: its linear layers take less than the chunk alone."""
    ms = {
        ("prefill-only", "total"): 100,
        ("decode-maximal", "total"): 110,
        ("prefill-only", "bare"): 80,
        ("decode-maximal", "bare"): 81,
        ("decode-only", "total"): 30,
        ("decode-only", "bare"): 20,
    }
    monkeypatch.setattr(
        experiments,
        "interleaved",
        lambda variants, device: (
            [
                function()
                for _ in range(measure.WARMUP + 3)
                for (_, part), function in variants.items()
                if part == "watched"
            ],
            {key: measure.Timing(ms.get(key, 1), 0.1) for key in variants},
        )[1],
    )
    args = SimpleNamespace(batch=3, chunk=12, seq_len=20, attention="auto", compile=False)
    rows, speedup = experiments.decode_maximal(tiny_model(), {"flops_per_s": 1e12, "bytes_per_s": 1e10}, args)
    assert speedup["total"] == pytest.approx((30 / 3) / (10 / 2)) and speedup["bare"] is None
    assert rows["decode-maximal"]["decode_token_ms"] == 5 and rows["decode-only"]["decode_token_ms"] == 10
    assert [(row["prefill_tokens"], row["decodes"]) for row in rows.values()] == [(10, 0), (0, 3), (10, 2)]


def test_rows_of_the_policies_are_what_was_seen():
    requests = [([1] * 6, 1), ([2] * 6, 3)]
    args = SimpleNamespace(chunk=8, batch=2, seq_len=9, attention="auto")
    run = experiments.PolicyRun(tiny_model(), "vllm", requests, args)
    run.clock.elapsed = 2.0
    run.completions = [
        Completion(0, [1] * 6, 0.0, tokens=[1], token_times=[1.0]),
        Completion(1, [2] * 6, 0.5, tokens=[1, 2, 3], token_times=[1.5, 1.7, 2.7]),
    ]
    run.iterations = [Iteration(0.0, 1.5, [(0, 6, False), (1, 6, False)]), Iteration(1.5, 1.7, [(1, 1, True)])]
    run.stalls = [0.2, 0.7]
    assert run.row() == {
        "tokens_per_s": (6 + 1 + 6 + 3) / 2,
        "p50_ttft_s": 1.0,
        "p99_tbt_s": pytest.approx(0.2 + 0.99 * 0.8),
        "longest_stall_s": 0.7,
        "iterations": 2,
        "tokens_per_iteration": 6.5,
    }


def test_orca_best_lets_one_prompt_into_a_batch():
    policy, options = experiments.SPECS["orca-best"]
    history = simulate(policy, [(5, 3)] * 4, **options)
    assert [sum(length != "d" for length in batch.values()) for batch in history[:4]] == [1] * 4


def test_a_busy_clock_stands_still_while_others_run(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(experiments.time, "perf_counter", lambda: now[0])
    clock = experiments.BusyClock()
    clock.resume()
    now[0] = 13.0
    assert clock() == 3.0
    clock.pause()
    now[0] = 99.0
    assert clock() == clock.elapsed == 3.0


def test_the_advice_is_the_largest_predicted_gain(monkeypatch):
    ms = {3: 9.0, 32: 16.0, 64: 24.0, 128: 40.0}  # 8 ms a pass and 0.25 a token: nothing rides for free
    monkeypatch.setattr(measure, "bare_products", lambda model, tokens, logits: tokens)
    monkeypatch.setattr(
        experiments, "interleaved", lambda variants, device, repeats: {c: measure.Timing(ms[c], 0.0) for c in variants}
    )
    rows = {"prefill-only": {"attention_ms": 3.0, "prefill_tokens": 30}, "decode-only": {"attention_ms": 6.0}}
    args = SimpleNamespace(batch=3, chunk=64, seq_len=128)
    advice = experiments.advise(tiny_model(), rows, args)
    expected = {}
    for chunk in (32, 64, 128):
        attention = (chunk - 2) * 0.1 + 2 * 2.0
        expected[chunk] = ((chunk - 2) * 40 / 128 + 2 * 3.0 + attention) / (ms[chunk] + attention)
    assert advice["predicted_gain"] == pytest.approx(expected)
    assert advice["favoured_chunk"] == max(expected, key=expected.get) == 128


def test_medians_and_quartiles():
    assert measure.summarize([1, 2, 3, 4, 100]) == (3, (4 - 2) / 3)
    calls = []
    timings = measure.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, torch.device("cpu"), 4
    )
    assert calls == ["a", "b"] * (measure.WARMUP + 4) and timings.keys() == {"a", "b"}


def test_bandwidth_and_ridge_are_bytes_and_rows(monkeypatch):
    monkeypatch.setattr(measure, "interleaved", lambda *_, **__: {"sum": measure.Timing(10.0, 0.0)})
    assert measure.memory_bandwidth(torch.device("cpu")) == pytest.approx(512 * 2**20 / 0.010)
    monkeypatch.setattr(experiments, "interleaved", lambda *_, **__: {"products": measure.Timing(2.0, 0.0)})
    model = tiny_model(dtype=torch.float32)
    args = SimpleNamespace(dtype="float32", init_from=None, model="tiny", compile=False)
    machine = experiments.describe_machine(model, args, 16)
    assert machine["flops_per_s"] == pytest.approx(measure.product_flops(model, 16, 0) / 0.002)
    # at the ridge, 2 flops for each row of a weight take as long as reading its 4 bytes
    assert 2 * machine["ridge_tokens"] / machine["flops_per_s"] == pytest.approx(4 / machine["bytes_per_s"])


def test_bars_go_from_one_token_to_the_next():
    iterations = [
        Iteration(0, 2, [(5, 8, False)]),
        Iteration(2, 3, [(5, 1, True)]),
        Iteration(3, 6, [(6, 8, False)]),
        Iteration(6, 7, [(5, 1, True), (6, 1, True)]),
    ]
    assert _bars(iterations) == [(1, 0, 2, False), (1, 2, 3, True), (2, 3, 6, False), (1, 3, 7, True), (2, 6, 7, True)]


def test_compile_takes_both_halves_of_every_layer(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function) or function)
    model = tiny_model()
    model.compile()
    assert [f.__name__ for f in compiled] == ["project", "finish"] * model.config.n_layer


@pytest.mark.parametrize("command", ["sample.py --help", "bench.py --help"])
def test_a_reader_that_goes_away_is_no_error(command):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent, env=env)  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141


def test_workload_is_balanced_and_the_same_for_all():
    args = SimpleNamespace(seq_len=1000, pd_ratio=256 / 5, requests=9, batch=6, seed=4)
    requests = experiments.workload(args, 256)
    assert requests == experiments.workload(args, 256)
    assert [len(prompt) for prompt, _ in requests] == [981] * 9
    assert [output for _, output in requests] == [3, 6, 9, 12, 15, 19, 19, 19, 19]


def test_attention_cost_counts_every_visible_key():
    config = GPTConfig("llama", 16, 3, 8, 64, n_kv_head=2, head_dim=16)
    extents = [Extent([0], 5, 4), Extent([1], 9, 1), Extent([2], 0, 3)]
    visible = sum(start + i + 1 for _, start, length in extents for i in range(length))
    keys = 9 + 10 + 3
    flops = 3 * visible * 8 * (2 * 16 + 2 * 16)  # per layer and head: q k and p v, two operations for each of 16 dims
    assert measure.attention_cost(config, extents, torch.bfloat16) == (
        flops,
        3 * keys * 2 * (2 * 16 * 2),
    )  # K and V, 2 heads of 16, 2 bytes


def test_product_flops_count_every_weight():
    model = tiny_model()
    weights = sum(p.numel() for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2)
    assert measure.product_flops(model, 7, 2) == 2 * (7 * weights + 2 * 61 * 32)


def test_watches_see_linear_layers_and_attention_only_while_they_are_asked_to():
    model = tiny_model()
    cache = poisoned_cache(model, 1, 8)
    batch = FlatBatch.build([Span([0], 0, [1, 2, 3])], make_attention(model.config, cache))
    attention_watch = measure.Stopwatch(model.device)
    with measure.watch_linear(model) as linear_watch:
        watched = model(measure.watch_attention(batch, attention_watch), cache)
    assert len(linear_watch.marks) == 2 * (2 * 4 + 1) and len(attention_watch.marks) == 2 * 2
    assert linear_watch.read_ms() > 0 and linear_watch.read_ms() == 0
    assert torch.equal(model(batch, cache), watched)
    assert not linear_watch.marks


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_model_gives_the_same_logits():
    model = tiny_model(dtype=torch.float32)
    compiled = GPT(model.config, dtype=torch.float32, seed=None)
    compiled.load_state_dict(model.state_dict())
    compiled.compile()
    for tokens in ([1, 2, 3, 4, 5], [6]):
        expected, got = (run(m, poisoned_cache(m, 1, 8), [Span([0], 0, tokens)]) for m in (model, compiled))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


# -----------------------------------------------------------------------------------------------------
# sample.py


def test_sample_streams_one_prompt_and_shares_batches_among_several(tmp_path, capsys):
    common = [
        "--preset",
        "llama-tiny",
        "--device",
        "cpu",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        "--chunk",
        "4",
    ]
    alone = {}
    for prompt in ("one", "two three", "ü!"):
        sample.main([*common, "--prompt", prompt])
        alone[prompt] = capsys.readouterr().out.removesuffix("\n")
        assert alone[prompt].startswith(prompt) and len(alone[prompt]) > len(prompt)
    (tmp_path / "prompts").write_text("two three\r\n \nü!\n", encoding="utf-8-sig", newline="")
    sample.main([*common, "--prompt", "one", "--prompt-file", str(tmp_path / "prompts")])
    printed = capsys.readouterr().out.split("--- ")[1:]
    assert sorted(printed) == sorted(text + "\n" for text in alone.values())


def test_sample_loads_a_checkpoint_with_its_tokenizer(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models

    letters = {c: i for i, c in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    sample.main(["--model", str(tmp_path), "--device", "cpu", "--prompt", "abc", "--max-new-tokens", "9"])
    text = capsys.readouterr().out.strip()
    assert text.startswith("abc") and len(text) == 12 and set(text) <= set("abcdefgh")


def test_sample_passes_its_options_on(monkeypatch, capsys):
    seen = {}

    def spy(engine, prompt, params):
        seen.setdefault("params", []).append(params)
        seen["engine"] = (type(engine.scheduler).__name__, engine.scheduler.chunk, engine.scheduler.max_batch)
        return add_request(engine, prompt, params)

    add_request = Engine.add_request
    monkeypatch.setattr(Engine, "add_request", spy)
    sample.main(
        [
            "--preset",
            "llama-tiny",
            "--device",
            "cpu",
            "--prompt",
            "a",
            "--prompt",
            "b",
            "--max-new-tokens",
            "3",
            "--temperature",
            "0.5",
            "--top-k",
            "4",
            "--top-p",
            "0.6",
            "--seed",
            "7",
            "--policy",
            "vllm",
            "--chunk",
            "9",
        ]
    )
    assert [(p.max_new_tokens, p.temperature, p.top_k, p.top_p, p.seed) for p in seen["params"]] == [
        (3, 0.5, 4, 0.6, 7),
        (3, 0.5, 4, 0.6, 8),
    ]
    assert seen["engine"] == ("VLLM", 9, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give at least one prompt"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--preset", "llama-tiny", "--prompt", "x", "--temperature", "-1"], "temperature=-1"),
        (["--preset", "llama-tiny", "--prompt", ""], "prompt"),
        (["--model", "/no/such/directory", "--prompt", "x"], "config.json"),
    ],
)
def test_sample_says_what_is_wrong_without_a_traceback(arguments, message):
    done = run_offline("sample.py", *arguments)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
