"""Why a layout would find the KV of a chunk, or why not. For whoever runs the runtime: reasons look across namespaces.

reason                     hit   the chunk
in memory | on disk        yes   is found there
being computed             no    is on its way, for another request
being loaded               no    is on its way from a lower tier, for another request
never seen                 no    was not computed yet, or left so long ago that nobody remembers
evicted                    no    had to make room, and no lower tier has it
expired | deleted          no    outlived `ttl` | was deleted
quarantined                no    its record was bad and was set aside
computing is faster        no    its record is there, but loading was measured to be slower
other namespace            no    belongs to another namespace than asked for; or this very text is in memory, but
                                 for another namespace
other prefix | other model no    was made behind another encode prefix | by another model, so that its id means
                                 nothing here
"""

from __future__ import annotations

from lazy_rag.answer import Explanation
from lazy_rag.building import Parts
from lazy_rag.layout import Chunk, PromptLayout


def explain_layout(parts: Parts, layout: PromptLayout, namespace: str | None) -> list[Explanation]:
    """One explanation a segment. Run it on the engine thread.

    Args:
        namespace: whose request it would be; None: that of each chunk.
    """
    found = []
    for segment in layout.segments:
        chunk = layout.chunks[segment.chunk_id]
        tier, reason = _look(parts, layout, chunk, namespace)
        hit = reason in ("in memory", "on disk")
        found.append(Explanation(chunk.id, segment.offset, hit, reason, tier))
    return found


def _look(parts: Parts, layout: PromptLayout, chunk: Chunk, namespace: str | None) -> tuple[str | None, str]:
    """The tier that has the chunk, and the reason."""
    is_prefix = layout.prefix is not None and chunk.id == layout.prefix.id
    foreign = _foreign(parts, layout, chunk, is_prefix)
    if foreign:
        return None, foreign
    if namespace is not None and not is_prefix and chunk.namespace != namespace:
        return None, "other namespace"
    cache, residency, records = parts.engine.cache, parts.engine.residency, parts.records
    if cache.lookup(chunk) is not None:
        return residency.pool_tier, "in memory"
    if chunk.id in residency.encodings:
        source = residency.encodings[chunk.id].source
        return (None, "being computed") if source == "encoded" else (source, "being loaded")
    tier = residency.tiers.where(chunk)
    state = None if records is None else records.state(chunk.id)
    if tier is not None and (tier, state) != ("disk", "expired"):
        there = "in memory" if tier == "host" else "on disk"
        return tier, "computing is faster" if cache.rates.slower(tier) else there
    if state is not None:
        return None, state
    gone = cache.why_gone(chunk.id)
    if gone is not None:
        return None, gone
    same = (e.chunk for e in cache if e.chunk.token_ids == chunk.token_ids and e.chunk.base == chunk.base)
    if any(other.namespace != chunk.namespace for other in same):
        return None, "other namespace"
    return None, "never seen"


def _foreign(parts: Parts, layout: PromptLayout, chunk: Chunk, is_prefix: bool) -> str | None:
    """An id is content: made again here from the same tokens, it differs exactly when something it depends on does."""
    mine = parts.prefix_keys if is_prefix else parts.keys
    if mine.chunk_id("" if is_prefix else chunk.namespace, chunk.token_ids) == chunk.id:
        return None
    other = layout.prefix
    if other is not None and parts.prefix_keys.chunk_id("", other.token_ids) != other.id:
        return "other model"
    return "other model" if other == parts.prefix else "other prefix"
