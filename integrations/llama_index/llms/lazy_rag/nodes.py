"""LlamaIndex's nodes as chunks of a runtime, and its filters as ours."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilters
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from lazy_rag import Hit, LazyRAGError, Source, check_metadata

NODE_ID, REF_DOC_ID, _EDGES = "_node_id", "ref_doc_id", "_node_edges"

_OPERATORS = {
    FilterOperator.EQ: "$eq",
    FilterOperator.NE: "$ne",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.NIN: "$nin",
    FilterOperator.ANY: "$any",
    FilterOperator.ALL: "$all",
    FilterOperator.TEXT_MATCH: "$text",
    FilterOperator.TEXT_MATCH_INSENSITIVE: "$itext",
    FilterOperator.CONTAINS: "$contains",
}


def node_metadata(node: BaseNode, index: int = 0) -> dict[str, Any]:
    """What is stored beside a node's text: its own metadata, and all that is needed to make it again.

    `index`: its place among the nodes that are stored, for messages. Raises LazyRAGError for what JSON cannot hold.
    """
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    name = f"node {node.node_id!r} at index {index}"
    try:
        stored = node_to_metadata_dict(node, remove_text=True)
    except (TypeError, ValueError) as error:
        check_metadata(node.metadata, name)
        raise LazyRAGError(f"{name} cannot be stored, JSON cannot hold it: {error}") from error
    check_metadata(stored, name)
    stored[NODE_ID] = node.node_id
    if text != text.strip():
        start = len(text) - len(text.lstrip())
        stored[_EDGES] = [text[:start], text[start + len(text.strip()) :]]
    return stored


def to_node(found: Hit | Source) -> BaseNode:
    """The node of a stored chunk. A chunk added to the runtime itself becomes a node of its text and metadata, under
    its document's id, or under its own where the document has several chunks."""
    metadata = dict(found.metadata)
    if "_node_content" not in metadata:
        name = found.document_id if found.siblings == 1 else None
        return TextNode(text=found.text, id_=name or found.chunk_id, metadata=metadata)
    lead, trail = metadata.get(_EDGES, ("", ""))
    return metadata_dict_to_node(metadata, text=lead + found.text + trail)


def to_filter(filters: MetadataFilters | None) -> dict[str, Any] | None:
    """LlamaIndex's filters in the runtime's language; groups may be nested."""
    if filters is None or not filters.filters:
        return None
    parts: list[dict[str, Any]] = []
    for part in filters.filters:
        if isinstance(part, MetadataFilters):
            inner = to_filter(part)
            parts += [] if inner is None else [inner]
        elif part.operator == FilterOperator.IS_EMPTY:
            parts.append({part.key: {"$empty": True}})
        else:
            parts.append({part.key: {_OPERATORS[part.operator]: part.value}})
    if not parts:
        return None
    if filters.condition == FilterCondition.OR:
        return {"$or": parts}
    if filters.condition == FilterCondition.NOT:  # none of them holds
        return {"$not": {"$or": parts}}
    return {"$and": parts}
