"""The exercises: references pass, stubs fail, and typical mistakes are named."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from exercises.__main__ import main, parse_args
from exercises.catalog import EXERCISES
from exercises.loads import MAX_PAGES, LoadRequest, random_load, shrink, small_loads
from exercises.lockstep import Trial
from policies import custom
from scheduler import SarathiServe
from tests.pages import opened

ROOT = Path(__file__).parents[1]
NUMBERS = [exercise.number for exercise in EXERCISES]

IMPORTS = """
from exercises.given import CutsPrompts, Predicts
from policies.iteration_time import BatchShape
from scheduler import Admission, Batch, Chunk, Sarathi, SarathiServe, Scheduler
"""
SOLUTIONS = {
    1: """
class RequestLevel(Scheduler):
    def schedule(self):
        batch = Batch()
        if not self.running:
            while self.admit():
                pass
        for request in self.running:
            batch.add(request)
        return batch
""",
    2: """
class IterationLevel(Scheduler):
    def schedule(self):
        batch = Batch()
        while self.admit():
            pass
        for request in self.running:
            batch.add(request)
        return batch
""",
    3: """
class PromptsFirst(Scheduler):
    def reserved(self, request):
        return len(request.tokens)

    def schedule(self):
        batch = Batch(self.max_len)
        while self.waiting and len(self.waiting[0].tokens) <= batch.left:
            request = self.admit()
            if not request:
                break
            batch.add(request)
        if not batch:
            batch.add_decodes(self.decoding())
        return batch
""",
    4: """
class CutBatch(Batch):
    def add(self, request):
        start = request.num_computed
        length = max(0, min(self.left, len(request.tokens) - start))
        if length:
            self.append(Chunk(request, start, length))
            self.left -= length
        return length


class CutAPrompt(CutsPrompts):
    batch_class = CutBatch
""",
    5: """
class DecodeMaximal(Scheduler):
    cuts_prompts = True

    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.decoding())
        if batch.left > 0:
            prefills = self.prefilling()
            request = prefills[0] if prefills else self.admit()
            if request:
                batch.add(request)
        return batch
""",
    6: """
class StallFree(Scheduler):
    cuts_prompts = True
    def reserved(self, request):
        return len(request.tokens)

    def schedule(self):
        decodes = self.decoding()
        prefills = self.prefilling()
        batch = Batch(self.chunk)
        batch.add_decodes(decodes)
        for request in prefills:
            batch.add(request)
        while batch.left > 0:
            request = self.admit()
            if not request:
                break
            batch.add(request)
        return batch
""",
    7: """
class OutOfMemory(SarathiServe):
    def decoding(self):
        decodes = [request for request in self.running if request.is_decoding]
        for request in decodes:
            if request.num_computed == len(request.pages) * self.pages.page_size:
                while request.pages:
                    page = self.pages.allocate(1)
                    if page:
                        request.pages += page
                        break
                    self.preempt(self.running[-1])
        return [request for request in decodes if request.pages]
""",
    8: """
class SharedPages(SarathiServe):
    def plan_admission(self, request):
        left = 2 if len(request.tokens) > request.prompt_len else 1
        most = (len(request.tokens) - left) // self.pages.page_size
        cached = self.pages.match_prefix(request.page_hashes[:most])
        return Admission(cached, self.pages.needed(len(request.tokens)) - len(cached))
""",
    9: """
class BudgetForSLO(Predicts):
    def token_budget(self, decodes, prefills):
        if not decodes:
            return self.max_len
        shape = BatchShape.of_decodes(decodes)
        start = max([request.num_computed for request in prefills], default=0)
        length = 0
        while self.predict(shape.with_chunk(start, length + 1)) <= self.tbt_slo:
            length += 1
        return len(decodes) + length
""",
    10: """
class OneLongPrompt(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.decoding())
        while self.admit():
            pass
        shortest_first = sorted(self.prefilling(), key=lambda r: len(r.tokens) - r.num_computed)
        for request in shortest_first:
            batch.add(request)
        return batch
""",
}
WRONG = [  # (exercise, part of the solution, what takes its place, the message)
    (
        1,
        "if not self.running:",
        "if True:",
        "Nobody joins while anybody runs: you admit request 1",
    ),
    (
        1,
        "while self.admit():\n                pass",
        "self.admit()",
        "that fits is admitted at once",
    ),
    (
        1,
        "for request in self.running:",
        "for request in [r for r in self.running if not r.is_decoding] or self.running[:1]:",
        "Each running request is in each batch: yours lacks request",
    ),
    (
        1,
        "Batch()",
        "Batch(self.chunk)",
        "The load: at most . run, max_len = .*: enough for all(.|\n)*"
        "computes prompts whole: you cut that of request 0",
    ),
    (
        1,
        "while self.admit():",
        "while len(self.running) < 1 and self.admit():",
        "admitted at once",
    ),
    (
        2,
        "while self.admit():",
        "while not self.running and self.admit():",
        "admitted at once",
    ),
    (
        2,
        "while self.admit():\n            pass",
        "self.admit()",
        "admitted at once: request 1",
    ),
    (
        2,
        "Batch()",
        "Batch(self.chunk)",
        "computes prompts whole",
    ),
    (
        2,
        "for request in self.running:",
        "for request in self.prefilling() or self.running:",
        "Each running request is in each batch: yours lacks request 0",
    ),
    (
        3,
        "if not batch:",
        "if True:",
        "no prefill or no decode: yours has the prompt of request 1",
    ),
    (
        3,
        "while self.waiting",
        "while not self.decoding() and self.waiting",
        "Prompts come first: request 1 can be admitted, and your batch decodes",
    ),
    (
        3,
        "while self.waiting and len(self.waiting[0].tokens) <= batch.left:",
        "while batch.left > 0:",
        "computes prompts whole: you cut that of request",
    ),
    (
        3,
        "Batch(self.max_len)",
        "Batch()",
        r"at most max_len = \d+ tokens: yours have \d+",
    ),
    (
        3,
        "batch.add(request)",
        "batch.add(request)\n            break",
        "As many prompts as fit",
    ),
    (
        3,
        "self.decoding()",
        "self.decoding()[:1]",
        "A running decode never waits",
    ),
    (
        4,
        "start = request.num_computed",
        "start = 0",
        "starts at 1, not at 0",
    ),
    (
        4,
        "len(request.tokens) - start",
        "len(request.tokens) - start - 1",
        "as long as the budget and the prompt allow|are not used, and request 0 gets no token",
    ),
    (
        4,
        "self.left -= length",
        "pass",
        "share one budget, C = .* taken off what is left",
    ),
    (
        4,
        "self.left, ",
        "self.budget, ",
        "share one budget, C = .* taken off what is left",
    ),
    (
        4,
        "if length:",
        "if True:",
        "A chunk has at least one token: that of request",
    ),
    (
        4,
        "min(self.left, len(request.tokens) - start)",
        "self.left",
        "A chunk ends where the tok",
    ),
    (
        4,
        "return length",
        "pass",
        r"line \d+: ValueError: add.. returned None, and the batch got",
    ),
    (
        4,
        "self.left, len",
        "self.left - 1, len",
        "A chunk is as long|are not used",
    ),
    (
        5,
        "batch.add_decodes(self.decoding())",
        "batch.add_decodes(self.decoding()); batch.left = self.chunk",
        "The load: C = .*, at most(.|\n)*"
        "The budget is spent twice: the decodes have to be taken off",
    ),
    (
        5,
        "request = prefills[0] if prefills else self.admit()",
        "request = self.admit() or (prefills[0] if prefills else None)",
        "has begun comes before a new one: request 0 has begun and gets 0 tokens",
    ),
    (
        5,
        "                batch.add(request)",
        "                batch.add(request)\n"
        "            while batch.left > 0 and (r := self.admit()):\n"
        "                batch.add(r)",
        "a chunk of one prompt at most: yours of requests 0 and 1",
    ),
    (
        5,
        "if batch.left > 0:",
        "if not batch:",
        "What is left of the budget goes to prompts",
    ),
    (
        5,
        "if batch.left > 0:",
        "if True:",
        "once the budget is used up: request",
    ),
    (
        5,
        "self.decoding()",
        "self.decoding()[: self.chunk - 1]",
        "A running decode never waits",
    ),
    (
        6,
        "        for request in prefills:\n"
        "            batch.add(request)\n"
        "        while batch.left > 0:\n"
        "            request = self.admit()\n"
        "            if not request:\n"
        "                break\n"
        "            batch.add(request)\n",
        "        while batch.left > 0:\n"
        "            request = self.admit()\n"
        "            if not request:\n"
        "                break\n"
        "            batch.add(request)\n"
        "        for request in prefills:\n"
        "            batch.add(request)\n",
        "has begun comes before a new one: request 0 has begun",
    ),
    (
        6,
        "batch.add_decodes(decodes)",
        "batch.extend(Chunk(r, r.num_computed, 1) for r in decodes)",
        "The budget is spent twice",
    ),
    (
        6,
        "while batch.left > 0:",
        "while True:",
        "once the budget is used up: request",
    ),
    (
        6,
        "Batch(self.chunk)",
        "Batch(self.max_len)",
        "share one budget, C = ",
    ),
    (
        6,
        "            if not request:\n                break\n            batch.add(request)\n",
        "            if not request:\n"
        "                break\n"
        "            batch.add(request)\n"
        "            break\n",
        "admitted at once|goes to prompts",
    ),
    (
        3,
        "            if not request:\n                break\n",
        "",
        r"line \d+: this request is None: admit.. returned None, nobody fits",
    ),
    (
        3,
        "<= batch.left",
        "< batch.left",
        "As many prompts as fit share a batch, up to max_len = 12 tokens: request 2 fits",
    ),
    (
        3,
        "self.decoding()",
        "self.running",
        "is in the batch. Take the decodes from self.decoding.., which finds the pages.",
    ),
    (
        3,
        "        batch = Batch(self.max_len)",
        "        decodes = self.decoding()\n        batch = Batch(self.max_len)",
        "self.decoding.. takes pages: call it only if the batch decodes.",
    ),
    (
        3,
        "            batch.add(request)\n",
        "            batch.add(request)\n        for request in self.waiting:\n"
        "            if not batch: batch.add(request)\n",
        "was not admitted: only self.admit.. gives it memory",
    ),
    (
        4,
        "        length = max(0, min(self.left, len(request.tokens) - start))",
        "        if self.left == 0:\n            return 0\n"
        "        length = min(self.left, len(request.tokens) - start)",
        r"Where left is -1, .* yours returned -1, and added chunks of \[-1\] tokens",
    ),
    (
        4,
        "            self.left -= length",
        "            self.left -= length\n            request.num_computed += length",
        r"line \d+: it changes num_computed of request 0 from 0 to \d+: the engine does that",
    ),
    (
        4,
        "Chunk(request, start, length)",
        "Chunk(request, start, start + length)",
        "a Chunk is .request, start, length., not end",
    ),
    (
        4,
        "if length:",
        "if True:",
        "a chunk of 0 tokens",
    ),
    (
        6,
        "        decodes = self.decoding()\n        prefills = self.prefilling()\n",
        "        prefills = self.prefilling()\n        decodes = self.decoding()\n",
        "prefills still has it: call self.decoding.. before self.prefilling..",
    ),
    (
        6,
        "while batch.left > 0:",
        "while self.admit():\n            pass\n        for request in self.prefilling():\n"
        "            batch.add(request)\n        while batch.left > 0:",
        "two chunks in one batch",
    ),
    (
        7,
        "request.pages += page\n",
        "request.pages.append(page)\n",
        r"line \d+: request 0 has \[\d\] among its pages: .* so use `pages \+= \.\.\.`",
    ),
    (
        7,
        "return [request for request in decodes if request.pages]",
        "pass",
        r"line 6: decoding.. returned None: did you forget return\?",
    ),
    (
        7,
        "if request.is_decoding]",
        "]",
        "request 1, and it does not decode: ask request.is_decoding",
    ),
    (
        7,
        "while request.pages:",
        "while request in decodes:",
        "it does not decode",
    ),
    (
        8,
        "return Admission",
        "Admission",
        r"line 6: plan_admission.. returned None: did you forget return\?",
    ),
    (
        8,
        "Admission(cached, ",
        "Admission(len(cached), ",
        "must return Admission.list of pages, number.",
    ),
    (
        9,
        "return len(decodes) + length",
        "pass",
        r"line 6: token_budget.. returned None: did you forget return\?",
    ),
    (
        7,
        "self.running[-1]",
        "self.running[0]",
        "The newest pays: you preempt request 0, and",
    ),
    (
        7,
        "page = self.pages.allocate(1)",
        "page = None",
        "Nobody is preempted while a page is free",
    ),
    (
        7,
        "if request.pages]",
        "]",
        "has just been preempted, and your list of decodes still",
    ),
    (
        7,
        "if page:",
        "if True:",
        "TypeError: 'NoneType' object is not iterable",
    ),
    (
        7,
        "        for request in decodes:",
        "        for request in []:",
        "No token without a page",
    ),
    (
        7,
        "self.preempt(self.running[-1])",
        "return decodes[:1]",
        "newest is preempted|never waits",
    ),
    (
        7,
        "len(request.pages) * self.pages.page_size",
        "len(request.pages) * self.pages.page_size - 1",
        "gets the pages that it needs|No token without|Nobody is preempted",
    ),
    (
        7,
        "self.preempt(self.running[-1])",
        "self.preempt(request)",
        "The newest pays",
    ),
    (
        8,
        " else 1",
        " else 0",
        "The last token is always computed: the cached pages hold the one token of request",
    ),
    (
        8,
        "left = 2 if",
        "left = 1 if",
        "computes two tokens at least",
    ),
    (
        8,
        "- len(cached))",
        ")",
        "cached need not be allocated again",
    ),
    (
        8,
        " else 1",
        " else self.pages.page_size",
        "All pages that can be reused are reused",
    ),
    (
        8,
        "request.page_hashes[:most]",
        "[]",
        "All pages that can be reused are reused",
    ),
    (
        8,
        "self.pages.needed(len(request.tokens))",
        "self.pages.needed(request.prompt_len)",
        "gets the pages that it needs|can be|No token",
    ),
    (
        9,
        "return len(decodes) + length",
        "return self.chunk",
        "at most the SLO|is the largest",
    ),
    (
        9,
        "start = max([request.num_computed for request in prefills], default=0)",
        "start = 0",
        "Each of the .* tokens of request . attends to the .* before it",
    ),
    (
        9,
        "return len(decodes) + length",
        "return length",
        "the number of decodes: they are part of it, too",
    ),
    (
        9,
        "BatchShape.of_decodes(decodes)",
        "BatchShape()",
        "Its decodes take .* ms of them",
    ),
    (
        9,
        "return len(decodes) + length",
        "return len(decodes) + length + start // 2",
        "Later chunks of a prompt are smaller",
    ),
    (
        9,
        "length = 0",
        "length = 1",
        "predicted time is at most the SLO",
    ),
    (
        9,
        "return len(decodes) + length",
        "return self.chunk / 3",
        "token_budget=.*whole number",
    ),
    (
        10,
        "Batch(self.chunk)",
        "Batch(4 * self.chunk)",
        "P99 TBT is above its target",
    ),
    (
        10,
        "len(r.tokens) - r.num_computed)",
        "r.arrival)",
        "median short TTFT is above its target",
    ),
    (
        10,
        "            batch.add(request)",
        "            if request.prompt_len < 99 or not batch:\n                batch.add(request)",
        "long TTFT is above its target",
    ),
    (
        10,
        "batch.add_decodes(self.decoding())",
        "batch.add_decodes(self.decoding()[:1])",
        "rule that a batch has all decodes or none is broken",
    ),
]


OTHERS = {  # other solutions that are right, too
    7: """
class OutOfMemory(SarathiServe):
    def decoding(self):
        size = self.pages.page_size
        for request in reversed([r for r in self.running if r.is_decoding]):  # the newest first
            while request in self.running and request.num_computed == len(request.pages) * size:
                page = self.pages.allocate(1)
                if page is None:
                    self.preempt(max(self.running, key=lambda r: (r.arrival, r.id)))
                else:
                    request.pages.append(page[0])
        return [request for request in self.running if request.is_decoding]
""",
    9: SOLUTIONS[9].replace("return self.max_len", "return self.chunk"),
    10: SOLUTIONS[10].replace("len(r.tokens) - r.num_computed", "r.prompt_len > 500"),
}


def check(number, source, folder, capsys, *options):
    """(exit status, what is printed) for a solution."""
    file = folder / f"exercise_{number}.py"
    file.write_text(IMPORTS.strip() + "\n\n" + source.lstrip())
    status = main(parse_args([str(number), "--file", str(file), *options]))
    return status, capsys.readouterr().out


@pytest.mark.parametrize("number", NUMBERS)
def test_a_reference_passes_and_its_question_is_answered(number, tmp_path, capsys):
    status, text = check(number, SOLUTIONS[number], tmp_path, capsys)
    assert "it holds" in text and "The answer to the question: " in text
    assert status == 0


@pytest.mark.parametrize("number", OTHERS)
def test_another_right_solution_passes(number, tmp_path, capsys):
    assert OTHERS[number] != SOLUTIONS[number]
    status, text = check(number, OTHERS[number], tmp_path, capsys)
    assert status == 0, text


@pytest.mark.parametrize("number, old, new, message", WRONG)
def test_a_typical_mistake_is_named(number, old, new, message, tmp_path, capsys):
    source = SOLUTIONS[number]
    assert old in source
    status, text = check(number, source.replace(old, new), tmp_path, capsys)
    assert status == 1
    print(text)
    assert re.search(message, text)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.title)
def test_a_stub_fails_in_one_line(exercise, capsys):
    stub = exercise.file.read_text("utf-8")
    if "raise NotImplementedError" not in stub:
        pytest.skip("it is solved here")
    assert main(parse_args([str(exercise.number)])) == 1
    line = 1 + stub[: stub.index("raise NotImplementedError")].count("\n")
    name = exercise.file.relative_to(Path.cwd())
    assert capsys.readouterr().out == f"{name} line {line}: not written yet\n"


SCHEDULE = "class StallFree(SarathiServe):\n    def schedule(self):\n"
BROKEN = [  # (a solution of exercise 6, the line of it that is named, the message)
    (f"{SCHEDULE}        super().schedule()", 4, "schedule() returned None: did you forget"),
    (f"{SCHEDULE}        while True: pass", 5, "a loop without an end?"),
    (f"{SCHEDULE}        return [] [0]", 5, "IndexError: list index out of range"),
    (f"{SCHEDULE}        return list(super().schedule())", 4, "returned a list, and must"),
    (f"{SCHEDULE}        exit()", 5, "SystemExit"),
    (
        f"{SCHEDULE}        batch = super().schedule()\n"
        "        batch += batch\n        return batch",
        4,
        "request 0 has two chunks in one batch",
    ),
    (
        f"{SCHEDULE}        batch = super().schedule()\n"
        "        for request in self.running: request.num_computed += request.is_decoding\n"
        "        return batch",
        4,
        "it changes num_computed of request 0 from",
    ),
    (
        f"{SCHEDULE}        batch = super().schedule()\n        batch[0].request.tokens.append(3)\n"
        "        return batch",
        4,
        "it changes the tokens of request 0: only advance() appends one",
    ),
    (
        f"{SCHEDULE}        self.max_batch += 1\n        return super().schedule()",
        4,
        "it changes chunk, max_batch or max_len",
    ),
    ("class StallFree(SarathiServe:\n    pass", 3, "SyntaxError"),
    ("class StallFree(SarathiServe):\n    def __init__(self): pass", None, "TypeError"),
    (
        "class Other(SarathiServe): pass",
        None,
        ": no class StallFree(Scheduler) in it",
    ),
]


@pytest.mark.parametrize("source, line, message", BROKEN)
def test_a_solution_that_cannot_go_on_gets_one_line(source, line, message, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(f"from scheduler import SarathiServe\n\n{source}\n")
    assert main(parse_args(["6", "--file", str(file)])) == 1
    text = capsys.readouterr().out
    assert text.count("\n") == 1 and message in text
    assert text.startswith(f"{file} line {line}: " if line else str(file))


def test_no_page_is_written_where_no_batch_was_made(tmp_path, capsys):
    page = tmp_path / "blank.html"
    stub = f"{SCHEDULE}        raise NotImplementedError\n"
    for source in (stub, f"{SCHEDULE}        return Batch()\n"):
        status, text = check(6, source, tmp_path, capsys, "--html", str(page))
        assert status == 1 and not page.exists() and "To see it" not in text
        print(text)
        assert text.endswith("no page: the policy made no batch\n")


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    file = tmp_path / "none.py"
    assert main(parse_args(["6", "--file", str(file)])) == 1
    assert capsys.readouterr().out == f"{file}: there is no such file\n"


@pytest.mark.parametrize(
    "argv, message",
    [(["11"], "at most 10"), (["--hint"], "say which"), (["1", "--hint", "3"], "2")],
)
def test_a_wrong_command_line_ends_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_an_empty_batch_is_a_decision_that_differs(tmp_path, capsys):
    source = f"{SCHEDULE}        return Batch()\n"
    status, text = check(6, source, tmp_path, capsys)
    assert status == 1
    assert "| 0 <     | waits, prompt of 1 | waits    | admitted, token 0 |" in text
    assert "1 of C = 1 are not used, and request 0 gets no token" in text


def test_leaked_pages_are_found_where_both_decide_the_same(tmp_path, capsys):
    source = SOLUTIONS[6].replace("return batch", "self.pages.allocate(1)\n        return batch")
    status, text = check(6, source, tmp_path, capsys)
    assert status == 1
    assert "The rule that no page is leaked is broken: page 1 was allocated, and no running" in text
    assert "did you preempt the request that it was for?" in text and "request -" not in text


def test_all_are_listed_and_the_next_one_is_named(tmp_path, monkeypatch, capsys):
    for exercise in EXERCISES:
        file = tmp_path / f"{exercise.number}.py"
        file.write_text(IMPORTS + SOLUTIONS[exercise.number])
        monkeypatch.setitem(vars(exercise), "file", file)
    assert main(parse_args([])) == 0
    assert re.findall(r"(?m)^ +(\d+) .* solved$", capsys.readouterr().out) == [*map(str, NUMBERS)]
    stub = "raise NotImplementedError"
    solution = IMPORTS + SOLUTIONS[3]
    (tmp_path / "3.py").write_text(solution.replace("batch = Batch(self.max_len)", stub))
    wrong = SOLUTIONS[7].replace("self.running[-1]", "self.running[0]")
    (tmp_path / "7.py").write_text(IMPORTS + wrong)
    custom._run_file.cache_clear()
    assert main(parse_args([])) == 1
    text = capsys.readouterr().out
    assert re.search(r" 3  prompts first and alone +not written yet\n", text)
    assert re.search(r" 7  out of memory +not yet\n", text)
    assert text.count(" solved\n") == 8
    assert f"Next: {tmp_path}/3.py. " in text and "`python -m exercises 3`" in text


@pytest.mark.parametrize("number", NUMBERS)
def test_there_are_two_hints_and_a_docstring_with_all_parts(number, capsys):
    hints = []
    for step in ("1", "2"):
        assert main(parse_args([str(number), "--hint", step])) == 0
        hints.append(capsys.readouterr().out)
    assert main(parse_args([str(number), "--hint"])) == 0
    assert capsys.readouterr().out == hints[0] != hints[1]
    text = EXERCISES[number - 1].file.read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    parts = [f"Exercise {number}. ", "Source: ", "**Idea.**", "**Stays true.**", "**Predict.**"]
    places = [docstring.index(part) for part in [*parts, "**You may use**"]]
    assert places == sorted(places)
    idea = docstring.partition("**Idea.**")[2].partition("\n\n")[0]
    assert 5 <= len(re.findall(r"[.:?](?= |\n|$)", idea)) <= 9


ANSWERS = {  # found by hand
    1: "in iteration 31. Request 0 ended in iteration 2, request 1 in 30;",
    2: "in iteration 3. Request 0 ended in iteration 2, request 1 in 30;",
    3: "3 iterations. More prompts",
    4: "3 iterations, with chunks of 16, then 4 + 12, then 8 tokens.",
    5: "4 iterations, of 10, 10, 10, 10 tokens of the prompt.",
    6: "2 iterations: ",
    7: "1 preemption. Request 0 ends in iteration 16, ",
    8: "4: ",
    9: "the chunks have 29, ",
}


@pytest.mark.parametrize("number", ANSWERS)
def test_the_answer_to_a_question_is_the_one_found_by_hand(number, tmp_path, capsys):
    status, text = check(number, SOLUTIONS[number], tmp_path, capsys)
    assert f"The answer to the question: {ANSWERS[number]}" in text


def test_shrinking_leaves_only_what_makes_a_load_fail():
    load = random_load(Random("a load"), size=1.0)
    assert len(load.requests) > 3

    def fails(load):
        return any(r.prompt_len >= 7 and r.output_len >= 2 for r in load.requests)

    smallest = shrink(load, fails)
    assert smallest.requests == (LoadRequest(arrival=0, prompt_len=7, output_len=2),)
    assert (smallest.chunk, smallest.max_batch, smallest.pages) == (1, 1, MAX_PAGES)

    def fails_in_little_memory(load):
        return load.pages <= MAX_PAGES // 2

    tight = replace(load, pages=-(-load.max_len // 8), page_size=8)
    smallest = shrink(tight, fails_in_little_memory)
    assert smallest.pages == 1 and smallest.max_len == 2


def test_the_loads_go_from_tiny_to_tight():
    loads = list(small_loads(6))
    assert len(loads[0].requests) == 2 and max(len(load.requests) for load in loads) == 8
    assert {load.chunk for load in loads} >= {1, 2, 20}
    trials = [Trial(SarathiServe, load) for load in loads]
    for trial in trials:
        trial.run()
    preempting = sum(any(it.preempted for it in trial.iterations) for trial in trials)
    assert preempting >= 10
    assert any(it.waiting for trial in trials for it in trial.iterations)


@pytest.mark.parametrize("number, old, new", [row[:3] for row in WRONG if row[0] in (4, 6, 9, 10)])
def test_a_page_can_be_drawn_of_every_difference(number, old, new, tmp_path, capsys):
    page = tmp_path / "difference.html"
    source = SOLUTIONS[number].replace(old, new)
    status, text = check(number, source, tmp_path, capsys, "--html", str(page))
    assert status == 1
    if text.endswith("no page: the policy made no batch\n"):
        assert not page.exists()
        return
    assert f"wrote {page}, open file://" in text
    runs = page.read_text("utf-8").partition('"runs":')[2]
    assert re.findall(r'"name": "([\w-]+)"', runs) in (
        ["yours", "reference"],
        ["yours", "sarathi-serve"],
        ["yours", "orca"],  # an error has no load: the page is that of the question
        ["yours", "vllm"],
    )


def test_the_page_shows_both_decisions_in_the_iteration_that_was_named(browser, tmp_path, capsys):
    page = tmp_path / "difference.html"
    old, new = next(row[1:3] for row in WRONG if row[0] == 5 and "before a new one" in row[3])
    status, text = check(5, SOLUTIONS[5].replace(old, new), tmp_path, capsys, "--html", str(page))
    iteration = int(re.search(r"iteration (\d+)\.", text)[1])
    with opened(browser, f"file://{page}") as tab:
        chunks = "k => panes.map(pane => pane.run.iterations[k].chunks)"
        yours, reference = tab.evaluate(chunks, iteration - 1)
        assert tab.text_content("#position").startswith(f"iteration {iteration} of ")
    assert yours != reference
    (row,) = re.findall(r"(?m)^\| 0 <.*\| +(\S.*?) +\| +(\S.*?) +\|$", text)
    assert row[1] == f"token {reference[0][1]}"


def test_no_exercise_needs_torch(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(IMPORTS + SOLUTIONS[6])
    argv = ["6", "--file", str(file), "--html", str(tmp_path / "page.html")]
    code = f"""
import sys
from exercises.__main__ import main, parse_args
main(parse_args({argv}))
main(parse_args([]))
print(sorted({{"torch", "numpy", "matplotlib"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stderr == "" and run.stdout.endswith("\n[]\n")


def test_the_program_exits_with_the_status_of_the_check(tmp_path):
    file = tmp_path / "mine.py"
    for source, status in ((SOLUTIONS[1], 0), (SOLUTIONS[1].replace("if not", "if"), 1)):
        file.write_text(IMPORTS + source)
        argv = [sys.executable, "-m", "exercises", "1", "--file", str(file)]
        assert subprocess.run(argv, cwd=ROOT, capture_output=True).returncode == status
