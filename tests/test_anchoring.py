"""Chunks found verbatim in prompts: against a brute-force search, in every kind of overlap, and how long it takes."""

from __future__ import annotations

import random
import threading
import time
import unicodedata
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazy_rag import anchoring
from lazy_rag.anchoring import Anchor, Anchors
from lazy_rag.errors import ConfigError


def inside_word(text: str, place: int) -> bool:
    around = text[place - 1 : place + 1] if place else ""
    return len(around) == 2 and all(c.isalnum() and ord(c) < 0x2E80 for c in around)


def brute_force(chunks: dict[str, str], text: str) -> list[Anchor]:
    """Leftmost, then longest, tried at every place with every chunk."""
    found, place = [], 0
    while place < len(text):
        here = [
            (-len(chunk), chunk_id)
            for chunk_id, chunk in chunks.items()
            if text.startswith(chunk, place)
            and not inside_word(text, place)
            and not inside_word(text, place + len(chunk))
        ]
        if here:
            length, chunk_id = min(here)
            found.append(Anchor(place, place - length, chunk_id))
            place -= length
        else:
            place += 1
    return found


def filled(chunks: dict[str, str], namespace: str = "") -> Anchors:
    anchors = Anchors()
    for chunk_id, text in chunks.items():
        anchors.add(chunk_id, text, namespace)
    return anchors


WORDS = st.lists(
    st.sampled_from(["a", "b", "ab", "aa", " ", " ", "\n", "\r\n", "é", "e\u0301", "中", "."]), max_size=40
)
TEXT = WORDS.map("".join)


@given(st.lists(TEXT.map(str.strip).filter(bool), max_size=12), TEXT, st.randoms(use_true_random=False))
@example(["a" * 17, "a" * 16, "a"], "a" * 40, random.Random(0))
@settings(max_examples=400, deadline=None)
def test_finds_exactly_what_a_brute_force_search_finds(texts: list[str], noise: str, rng: random.Random) -> None:
    chunks = {f"c{i:02}": text for i, text in enumerate(texts)}
    pieces = [noise, *texts, *rng.sample(texts, len(texts) // 2)]
    rng.shuffle(pieces)
    prompt = rng.choice(["", " ", "\n\n"]).join(pieces)
    assert filled(chunks).find(prompt) == brute_force(chunks, prompt)


@given(st.lists(TEXT.map(str.strip).filter(bool), min_size=1, max_size=10), st.data())
@settings(max_examples=150, deadline=None)
def test_removed_chunks_are_forgotten_and_the_others_stay(texts: list[str], data: st.DataObject) -> None:
    chunks = {f"c{i:02}": text for i, text in enumerate(texts)}
    anchors = filled(chunks)
    gone = data.draw(st.sets(st.sampled_from(sorted(chunks))))
    anchors.remove(gone)
    rest = {chunk_id: text for chunk_id, text in chunks.items() if chunk_id not in gone}
    prompt = " ".join(texts)
    assert anchors.find(prompt) == brute_force(rest, prompt)
    assert len(anchors) == len(rest)


def test_nested_overlapping_repeated_and_near_identical_chunks() -> None:
    chunks = {
        "long": "The tower is 330 m high. It was built in 1889.",
        "inner": "It was built in 1889.",
        "near": "The tower is 331 m high. It was built in 1889.",
        "tail": "1889. Then came the bridge.",
    }
    anchors = filled(chunks)

    def ids(prompt: str) -> list[str]:
        return [anchor.chunk_id for anchor in anchors.find(prompt)]

    assert ids(chunks["long"] + " Then came the bridge.") == ["long"]
    assert ids(f"{chunks['near']}\n\n{chunks['long']}\n\n{chunks['long']}") == ["near", "long", "long"]
    assert ids("The tower is 332 m high. It was built in 1889.") == ["inner"]
    assert ids("x" + chunks["inner"]) == []
    assert ids("It was built in 1889") == []


def test_unicode_forms_and_line_ends_match_exactly_or_not_at_all() -> None:
    composed = "Le café était fermé.\nOn revient demain."
    decomposed = unicodedata.normalize("NFD", composed)
    windows = composed.replace("\n", "\r\n")
    assert len({composed, decomposed, windows}) == 3
    anchors = filled({"composed": composed})
    assert [a.chunk_id for a in anchors.find(f"> {composed} <")] == ["composed"]
    assert anchors.find(f"> {decomposed} <") == []
    assert anchors.find(f"> {windows} <") == []
    anchors.add("decomposed", decomposed)
    anchors.add("windows", windows)
    found = anchors.find(f"{windows} {composed} {decomposed}")
    assert [a.chunk_id for a in found] == ["windows", "composed", "decomposed"]


def test_a_chunk_is_not_found_inside_a_word_except_where_words_have_no_spaces() -> None:
    anchors = filled({"cat": "cat", "han": "缓存保存键"})
    assert anchors.find("concatenate cats, copycat") == []
    assert anchors.find("(cat)") == [Anchor(1, 4, "cat")]
    assert anchors.find("请看缓存保存键和值") == [Anchor(2, 7, "han")]


def test_namespaces_do_not_see_each_other() -> None:
    anchors = Anchors()
    anchors.add("one", "A text of the first tenant.", "first")
    anchors.add("two", "A text of the second tenant.", "second")
    prompt = "A text of the first tenant. A text of the second tenant."
    assert [a.chunk_id for a in anchors.find(prompt, "first")] == ["one"]
    assert [a.chunk_id for a in anchors.find(prompt, "second")] == ["two"]
    assert anchors.find(prompt, "third") == []
    anchors.remove(["one"], "second")
    assert anchors.find(prompt, "first")


def test_the_same_text_under_two_ids_is_one_place_and_survives_one_removal() -> None:
    anchors = filled({"b": "One and the same text.", "a": " One and the same text.\n"})
    prompt = "…One and the same text."
    assert anchors.find(prompt) == [Anchor(1, 23, "a")]
    anchors.remove(["a", "unknown"])
    assert anchors.find(prompt) == [Anchor(1, 23, "b")]
    anchors.add("b", "Another text.")
    assert anchors.find(prompt) == []


def test_a_text_without_content_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Anchors().add("x", " \n")


def test_many_threads_add_remove_and_find() -> None:
    anchors = filled({"stays": "This chunk stays where it is."})
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(150):
                text = f"Chunk {i} of thread {number}, with its own words."
                anchors.add(f"{number}-{i}", text)
                ids = [a.chunk_id for a in anchors.find(f"{text} This chunk stays where it is.")]
                assert ids == [f"{number}-{i}", "stays"]
                if i % 2:
                    anchors.remove([f"{number}-{i}"])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(anchors) == 1 + 4 * 75


def test_a_beginning_that_stands_everywhere_costs_no_seconds() -> None:
    anchors = Anchors()
    for number in range(20):
        anchors.add(f"c{number}", "- " * (300 + number) + "end")
    prompt = "- " * 12_000
    started = time.perf_counter()
    assert anchors.find(prompt) == []
    assert time.perf_counter() - started < 1  # with a digest at every place it was two seconds
    found = anchors.find(prompt + "end of it")
    assert [(a.stop - a.start, a.chunk_id) for a in found] == [(2 * 319 + 3, "c19")]


RUNS = st.lists(st.tuples(st.sampled_from("-x. "), st.integers(1, 40)), min_size=1, max_size=5).map(
    lambda runs: "".join(letter * count for letter, count in runs).strip() or "-"
)


@given(st.lists(RUNS, min_size=1, max_size=25), st.data())
@settings(max_examples=150, deadline=None)
def test_runs_are_found_as_a_brute_force_search_finds_them(texts: list[str], data: st.DataObject) -> None:
    """With so many places of one beginning that all the ways of ruling places out are taken."""
    chunks = {f"c{i:02}": text for i, text in enumerate(texts)}
    letter = data.draw(st.sampled_from("-. "))
    prompt = letter * 400 + data.draw(st.sampled_from(texts)) + letter * 20 + data.draw(RUNS)
    assert filled(chunks).find(prompt) == brute_force(chunks, prompt)


def log_line(number: int) -> str:
    return f"2026-11-30 12:00:00 INFO request number {number % 7} was answered in 10 ms; there is nothing to be done.\n"


REPETITIVE = {
    "runs in a run": ([("-" * (500 + i)) for i in range(300)], "-" * 200_000, 250),
    "ends that never come": ([("-" * (500 + i) + "end") for i in range(300)], "-" * 200_000, 0),
    "something in the middle": ([("-" * (200 + i) + "x" + "-" * (200 + i)) for i in range(300)], "-" * 200_000, 0),
    "beginnings of some, ends of others": (
        [text for i in range(300) for text in ("-" * (600 + i) + "x", "y" + "-" * (600 + i))],
        "-" * 200_000,
        0,
    ),
    "runs of letters": ([("a" * (500 + i)) for i in range(300)], "a" * 200_000, 0),
    "short runs": ([("-" * i) for i in range(1, 65)], "-" * 200_000, 3125),
    "longer than the text": (["-" * 60_000], "-" * 50_000, 0),
    "near-identical lines": (
        ["".join(map(log_line, range(i, i + 9))) for i in range(500)],
        "".join(map(log_line, range(2000))),
        222,
    ),
    "one header": (
        ["HEADER " * 100 + "body " * (20 + i % 280) + str(i) for i in range(3000)],
        ("HEADER " * 100 + "body " * 200) * 117,
        0,
    ),
}


@pytest.mark.parametrize("name", REPETITIVE)
def test_repetitive_texts_take_work_in_proportion_to_their_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took between one second and three minutes when every length was tried at every place."""
    texts, prompt, count = REPETITIVE[name]
    anchors = filled({f"c{i:04}": text for i, text in enumerate(texts)})
    work = {"places": 0, "lengths": 0, "digested": 0}
    digest, consistent = anchoring._digest, anchoring._Windows._consistent

    def counted_digest(text: str) -> bytes:
        work["digested"] += len(text)
        return digest(text)

    def counted(self: Any, place: int, head: int, entries: list[tuple[int, int]], fitting: int) -> Iterable[int]:
        work["places"] += 1
        work["lengths"] += fitting
        return consistent(self, place, head, entries, fitting)

    monkeypatch.setattr(anchoring, "_digest", counted_digest)
    monkeypatch.setattr(anchoring._Windows, "_consistent", counted)
    found = anchors.find(prompt)
    assert len(found) == count
    known = {text.strip() for text in texts}
    assert all(prompt[anchor.start : anchor.stop] in known for anchor in found)
    assert work["digested"] == sum(anchor.stop - anchor.start for anchor in found)  # what is found, and nothing else
    assert work["places"] <= len(prompt) and work["lengths"] <= 2 * len(prompt)


def test_time_does_not_grow_with_the_number_of_chunks() -> None:
    """The benchmark (`python -m benchmarks.anchoring`) measures 1 ms; here is room for a busy machine."""
    from benchmarks.anchoring import corpus, prompt_of

    texts = corpus(5_000)
    anchors = filled({f"c{i}": text for i, text in enumerate(texts)})
    prompt = prompt_of(texts[:20], 24_000)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        found = anchors.find(prompt)
        times.append(time.perf_counter() - started)
    assert [a.chunk_id for a in found] == [f"c{i}" for i in range(20)]
    assert sorted(times)[7] < 0.005
