"""The papers' claims that one device can show: what they say, and the functions that measure them.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers; F is a figure, T a table. `bench.py paper`
measures the claims in this order. A new claim is a function that takes a Bench and returns a
Finding, and an entry here. Read first: measured_batches.py and measured_loads.py. Read next:
report.py."""

from collections.abc import Callable
from dataclasses import dataclass

from lab.papers.bench import Bench
from lab.papers.finding import Finding, Headline
from lab.papers.measured_batches import (
    b_2,
    s_f3,
    s_f4a,
    s_f4b,
    s_f7,
    s_f8,
    s_f10,
    s_f13,
    ss_f9,
    ss_f14,
)
from lab.papers.measured_loads import (
    b_1,
    b_7,
    s_f9,
    s_f11,
    s_t4,
    ss_f7,
    ss_f10,
    ss_f12,
    ss_t4,
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure or table of a paper, with what it says, and the function that measures it here."""

    id: str
    covers: tuple[str, ...] = ()  # other claims that are measured with it
    title: str
    paper: str  # the published numbers, and the GPU they were measured on
    headline: Headline  # the one of them that summaries show, with ours
    seconds: tuple[int, int]  # how long it takes, about, with --quick and without, on two CPU cores
    function: Callable[[Bench], Finding]

    @property
    def ids(self) -> tuple[str, ...]:
        """All claims that are measured with it, itself first."""
        return (self.id, *self.covers)

    @property
    def name(self) -> str:
        """The heading of what is found: its ids and its title."""
        return f"{', '.join(self.ids)}: {self.title}"

    def seconds_of(self, quick: bool) -> int:
        """How long it takes, about."""
        quick_s, full_s = self.seconds
        return quick_s if quick else full_s


CLAIMS = [
    Claim(
        id="S-F3",
        covers=("SS-F4",),
        title="Time per token of prefill and decode, by operation",
        paper=(
            "a decode token costs as much as 200, 100 and 16.7 prefill tokens at B = 1, 2, 18; "
            "others below 5 % (LLaMA-13B, A6000); linear layers above 80 %, a decode token's as "
            "much as 128 prefill tokens' (Mistral-7B, A100)"
        ),
        headline=Headline(
            text="prefill tokens that cost as much as one decode, smallest batch",
            paper="200",
            line="decode / prefill",
        ),
        seconds=(10, 100),
        function=s_f3,
    ),
    Claim(
        id="S-F4a",
        covers=("SS-F3",),
        title="Throughput of prefill and decode over their tokens, in one layer and in all",
        paper=(
            "in one layer prefill saturates at 512 tokens, at 180 tokens/ms, 256 are 12.5 % "
            "below; decode only at a batch of 256 (LLaMA-13B, A6000)"
        ),
        headline=Headline(
            text="throughput of a prefill of 256 tokens over one of 512, one layer",
            paper="88%",
            line="256 tokens",
        ),
        seconds=(5, 50),
        function=s_f4a,
    ),
    Claim(
        id="S-F4b",
        covers=("SS-F5",),
        title="Arithmetic intensity by operation, computed, beside the ridge of this device",
        paper=(
            "decode more than 100x below prefill (LLaMA-13B, A6000: 53 flops per byte at the "
            "ridge; A100: 156)"
        ),
        headline=Headline(
            text="arithmetic intensity of attention, prefill over decode",
            paper="above 100x",
            line="prefill / decode",
            unit="x",
        ),
        seconds=(5, 10),
        function=s_f4b,
    ),
    Claim(
        id="S-F7",
        covers=("SS-F6",),
        title="Time of an iteration, over its tokens: are there steps?",
        paper=("128, 256, 257 tokens: 55, 69.8, 92.33 ms, +32 % for one token (LLaMA-13B, A6000)"),
        headline=Headline(
            text="time of an iteration of 257 tokens over one of 256",
            paper="1.32x",
            line="to 257 tokens",
        ),
        seconds=(15, 80),
        function=s_f7,
    ),
    Claim(
        id="S-F8",
        covers=("S-T2",),
        title="How much cheaper a decode is beside a chunk of 256, over batch and context",
        paper=(
            "12.49 ms alone, 1.2 ms riding, B = 4 at 1,024 tokens; 2.8x to 10x over all "
            "(LLaMA-13B, A6000)"
        ),
        headline=Headline(
            text="how many times cheaper a decode is beside a chunk, smallest context",
            paper="10x",
        ),
        seconds=(22, 100),
        function=s_f8,
    ),
    Claim(
        id="S-T4",
        title="Throughput gains of SARATHI over request-level, three contexts",
        paper=(
            "1.33x, 1.26x, 1.22x at 1K, 2K, 3K, decodes 5.45x, 3.26x, 2.51x (LLaMA-13B, A6000); "
            "1.25x, 1.22x, 1.14x (LLaMA-33B, A100)"
        ),
        headline=Headline(
            text="throughput of sarathi over request-level, shortest context",
            paper="1.33x",
            line="sarathi",
        ),
        seconds=(45, 90),
        function=s_t4,
    ),
    Claim(
        id="S-F9",
        title="Throughput gain over P:D, for chunks of 128, 256 and 512, or a quarter of that",
        paper=(
            "1.27x at P:D 14 with 256, 1.23x at 28 with 512, lower with 128 (LLaMA-13B, A6000, B "
            "= 18, 1K)"
        ),
        headline=Headline(
            text="throughput of sarathi over request-level, best chunk and P:D",
            paper="1.27x",
            pick="largest",
        ),
        seconds=(55, 140),
        function=s_f9,
    ),
    Claim(
        id="S-F11",
        title="SARATHI and Orca's best and worst case over request-level",
        paper=(
            "SARATHI 1.27x, 1.25x, 1.23x at 1K, 2K, 3K; Orca at best 1.11x, near 1, near 1; at "
            "worst 1 (LLaMA-13B, A6000)"
        ),
        headline=Headline(
            text="throughput of sarathi over request-level, beside orca",
            paper="1.27x",
            line="sarathi",
        ),
        seconds=(1, 1),
        function=s_f11,
    ),
    Claim(
        id="S-F10",
        title="Time by operation for the same requests, request-level against SARATHI",
        paper=(
            "ffn 1.3x to 1.6x less, preproj and postproj 1.05x to 1.38x less (LLaMA-13B, A6000)"
        ),
        headline=Headline(
            text="time of ffn_ln1, request-level over sarathi, smallest batch",
            paper="1.3x to 1.6x",
            line="ffn_ln1",
        ),
        seconds=(5, 40),
        function=s_f10,
    ),
    Claim(
        id="S-F13",
        title="What small chunks cost: attention, and the whole prefill",
        paper=(
            "chunks of 64: attention 3x, prefill 5x; 256: prefill within 20 %, 512: within 10 %; "
            "end to end 1.16x at 128 (LLaMA-13B, A6000; see S-F9)"
        ),
        headline=Headline(
            text="time of a prefill in the smallest chunks over a whole one",
            paper="5x",
            line="prefill",
        ),
        seconds=(10, 70),
        function=s_f13,
    ),
    Claim(
        id="SS-F7",
        title="Requests A to D over time, under four policies",
        paper=(
            "as drawn: vLLM and Orca stall A and B while C and D are prefilled, FasterTransformer "
            "lets C and D wait, Sarathi-Serve does neither"
        ),
        headline=Headline(
            text="prompt tokens in the longest stall under sarathi-serve",
            paper="-",
            line="sarathi-serve",
        ),
        seconds=(15, 25),
        function=ss_f7,
    ),
    Claim(
        id="SS-F9",
        title="Decodes beside a whole prompt and beside a chunk, against decodes alone",
        paper=(
            "up to 28.3x beside a whole prompt, a small multiple of decodes alone beside a chunk"
        ),
        headline=Headline(
            text="decodes beside a whole prompt over decodes alone, at most",
            paper="28.3x",
            line="with a prompt",
            pick="largest",
        ),
        seconds=(10, 50),
        function=ss_f9,
    ),
    Claim(
        id="SS-F14",
        title="What chunks of 512, 1,024 and 2,048, or less, add to a prefill, over prompt lengths",
        paper=(
            "at most about 25 % at 512, next to nothing at 2,048 (Yi-34B, two A100; the authors' "
            "measurements for 512: +15, +19, +12, 0 % at 2K, 4K, 8K, 16K)"
        ),
        headline=Headline(
            text="time of a prefill in small chunks over a whole one, at most",
            paper="1.25x",
            line="small",
            pick="largest",
        ),
        seconds=(8, 100),
        function=ss_f14,
    ),
    Claim(
        id="SS-F10",
        covers=("SS-F11",),
        title="Capacity under the strict and the relaxed SLO, both datasets",
        paper=(
            "over Orca and vLLM up to 4.0x and 3.7x (Yi-34B), 6.3x and 4.3x (LLaMA2-70B); over "
            "vLLM up to 2.6x (Mistral-7B), 5.6x (Falcon-180B)"
        ),
        headline=Headline(
            text="capacity of sarathi-serve over vllm, strict SLO, chats",
            paper="2.6x to 3.7x",
            line="sarathi-serve / vllm",
            unit="x",
        ),
        seconds=(15, 680),
        function=ss_f10,
    ),
    Claim(
        id="SS-F12",
        title="Capacity over the SLO: vllm with three batch sizes, two token budgets",
        paper="best budget over vllm 3.5x at 100 ms (Mistral-7B), 1.65x at 1 s (Yi-34B)",
        headline=Headline(
            text="capacity of the best budget over the best vllm, strictest SLO",
            paper="3.5x",
            line="sarathi-serve / vllm",
            unit="x",
        ),
        seconds=(3, 520),
        function=ss_f12,
    ),
    Claim(
        id="SS-T4",
        title="Hybrid batches alone, chunks alone, and both: P50 TTFT and P99 TBT",
        paper=(
            "sharegpt4: 0.53 / 0.68, 1.04 / 0.17, 0.76 / 0.14 s; arxiv: 3.78 / 1.38, 5.38 / 0.20, "
            "3.90 / 0.17 s (Yi-34B, two A100)"
        ),
        headline=Headline(
            text="P99 TBT of hybrid batches and chunks together, chats",
            paper="0.14 s",
            line="sarathi-serve",
            title="P99 TBT",
            unit=" s",
        ),
        seconds=(40, 100),
        function=ss_t4,
    ),
    Claim(
        id="B-1",
        title="Slots used under static batching, as the post counts and in iterations",
        paper=(
            "100, 75, 50 and 25 % in turn, 50.2 % of 628 steps on average: a step for each token "
            "of the longest"
        ),
        headline=Headline(
            text="share of the slots that static batching uses",
            paper="0.502",
            line="tokens / 4",
        ),
        seconds=(15, 15),
        function=b_1,
    ),
    Claim(
        id="B-2",
        title="A prompt beside six decodes, whole and in eight chunks, as it goes on",
        paper=(
            "2,048 tokens whole: one stall of 300 ms; in chunks of 256: steps of 35 ms where a "
            "decode alone takes 30 ms"
        ),
        headline=Headline(
            text="time of an iteration with a whole prompt beside six decodes",
            paper="300 ms",
            line="with the prompt",
            pick="largest",
            unit=" ms",
        ),
        seconds=(10, 40),
        function=b_2,
    ),
    Claim(
        id="B-7",
        title=(
            "Static batching, Orca, and Orca with chunks of 512, 256 and 128, or a quarter, at a "
            "load that saturates"
        ),
        paper=(
            "throughput 1,200, 2,800, 2,650, 2,550, 2,400; P99 TBT 850, 420, 85, 65, 55 ms; P99 "
            "TTFT 3.2, 1.8, 2.1, 2.4, 2.8 s (70B, 128 users)"
        ),
        headline=Headline(
            text="P99 TBT of orca, all requests at once",
            paper="0.42 s",
            line="orca",
            title="P99 TBT",
            unit=" s",
        ),
        seconds=(65, 120),
        function=b_7,
    ),
]
