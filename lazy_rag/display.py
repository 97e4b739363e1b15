"""Prompts, answers, receipts and the state of a runtime as HTML for notebooks: self-contained, no scripts, nothing
loaded from elsewhere.

The offset bar shows a prompt from its first to its last position: one part for each segment and live run, as wide as it
has tokens (but never too narrow to be seen), coloured by where its KV came from. The colours are mid-tones and the text
takes the page's own colour, so that both light and dark pages work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from lazy_rag.documents import is_unnamed
from lazy_rag.layout import LiveRun, PromptLayout, Segment

if TYPE_CHECKING:
    from lazy_rag.answer import Answer, Receipt, Source
    from lazy_rag.requests import ChunkUse
    from lazy_rag.runtime import Runtime
    from lazy_rag.stats import Stats

MAX_PARTS = 60  # of a bar; also rows of the table
MAX_TEXT = 2000  # characters of one text
_EXCERPT = 90  # characters of a source that stand in the table while it is folded
_CHARACTER_SHARE = 0.011  # share of the bar that a character of a label takes; a part too narrow has none inside
_TICK_SHARE = 0.05  # share of the bar that must lie between two offset labels

_GREY = "#737a85"

# kind of a part → (what the legend says, CSS background)
_KINDS = {
    "cached": ("segment of a chunk", "#1f6fb2"),
    "memory": ("found in memory", "#1d7a55"),
    "disk": ("loaded from disk", "#1f6fb2"),
    "encoded": ("encoded now", "repeating-linear-gradient(135deg,#b3541e 0 6px,#c4682f 6px 12px)"),
    "live": ("live", "#737a85"),
    "repaired": ("repaired (live)", "repeating-linear-gradient(45deg,#7d4fa3 0 6px,#8f63b3 6px 12px)"),
    "more": ("not shown one by one", "#5d636c"),
}
_TIER_KINDS = {"gpu": "memory", "host": "memory", "disk": "disk", "encoded": "encoded"}

_STYLE = """
.lazy-rag{color:inherit;font:13px/1.5 system-ui,sans-serif;max-width:60rem;text-align:left}
.lazy-rag .lr-text{white-space:pre-wrap;overflow-wrap:anywhere;font-size:15px;border-left:3px solid #1d7a55;
 padding:.1em 0 .1em .8em;margin:0 0 .9em}
.lazy-rag .lr-bar{display:flex;gap:1px;align-items:flex-start;margin:.3em 0 .2em}
.lazy-rag .lr-part{min-width:3px;flex-basis:0;position:relative}
.lazy-rag .lr-fill{height:26px;line-height:26px;border-radius:2px;color:#fff;font-size:11px;font-weight:600;
 text-align:center;overflow:hidden;white-space:nowrap}
.lazy-rag .lr-tick{height:1.6em;font-size:11px;opacity:.75;white-space:nowrap;width:0;overflow:visible;
 font-variant-numeric:tabular-nums}
.lazy-rag .lr-end{min-width:2.6em;padding-top:26px}
.lazy-rag .lr-legend,.lazy-rag .lr-facts{display:flex;flex-wrap:wrap;gap:.15em 1.2em;margin:.2em 0 .7em}
.lazy-rag .lr-legend{font-size:12px}
.lazy-rag .lr-key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;
 vertical-align:-.05em}
.lazy-rag table{border-collapse:collapse;width:100%;margin:.3em 0 .7em;font-size:12px;color:inherit}
.lazy-rag th,.lazy-rag td{text-align:left;vertical-align:top;padding:.3em .8em .3em 0;background:none;
 border:0;border-bottom:1px solid rgba(128,128,128,.35);color:inherit}
.lazy-rag table.lr-narrow{width:auto}
.lazy-rag th{font-weight:600;white-space:nowrap}
.lazy-rag .lr-n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.lazy-rag .lr-tier{white-space:nowrap}
.lazy-rag code{font:12px ui-monospace,monospace;background:none;color:inherit;padding:0}
.lazy-rag summary{cursor:pointer;overflow-wrap:anywhere}
.lazy-rag .lr-full{white-space:pre-wrap;overflow-wrap:anywhere;margin:.4em 0;padding-left:.8em;
 border-left:2px solid rgba(128,128,128,.5)}
.lazy-rag .lr-dim{opacity:.75}
.lazy-rag svg{display:block;width:100%;height:14px;border-radius:2px;margin:.2em 0}
.lazy-rag .lr-head{font-weight:600;margin:.5em 0 .1em}
@media (prefers-color-scheme:dark){.lazy-rag .lr-fill{box-shadow:inset 0 0 0 1px rgba(255,255,255,.18)}}
""".strip()


@dataclass(frozen=True)
class _Part:
    """One piece of the bar: `length` tokens from position `offset`."""

    kind: str
    offset: int
    length: int
    label: str
    title: str


def layout_html(layout: PromptLayout) -> str:
    """The offset bar of a prompt that has not run: what would come from a cache, and what is live."""
    facts = [
        f"{len(layout)} tokens",
        f"{len(layout) - layout.live_tokens} in {_count(len(layout.segments), 'segment')}",
        f"{layout.live_tokens} live" + (f", {layout.repaired_tokens} of them repaired" * bool(layout.repaired_tokens)),
    ]
    return _page(_bar(_parts(layout, (), ())), _facts(facts), _dropped(layout.dropped))


def answer_html(answer: Answer) -> str:
    """An answer with its offset bar, its sources and its receipt."""
    return _page(
        f'<div class="lr-text">{escape(_capped(answer.text or _calls(answer)))}</div>',
        _bar(_parts(answer.layout, answer.receipt.chunks, answer.sources)),
        _facts(_receipt_facts(answer.receipt, answer.finish_reason)),
        _table(answer),
        _dropped(answer.dropped),
    )


def receipt_html(receipt: Receipt) -> str:
    """A receipt: where the prompt's tokens came from, where the time went, and every chunk."""
    times = receipt.times
    rest = max(0.0, times.first_token - times.queue - times.encode - times.prefill)
    rows = [_row(use, "") for use in receipt.chunks[:MAX_PARTS]]  # numbers belong to a layout, which is not here
    return _page(
        _shares(f"prompt, {_count(receipt.prompt_tokens, 'token')}", _token_shares(receipt), str),
        _shares(
            "time",
            [
                ("retrieve", times.retrieve, "#1f6fb2"),
                ("queue", times.queue, _GREY),
                ("encode", times.encode, "#b3541e"),
                ("prefill", times.prefill, "#7d4fa3"),
                ("other, to the first token", rest, "#5d636c"),
                ("decode", times.decode, "#1d7a55"),
            ],
            _milliseconds,
        ),
        _facts(
            [
                f"{receipt.reuse:.0%} of chunk tokens from cache",
                f"{_count(receipt.tokens_generated, 'token')} generated",
            ]
        ),
        _rows(rows, len(receipt.chunks), _USE_HEAD, narrow=True),
    )


def stats_html(stats: Stats) -> str:
    """Sizes and totals of a runtime: how full the pool is, what was found in it, and which tokens were computed."""
    return _page(*_stats_blocks(stats))


def runtime_html(runtime: Runtime) -> str:
    """What a runtime is made of, and its statistics; a closed one says so."""
    about = [f"<b>{escape(_capped(name))}</b> {escape(_capped(value))}" for name, value in runtime.about().items()]
    head = f'<div class="lr-facts">{"".join(f"<span>{fact}</span>" for fact in about)}</div>'
    return _page(head, *([] if runtime.closed else _stats_blocks(runtime.stats)))


def _stats_blocks(stats: Stats) -> list[str]:
    used = stats.pages - stats.pages_free
    unit = stats.page_bytes
    return [
        _shares(
            f"page pool, {_bytes(stats.pages * unit)}",
            [("used", used * unit, "#1d7a55"), ("free", stats.pages_free * unit, _GREY)],
            _bytes,
        ),
        _shares(
            f"chunk uses, {stats.hit_ratio:.0%} found",
            [("hits", stats.chunk_hits, "#1d7a55"), ("misses", stats.chunk_misses, "#b3541e")],
            str,
        ),
        _shares("prompt tokens", _token_shares(stats), str),
        _facts(
            [
                _count(stats.documents, "document"),
                f"{_count(stats.chunks_indexed, 'chunk')} indexed, {stats.chunks_resident} in memory",
                _count(stats.evictions, "eviction"),
                f"{_count(stats.requests, 'request')}, {_count(stats.tokens_generated, 'token')} generated",
            ]
        ),
    ]


def _token_shares(counts: Receipt | Stats) -> list[tuple[str, float, str]]:
    return [
        ("reused", counts.tokens_reused, "#1d7a55"),
        ("of earlier live text", counts.tokens_history, "#1f6fb2"),
        ("encoded", counts.tokens_encoded, "#b3541e"),
        ("live", counts.tokens_live, _GREY),
    ]


def _shares(title: str, parts: Sequence[tuple[str, float, str]], show: Callable[[Any], str]) -> str:
    """A heading, a bar cut in proportion to the values (name, value, colour), and what each part is."""
    total = sum(value for _, value, _ in parts)
    rects, left = [], 0.0
    for name, value, colour in parts:
        width = 100 * value / total if total else 0.0
        if width:
            rects.append(
                f'<rect x="{left:.3f}" y="0" width="{width:.3f}" height="1" fill="{colour}">'
                f"<title>{name}: {show(value)}</title></rect>"
            )
        left += width
    if not rects:
        rects = [f'<rect x="0" y="0" width="100" height="1" fill="{_GREY}" fill-opacity="0.3"></rect>']
    legend = "".join(
        f'<span><span class="lr-key" style="background:{colour}"></span>{name} {show(value)}</span>'
        for name, value, colour in parts
        if value or not total  # what is nothing takes no room
    )
    return (
        f'<div class="lr-head">{escape(title)}</div>'
        f'<svg viewBox="0 0 100 1" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{"".join(rects)}</svg><div class="lr-legend">{legend}</div>'
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _calls(answer: Answer) -> str:
    return "\n".join(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in answer.tool_calls)


def _page(*blocks: str) -> str:
    return f'<div class="lazy-rag"><style>{_STYLE}</style>{"".join(blocks)}</div>'


def _parts(layout: PromptLayout, uses: Sequence[ChunkUse], sources: Sequence[Source]) -> list[_Part]:
    tiers = {use.offset: use.tier for use in uses}
    texts = {source.chunk_id: source.text for source in sources}
    numbers = _numbers(layout)
    parts = []
    for item in layout.items:
        if isinstance(item, LiveRun):
            parts.append(_live_part(item))
            continue
        text = " ".join(texts.get(item.chunk_id, "").split())
        parts.append(_segment_part(item, numbers[item.chunk_id], tiers.get(item.offset), text))
    return parts


def _numbers(layout: PromptLayout) -> dict[str, str]:
    """What a chunk is called in the bar and the table: "prefix", or its number in order of first appearance."""
    names: dict[str, str] = {}
    prefix = layout.prefix.id if layout.prefix is not None else None
    for segment in layout.segments:
        if segment.chunk_id == prefix:
            names[segment.chunk_id] = "prefix"
        elif segment.chunk_id not in names:
            names[segment.chunk_id] = str(len(names.keys() - {prefix}) + 1)
    return names


def _live_part(run: LiveRun) -> _Part:
    title = f"live run at {_span(run.offset, run.length)}"
    if run.repaired:
        title += f"\n{run.repaired} of them repeat a chunk's text (repaired)"
    return _Part("repaired" if run.repaired else "live", run.offset, run.length, "live", title)


def _segment_part(segment: Segment, name: str, tier: str | None, text: str) -> _Part:
    kind = "cached" if tier is None else _TIER_KINDS.get(tier, "memory")
    title = (
        f"{'encode prefix' if name == 'prefix' else 'chunk ' + name} ({segment.chunk_id[:12]}) "
        f"at {_span(segment.offset, segment.length)}\n"
        f"its tokens {segment.start} to {segment.start + segment.length - 1}, delta {segment.delta:+d}"
    )
    if tier is not None:
        title += "\nencoded now" if tier == "encoded" else f"\nfound in: {tier}"
    if text:
        title += f"\n{text[:_EXCERPT]}{'…' * (len(text) > _EXCERPT)}"
    return _Part(kind, segment.offset, segment.length, name, title)


def _span(offset: int, length: int) -> str:
    return f"positions {offset} to {offset + length - 1}, {_count(length, 'token')}"


def _bar(parts: list[_Part]) -> str:
    end = parts[-1].offset + parts[-1].length
    if len(parts) > MAX_PARTS:
        rest = parts[MAX_PARTS - 1 :]
        title = f"{len(rest)} more parts at {_span(rest[0].offset, end - rest[0].offset)}"
        more = _Part("more", rest[0].offset, end - rest[0].offset, f"{len(rest)} more", title)
        parts = [*parts[: MAX_PARTS - 1], more]
    cells, labelled = [], -end
    for part in parts:
        tick = ""
        # a label that would run into the last one, or into the end's, is left out; the tooltip has the offset
        if part.offset - labelled >= _TICK_SHARE * end and end - part.offset >= _TICK_SHARE * end:
            tick, labelled = str(part.offset), part.offset
        inside = escape(part.label) if part.length >= _CHARACTER_SHARE * (len(part.label) + 1) * end else "&#8203;"
        cells.append(
            f'<div class="lr-part" style="flex-grow:{part.length}" title="{escape(part.title)}">'
            f'<div class="lr-fill" style="background:{_KINDS[part.kind][1]}">{inside}</div>'
            f'<div class="lr-tick">{tick}</div></div>'
        )
    cells.append(f'<div class="lr-end"><div class="lr-tick">{end}</div></div>')
    kinds = dict.fromkeys(part.kind for part in parts)
    legend = "".join(
        f'<span><span class="lr-key" style="background:{_KINDS[kind][1]}"></span>{_KINDS[kind][0]}</span>'
        for kind in _KINDS
        if kind in kinds
    )
    label = f"offset bar: {_count(len(parts), 'part')}, {_count(end, 'token')}"
    bar = f'<div class="lr-bar" role="img" aria-label="{label}">{"".join(cells)}</div>'
    return f'{bar}<div class="lr-legend">{legend}</div>'


def _receipt_facts(receipt: Receipt, finish_reason: str) -> list[str]:
    times = receipt.times
    live = f"{receipt.tokens_live} live"
    if receipt.tokens_repaired:
        live += f", {receipt.tokens_repaired} of them repaired"
    if receipt.tokens_history:
        live += f", {receipt.tokens_history} of earlier live text"
    generated = f"{_count(receipt.tokens_generated, 'token')} generated, finished: {finish_reason}"
    if receipt.tokens_generated > 1 and times.decode > 0:
        generated += f", {(receipt.tokens_generated - 1) / times.decode:.1f} tokens/s"
    return [
        f"prompt {_count(receipt.prompt_tokens, 'token')}: {receipt.tokens_reused} reused, "
        f"{receipt.tokens_encoded} encoded, {live}",
        f"{receipt.reuse:.0%} of chunk tokens from cache",
        f"first token {1000 * (times.retrieve + times.first_token):.0f} ms (retrieve {1000 * times.retrieve:.0f}, "
        f"encode {1000 * times.encode:.0f}, prefill {1000 * times.prefill:.0f})",
        generated,
    ]


def _facts(facts: Iterable[str]) -> str:
    return f'<div class="lr-facts">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</div>'


def _table(answer: Answer) -> str:
    sources = {source.chunk_id: source for source in answer.sources}
    numbers = _numbers(answer.layout)
    uses = answer.receipt.chunks
    rows = [
        _row(use, numbers.get(use.chunk_id, ""), _source_cells(numbers.get(use.chunk_id), sources.get(use.chunk_id)))
        for use in uses[:MAX_PARTS]
    ]
    return _rows(rows, len(uses), _USE_HEAD + '<th class="lr-n">score</th><th>source</th>')


_USE_HEAD = '<th></th><th>chunk</th><th class="lr-n">offset</th><th class="lr-n">tokens</th><th>found in</th>'


def _rows(rows: list[str], count: int, head: str, *, narrow: bool = False) -> str:
    """The table of chunks from its rows; `count` of them in all. `narrow`: as wide as its cells need."""
    if count > len(rows):
        rows = [*rows, f'<tr><td colspan="7" class="lr-dim">{count - len(rows)} more</td></tr>']
    style = ' class="lr-narrow"' if narrow else ""
    return f"<table{style}><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(use: ChunkUse, name: str, more: str = "") -> str:
    number = "" if name == "prefix" else name
    tier = "encoded now" if use.tier == "encoded" else use.tier
    return (
        f"<tr><td>{number}</td><td><code>{escape(use.chunk_id[:12])}</code></td>"
        f'<td class="lr-n">{use.offset}</td><td class="lr-n">{use.length}</td>'
        f'<td class="lr-tier">{escape(tier)}</td>{more}</tr>'
    )


def _source_cells(name: str | None, source: Source | None) -> str:
    score = "" if source is None or source.score is None else f"{source.score:.2f}"
    origin = _source_cell(source) if source is not None else "encode prefix" if name == "prefix" else ""
    return f'<td class="lr-n">{score}</td><td>{origin}</td>'


def _source_cell(source: Source) -> str:
    """Name and excerpt; the text unfolds where it is longer than its excerpt."""
    # the chunk's id, after which it is called without one of its own, stands beside it
    own = "" if is_unnamed(source.document_id or "", source.chunk_id) else source.document_id
    name = str(source.metadata.get("file_name") or own or "")[:_EXCERPT]
    flat = " ".join(source.text[:MAX_TEXT].split())
    shown = (f"<b>{escape(name)}</b> " if name else "") + escape(flat[:_EXCERPT])
    if flat == source.text and len(flat) <= _EXCERPT:
        return shown
    dots = "…" if len(flat) > _EXCERPT else ""
    full = escape(_capped(source.text))
    return f'<details><summary>{shown}{dots}</summary><div class="lr-full">{full}</div></details>'


def _dropped(dropped: Sequence[str]) -> str:
    if not dropped:
        return ""
    shown = ", ".join(f"<code>{escape(chunk_id[:12])}</code>" for chunk_id in dropped[:MAX_PARTS])
    more = f" and {len(dropped) - MAX_PARTS} more" if len(dropped) > MAX_PARTS else ""
    return f'<div class="lr-dim">left out, no room in the context: {shown}{more}</div>'


def _capped(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
