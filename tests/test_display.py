"""HTML of layouts and answers: escaped, capped, well-formed, with the offsets of the prompt."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from lazy_rag.answer import Answer, Receipt, Source
from lazy_rag.display import MAX_PARTS, MAX_TEXT, answer_html, layout_html, receipt_html, runtime_html, stats_html
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, LayoutBuilder, PromptLayout
from lazy_rag.requests import ChunkUse, Times
from lazy_rag.stats import Stats
from lazy_rag.tools import ToolCall

HOSTILE = "</div></style><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"
ALLOWED = {
    "svg",
    "rect",
    "title",
    "div",
    "style",
    "span",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "code",
    "details",
    "summary",
    "b",
}
PREFIX = Chunk(ChunkId("f" * 40), tuple(range(24)), 0)
A = Chunk(ChunkId("a1" * 20), tuple(range(100)), 24)
B = Chunk(ChunkId("b2" * 20), tuple(range(50)), 24)


class _Checker(HTMLParser):
    """Every tag closed in order; what stands in attributes and in text is kept."""

    VOID = frozenset(("br", "img", "hr", "meta", "link", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def parse(html: str) -> _Checker:
    checker = _Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    names = {tag for tag, _ in checker.tags}
    assert not names & {"script", "img", "link", "iframe", "object"}
    for _, attributes in checker.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
    assert "url(" not in html
    assert "@import" not in html
    return checker


def bar_parts(checker: _Checker) -> list[dict[str, str | None]]:
    return [attributes for _, attributes in checker.tags if attributes.get("class") == "lr-part"]


def texts(checker: _Checker) -> str:
    return " ".join(data for tag, data in checker.texts if tag != "style")


def layout() -> PromptLayout:
    """Prefix 0-23, chunk 1 24-123, live 124-133, chunk 2 134-183, live 184-213."""
    builder = LayoutBuilder(PREFIX, 16).segment(PREFIX).segment(A).live(range(10)).segment(B).live(range(30))
    return builder.build()


def answer(prompt: PromptLayout, text: str = "Forty-two.", *, tier: str = "host", source: str = "text") -> Answer:
    segments = prompt.segments
    uses = tuple(ChunkUse(s.chunk_id, s.offset, s.start, s.length, tier if s.offset else "host") for s in segments)
    chunk_tokens = sum(s.length for s in segments)
    receipt = Receipt(
        uses, chunk_tokens, 0, prompt.live_tokens, prompt.repaired_tokens, 5, Times(0.01, 0, 0, 0.1, 0.2, 1.0)
    )
    ids = dict.fromkeys(s.chunk_id for s in segments if s.chunk_id != PREFIX.id)
    sources = tuple(Source(i, source, 0.75, "guide.md", {"file_name": "guide.md"}) for i in ids)
    return Answer(text, sources, receipt, "stop", {}, prompt.dropped, None, (), prompt)


def test_bar_shows_every_item_with_its_true_share_and_offset() -> None:
    checker = parse(layout_html(layout()))
    parts = bar_parts(checker)
    assert [part["style"] for part in parts] == [f"flex-grow:{n}" for n in (24, 100, 10, 50, 30)]
    ticks = [data for tag, data in checker.texts if data.isdigit()]
    assert {"0", "24", "124", "134", "184", "214"} - set(ticks) <= {"134"}  # 134 stands too close to 124
    titles = [str(part["title"]) for part in parts]
    assert titles[1].startswith("chunk 1 (a1a1a1a1a1a1) at positions 24 to 123, 100 tokens")
    assert titles[2].startswith("live run at positions 124 to 133, 10 tokens")
    assert "delta +110" in titles[3]
    assert "214 tokens" in texts(checker)
    assert "174 in 3 segments" in texts(checker)


def test_narrow_parts_stay_visible() -> None:
    builder = LayoutBuilder(None, 16).segment(Chunk(ChunkId("c" * 40), tuple(range(3000)), 0)).live([1])
    html = layout_html(builder.build())
    assert bar_parts(parse(html))[1]["style"] == "flex-grow:1"
    assert re.search(r"\.lr-part\{min-width:\d+px", html)


@pytest.mark.parametrize(
    ("tier", "legend"), [("gpu", "found in memory"), ("disk", "loaded from disk"), ("encoded", "encoded now")]
)
def test_tiers_have_their_own_legend_entry(tier: str, legend: str) -> None:
    text = texts(parse(answer_html(answer(layout(), tier=tier))))
    assert legend in text
    others = {"loaded from disk", "encoded now"} - {legend}
    assert not [other for other in others if f" {other} " in text]


def test_repaired_runs_are_marked() -> None:
    prompt = LayoutBuilder(None, 16).live(range(16), repaired=16).segment(A, 16).live([1, 2]).build()
    checker = parse(layout_html(prompt))
    assert "repaired" in texts(checker)
    assert "16 of them repeat" in str(bar_parts(checker)[0]["title"])


def test_answer_shows_text_receipt_and_sources() -> None:
    checker = parse(answer_html(answer(layout(), "two\n  lines")))
    text = texts(checker)
    assert ("div", "two\n  lines") in checker.texts
    assert "white-space:pre-wrap" in answer_html(answer(layout()))
    for expected in (
        "174 reused",
        "0 encoded",
        "40 live",
        "100% of chunk tokens",
        "first token 210 ms",
        "guide.md",
        "0.75",
    ):
        assert expected in text
    rows = [tag for tag, _ in checker.tags if tag == "tr"]
    assert len(rows) == 1 + 3  # head, prefix, two chunks


def test_hostile_text_stays_text() -> None:
    prompt = layout()
    made = answer(prompt, HOSTILE, source=HOSTILE + "x" * 200)
    made.sources[0].metadata["file_name"] = HOSTILE
    evil_id = ChunkId("<b>\"'" + "e" * 36)
    prompt_with_id = LayoutBuilder(None, 16).segment(Chunk(evil_id, tuple(range(64)), 0)).live([1]).build([evil_id])
    for html in (answer_html(made), layout_html(prompt_with_id), answer_html(answer(prompt_with_id, tier="<i>"))):
        checker = parse(html)
        assert "<script" not in html
        assert html.count("<style>") == html.count("</style>") == 1
        assert {tag for tag, _ in checker.tags} <= ALLOWED
    assert HOSTILE in texts(parse(answer_html(made)))


def test_calls_are_shown_where_there_is_no_text() -> None:
    calls = (ToolCall("add", {"a": 1, "b": "<i>é"}), ToolCall("stop", {}))
    checker = parse(answer_html(replace(answer(layout(), ""), tool_calls=calls)))
    assert ("div", 'add({"a": 1, "b": "<i>é"})\nstop({})') in checker.texts


def test_long_texts_are_cut_and_say_so() -> None:
    html = answer_html(answer(layout(), "y" * (MAX_TEXT + 7), source="z" * (MAX_TEXT + 123)))
    text = texts(parse(html))
    assert "(7 more characters)" in text
    assert "(123 more characters)" in text
    assert max(map(len, re.findall("y+", html))) == MAX_TEXT
    assert max(map(len, re.findall("z+", html))) == MAX_TEXT
    assert "more characters" not in texts(parse(answer_html(answer(layout(), "y" * MAX_TEXT))))


def test_many_parts_are_cut_and_say_so() -> None:
    builder = LayoutBuilder(None, 16)
    for _ in range(100):
        builder.segment(B).live([1])
    prompt = builder.build(ChunkId(f"{i:040x}") for i in range(MAX_PARTS + 5))
    checker = parse(layout_html(prompt))
    parts = bar_parts(checker)
    assert len(parts) == MAX_PARTS
    shown = sum(int(str(part["style"]).removeprefix("flex-grow:")) for part in parts)
    assert shown == len(prompt)
    assert str(parts[-1]["title"]).startswith(f"{200 - MAX_PARTS + 1} more parts at positions")
    assert "and 5 more" in texts(checker)
    table = parse(answer_html(answer(prompt)))
    assert len([tag for tag, _ in table.tags if tag == "tr"]) == 1 + MAX_PARTS + 1
    assert "40 more" in texts(table)


def test_objects_render_themselves() -> None:
    made: Any = answer(layout())
    assert made._repr_html_() == answer_html(made)
    assert made.layout._repr_html_() == layout_html(made.layout)


def test_sources_without_score_or_document() -> None:
    made = answer(layout())
    bare = SimpleNamespace(**{**vars(made), "sources": (Source(A.id, "short"),)})
    text = texts(parse(answer_html(bare)))  # type: ignore[arg-type]
    assert "short" in text
    assert "None" not in text


def shares(checker: _Checker) -> list[list[float]]:
    """The widths of the parts of each bar, in percent."""
    bars: list[list[float]] = []
    for tag, attributes in checker.tags:
        if tag == "svg":
            bars.append([])
        elif tag == "rect":
            bars[-1].append(float(str(attributes["width"])))
    return bars


def test_receipt_shows_where_tokens_came_from_and_time_went() -> None:
    uses = tuple(ChunkUse(A.id, 24 + 100 * i, 0, 100, tier) for i, tier in enumerate(("gpu", "disk", "encoded")))
    receipt = Receipt(uses, 200, 100, 100, 0, 5, Times(0.010, 0.020, 0.030, 0.040, 0.1, 0.8))
    checker = parse(receipt_html(receipt))
    tokens, times = shares(checker)
    assert tokens == pytest.approx([50, 25, 25], abs=0.01)
    # retrieve, queue, encode, prefill, what is left of the first token's time, decode
    assert times == pytest.approx([100 * t / 0.91 for t in (0.01, 0.02, 0.03, 0.04, 0.01, 0.8)], abs=0.01)
    text = texts(checker)
    for expected in ("200", "67% of chunk tokens", "800 ms", "5 tokens generated", "encoded now", "disk"):
        assert expected in text
    assert receipt._repr_html_() == receipt_html(receipt)


def test_receipt_of_nothing_and_of_much() -> None:
    empty = parse(receipt_html(Receipt((), 0, 0, 0, 0, 0, Times())))
    assert shares(empty) == [[100.0], [100.0]]
    use = ChunkUse(ChunkId("<script>" + "e" * 32), 0, 0, 1, "<i>")
    checker = parse(receipt_html(Receipt((use,) * (MAX_PARTS + 9), 1, 0, 0, 0, 0, Times())))
    assert len([tag for tag, _ in checker.tags if tag == "tr"]) == 1 + MAX_PARTS + 1
    assert "9 more" in texts(checker)
    assert {tag for tag, _ in checker.tags} <= ALLOWED


@pytest.mark.parametrize(("name", "shown"), [("", False), ("#2", False), ("guide", True)])
def test_a_document_without_an_id_is_not_called_after_its_chunk(name: str, shown: bool) -> None:
    made = answer(layout())
    called = name if shown else A.id + name
    bare = SimpleNamespace(**{**vars(made), "sources": (Source(A.id, "short", 0.5, called),)})
    assert ("<b>" in answer_html(bare)) == shown  # type: ignore[arg-type]


def test_what_is_nothing_has_no_place_in_a_legend() -> None:
    receipt = Receipt((), 15, 0, 5, 0, 0, Times(decode=0.5))
    text = texts(parse(receipt_html(receipt)))
    assert "reused 15" in text and "decode 500 ms" in text
    assert not any(word in text for word in ("encoded", "of earlier live text", "retrieve", "queue"))


def stats(**values: int) -> Stats:
    names = Stats.__dataclass_fields__
    return Stats(**{**dict.fromkeys(names, 0), **values})


def test_stats_show_the_pool_and_the_hits() -> None:
    made = stats(pages=100, pages_free=25, page_bytes=1 << 20, chunk_hits=3, chunk_misses=1, documents=1)
    checker = parse(stats_html(made))
    pool, hits, _ = shares(checker)
    assert pool == [75, 25]
    assert hits == [75, 25]
    text = texts(checker)
    for expected in ("100.0 MiB", "75.0 MiB", "75% found", "1 document"):
        assert expected in text
    assert made._repr_html_() == stats_html(made)
    parse(stats_html(stats()))


def test_runtime_shows_what_it_is_made_of() -> None:
    about = {"model": HOSTILE, "state": "open"}
    made: Any = SimpleNamespace(about=lambda: about, closed=False, stats=stats(pages=2))
    checker = parse(runtime_html(made))
    assert HOSTILE in texts(checker)
    assert {tag for tag, _ in checker.tags} <= ALLOWED
    assert len(shares(checker)) == 3
    made.closed, made.stats = True, None
    assert shares(parse(runtime_html(made))) == []
