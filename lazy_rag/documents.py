"""Reading documents: files, folders, texts and framework documents become `Document` objects."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

from lazy_rag.errors import DocumentError

SUFFIXES = (".txt", ".md", ".py", ".html", ".htm", ".pdf")
"""Kinds of files that can be read. In a folder others are skipped; named on their own they are refused."""

_LOG = logging.getLogger(__name__)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Document:
    """A text with an identity. `metadata` holds JSON values; it is returned with every hit and can be filtered on."""

    text: str
    id: str
    metadata: dict[str, Any] = field(default_factory=dict)


def load_documents(
    sources: Any,
    *,
    ids: Sequence[str] | str | None = None,
    metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> list[Document]:
    """Read one source or a sequence of sources, in order.

    A source is a path (`pathlib.Path`, or a string that exists as one), a folder (walked recursively and sorted; hidden
    entries and other kinds of files are skipped; symbolic links that leave the folder are skipped with a warning), a
    text, a `Document`, or a LlamaIndex or LangChain document. A string that only looks like a path, or starts with a
    URL scheme, is refused rather than taken for text.

    `ids`: one per source; only when every source gives exactly one document. Otherwise a file's id is its resolved
    path, and a text's id is "text-" and its hash. `metadata`: one mapping for all documents, or one per source; it wins
    over the document's own. Files carry `path` and `file_name`.

    Raises DocumentError, naming the source, for anything that cannot be read and for duplicate ids; then nothing is
    returned."""
    items = _as_list(sources)
    given_ids = _per_source([ids] if isinstance(ids, str) else ids, len(items), "ids")
    given_metadata = [metadata] * len(items) if isinstance(metadata, Mapping) else metadata
    extra = _per_source(given_metadata, len(items), "metadata")
    result: list[Document] = []
    for item, item_id, item_metadata in zip(items, given_ids, extra, strict=True):
        found = list(_read(item))
        if item_id is not None and len(found) != 1:
            raise DocumentError(f"ids needs sources of one document each, but {item!s} gives {len(found)}")
        for document in found:
            document_id = document.id if item_id is None else item_id
            result.append(
                _checked(document.text, document_id, document.metadata, {} if item_metadata is None else item_metadata)
            )
    seen: set[str] = set()
    for document in result:
        if document.id in seen:
            raise DocumentError(f"document id {document.id!r} occurs twice in one call; pass distinct sources or ids")
        seen.add(document.id)
    return result


def _as_list(sources: Any) -> list[Any]:
    # Framework documents first: theirs are pydantic models, which iterate over their fields.
    if isinstance(sources, str | os.PathLike | Document) or _is_framework_document(sources):
        return [sources]
    if isinstance(sources, bytes | Mapping) or not isinstance(sources, Iterable):
        raise DocumentError(f"cannot read a document from {type(sources).__name__}; pass paths, texts or Documents")
    return list(sources)


def _per_source(values: Sequence[Any] | None, count: int, what: str) -> list[Any]:
    if values is None:
        return [None] * count
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise DocumentError(f"{what} must be a list with one entry for each source, not {values!r}")
    if len(values) != count:
        raise DocumentError(f"{what} has {len(values)} entries for {count} sources")
    return list(values)


def _checked(text: Any, document_id: Any, own: Any, given: Any) -> Document:
    if not isinstance(document_id, str) or not document_id:
        raise DocumentError(f"a document id must be a non-empty string, not {document_id!r}")
    if not isinstance(text, str):
        raise DocumentError(f"document {document_id!r} has no text")
    if not isinstance(own, Mapping) or not isinstance(given, Mapping):
        raise DocumentError(f"the metadata of document {document_id!r} must be a mapping")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DocumentError(f"document {document_id!r} holds half a surrogate pair at {error.start}") from error
    return Document(text, document_id, {**own, **given})


def _read(source: Any) -> Iterator[Document]:
    if isinstance(source, Document):
        yield source
    elif isinstance(source, os.PathLike):
        yield from _read_path(Path(source))
    elif isinstance(source, str):
        yield from _read_string(source)
    elif _is_framework_document(source):
        yield _from_framework(source)
    else:
        raise DocumentError(f"cannot read a document from {type(source).__name__}; pass paths, texts or Documents")


def _read_string(source: str) -> Iterator[Document]:
    if _SCHEME.match(source):
        raise DocumentError(f"{source[:200]!r}: nothing is fetched from the network; download it and pass the file")
    try:
        exists = bool(source) and os.path.exists(source)
    except (OSError, ValueError):
        exists = False
    if exists:
        yield from _read_path(Path(source))
    elif _looks_like_path(source):
        raise DocumentError(f"no such file: {source[:200]} (a text without spaces? wrap it in a Document)")
    else:
        yield Document(source, text_id(source))


def _looks_like_path(text: str) -> bool:
    if not text or any(character.isspace() for character in text):
        return False
    separators = [os.sep] + ([os.altsep] if os.altsep else [])
    return any(separator in text for separator in separators) or text.lower().endswith(SUFFIXES)


def text_id(text: str) -> str:
    """The id of a text that has no other: "text-" and 32 hex digits of its BLAKE2b hash."""
    return "text-" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _is_framework_document(source: Any) -> bool:
    return any(hasattr(source, name) for name in ("page_content", "get_content")) or (
        hasattr(source, "text") and (hasattr(source, "id_") or hasattr(source, "doc_id"))
    )


def _from_framework(source: Any) -> Document:
    if hasattr(source, "page_content"):
        text, document_id = source.page_content, getattr(source, "id", None)
    else:
        text = source.get_content() if hasattr(source, "get_content") else source.text
        document_id = getattr(source, "id_", None) or getattr(source, "doc_id", None)
    if not isinstance(text, str):
        raise DocumentError(f"{type(source).__name__} {document_id!r} has no text")
    metadata = getattr(source, "metadata", None) or {}
    return Document(text, str(document_id) if document_id else text_id(text), metadata)


def _read_path(path: Path) -> Iterator[Document]:
    try:
        resolved = path.resolve(strict=True)
        is_folder = stat.S_ISDIR(resolved.stat().st_mode)
    except FileNotFoundError as error:
        raise DocumentError(f"no such file: {path}") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise DocumentError(f"cannot read {path}: {error}") from error
    if is_folder:
        files = list(_walk(resolved, resolved, set()))
        if not files:
            _LOG.warning("%s holds no file that can be read (%s)", path, ", ".join(SUFFIXES))
    else:
        if path.suffix.lower() not in SUFFIXES and resolved.suffix.lower() not in SUFFIXES:
            raise DocumentError(f"{path} is of an unknown kind; files can be {', '.join(SUFFIXES)}")
        files = [(resolved, path.suffix if path.suffix.lower() in SUFFIXES else resolved.suffix)]
    for file, suffix in files:
        text = _read_file(file, suffix.lower())
        yield Document(text, str(file), {"path": str(file), "file_name": file.name})


def _walk(folder: Path, root: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Resolved files of known kinds under `folder` with the suffix that tells their kind, sorted by name, each once.
    `seen` holds the resolved folders and files already met, which ends loops of links."""
    seen.add(folder)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DocumentError(f"cannot read folder {folder}: {error.strerror or error}") from error
    for name in names:
        entry = folder / name
        if name.startswith("."):
            continue
        try:
            resolved = entry.resolve(strict=True)
            is_folder = resolved.is_dir()
        except (OSError, RuntimeError) as error:
            if entry.is_symlink():
                _LOG.warning("skipped %s: a symbolic link that leads nowhere", entry)
                continue
            raise DocumentError(f"cannot read {entry}: {error}") from error
        if not resolved.is_relative_to(root):
            _LOG.warning("skipped %s: a symbolic link out of %s", entry, root)
        elif resolved in seen:
            continue
        elif is_folder:
            yield from _walk(resolved, root, seen)
        elif entry.suffix.lower() in SUFFIXES:
            seen.add(resolved)
            yield resolved, entry.suffix


def _read_file(path: Path, suffix: str) -> str:
    data = _read_bytes(path)
    if suffix == ".pdf":
        return _pdf_text(data, path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return html_text(text) if suffix in (".html", ".htm") else text


def _read_bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DocumentError(f"{path} is not a regular file")
        # The path is resolved: a link put in its place since then is not followed, and a pipe does not block.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DocumentError(f"{path} is not a regular file")
            return file.read()
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}") from error


def _pdf_text(data: bytes, path: Path) -> str:
    try:
        import pypdf
    except ImportError as error:
        raise DocumentError(f'reading {path} needs pypdf: pip install "lazy-rag[pdf]"') from error
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(BytesIO(data)).pages]
    except Exception as error:
        # pypdf meets broken files with errors of many types, some of them plain KeyError or RecursionError.
        raise DocumentError(f"{path} is not a readable PDF: {type(error).__name__}: {error}") from error
    if not pages:
        raise DocumentError(f"{path} is not a readable PDF: it has no pages")
    text = "\n\n".join(page.strip() for page in pages).strip()
    if not text:
        _LOG.warning("%s holds no text (scanned pages?)", path)
    # Broken font tables can yield half a surrogate pair.
    return text.encode("utf-8", "replace").decode("utf-8")


def html_text(html: str) -> str:
    """The readable text of an HTML page: one line per block, blank lines between paragraphs, no scripts or styles."""
    reader = _HtmlReader()
    reader.feed(html.replace("\0", ""))
    reader.close()
    return reader.text()


class _HtmlReader(HTMLParser):
    SKIPPED = frozenset(("script", "style", "template", "noscript", "svg"))
    # fmt: off
    PARAGRAPHS = frozenset((
        "address", "article", "aside", "blockquote", "body", "details", "dialog", "div", "dl", "fieldset", "figure",
        "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hr", "main", "nav", "ol", "p", "pre",
        "section", "table", "title", "ul",
    ))
    LINES = frozenset((
        "br", "caption", "dd", "dt", "figcaption", "legend", "li", "option", "summary", "tbody", "thead", "tr",
    ))
    # fmt: on
    CELLS = frozenset(("td", "th"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._skip: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIPPED:
            self._skip.append(tag)
        self._pre += tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skip:
            while self._skip.pop() != tag:
                pass
        self._pre -= tag == "pre" and self._pre > 0
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._skip:
            # Spaces of <pre> are hidden from the collapsing in text().
            self._parts.append(data.replace(" ", "\0") if self._pre else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if not self._skip:
            if tag in self.PARAGRAPHS:
                self._parts.append("\n\n")
            elif tag in self.LINES:
                self._parts.append("\n")
            elif tag in self.CELLS:
                self._parts.append(" ")

    def text(self) -> str:
        joined = re.sub(r" *\n *", "\n", "".join(self._parts))
        joined = re.sub(r" {2,}", " ", re.sub(r"\n{3,}", "\n\n", joined))
        return joined.replace("\0", " ").strip()


def unnamed(chunk_ids: Sequence[str]) -> list[str]:
    """Document ids for chunks added without any; a text given twice is two documents of one chunk."""
    seen: Counter[str] = Counter()
    names = []
    for chunk_id in chunk_ids:
        seen[chunk_id] += 1
        names.append(chunk_id if seen[chunk_id] == 1 else f"{chunk_id}#{seen[chunk_id]}")
    return names


def is_unnamed(document_id: str, chunk_id: str) -> bool:
    """Whether a document of this chunk was added without an id."""
    return document_id.split("#")[0] == chunk_id
