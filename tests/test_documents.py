from __future__ import annotations

import builtins
import hashlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazy_rag.documents import Document, html_text, load_documents, text_id
from lazy_rag.errors import DocumentError


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def pdf_bytes(text: str) -> bytes:
    """A one-page PDF with correct offsets."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    start = len(out)
    out += "xref\n0 6\n0000000000 65535 f \n" + "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    return (out + f"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n").encode()


def test_file_as_path_and_as_string(tmp_path: Path) -> None:
    file = write(tmp_path / "a.md", "# Title\n\nBody é")
    expected = Document("# Title\n\nBody é", str(file), {"path": str(file), "file_name": "a.md"})
    assert load_documents(file) == [expected]
    assert load_documents(str(file)) == [expected]
    assert load_documents([file]) == [expected]


def test_text_is_taken_verbatim_with_hash_id() -> None:
    text = "Keys are rotated.\r\nand/or more"
    (document,) = load_documents(text)
    assert document.text == text
    assert document.id == "text-" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest() == text_id(text)
    assert document.metadata == {}
    assert load_documents("word")[0].text == "word"
    assert load_documents("x" * 5000)[0].text == "x" * 5000
    assert load_documents("nul \0 byte")[0].text == "nul \0 byte"
    assert load_documents([]) == []


@pytest.mark.parametrize("text", ["missing.md", "no/such/thing", "/absolute/none", "NOTES.PDF"])
def test_missing_path_is_not_taken_for_text(text: str) -> None:
    with pytest.raises(DocumentError, match="no such file"):
        load_documents(text)


@pytest.mark.parametrize(
    "text", ["http://example.org/a.html", "https://example.org is a site", "file:///etc/x", "s3://b/k"]
)
def test_urls_are_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="network"):
        load_documents(text)


def test_folder_is_walked_sorted_without_hidden_and_unknown(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "a/b/c.HTM", ".hidden.txt", ".git/x.txt", "image.png", "c.md"):
        write(tmp_path / name, f"text of {name}")
    found = load_documents(str(tmp_path))
    assert [document.metadata["file_name"] for document in found] == ["c.HTM", "z.py", "b.txt", "c.md"]
    assert found[0].text == "text of a/b/c.HTM"


def test_unknown_kind_is_refused_when_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"image\.png is of an unknown kind"):
        load_documents(write(tmp_path / "image.png", "x"))


def test_empty_folder_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_documents(tmp_path) == []
    assert "no file that can be read" in caplog.text


def test_links_out_of_the_folder_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = write(tmp_path / "outside" / "secret.txt", "secret")
    docs = tmp_path / "docs"
    inside = write(docs / "real.txt", "real")
    (docs / "file_link.txt").symlink_to(secret)
    (docs / "dir_link").symlink_to(secret.parent)
    (docs / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (docs / "alias.txt").symlink_to(inside)
    (docs / "loop").symlink_to(docs)
    (docs / "self.txt").symlink_to(docs / "self.txt")
    with caplog.at_level(logging.WARNING):
        found = load_documents(docs)
    assert [(document.text, document.id) for document in found] == [("real", str(inside))]
    skipped = [record.getMessage() for record in caplog.records]
    assert len(skipped) == 4
    assert all(any(name in line for line in skipped) for name in ("file_link", "dir_link", "dangling", "self.txt"))


def test_a_link_to_a_folder_can_be_the_source(tmp_path: Path) -> None:
    file = write(tmp_path / "real" / "a.txt", "a")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert [document.id for document in load_documents(tmp_path / "link")] == [str(file)]


def test_bom_and_line_ends(tmp_path: Path) -> None:
    assert load_documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\n"))[0].text == "one\ntwo\n"


def test_not_utf8_names_the_file_and_loads_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "fine")
    write(tmp_path / "b.txt", "caf\xe9".encode("latin-1"))
    with pytest.raises(DocumentError, match=r"b\.txt is not UTF-8"):
        load_documents(tmp_path)


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match=r"pipe\.txt is not a regular file"):
        load_documents(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match=r"pipe\.txt is not a regular file"):
        load_documents(tmp_path)


def test_permission_errors_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.txt", "x")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(DocumentError, match=r"a\.txt: Permission denied"):
            load_documents(file)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(DocumentError, match=f"{tmp_path.name}: Permission denied"):
        load_documents(tmp_path)


def test_pdf(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    assert load_documents(write(tmp_path / "a.pdf", pdf_bytes("Hello page")))[0].text == "Hello page"


@pytest.mark.parametrize("data", [b"", b"not a pdf", b"%PDF-1.4\n%%EOF", pdf_bytes("x")[:200]])
def test_broken_pdf(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("pypdf")
    with pytest.raises(DocumentError, match=r"a\.pdf is not a readable PDF"):
        load_documents(write(tmp_path / "a.pdf", data))


def test_pdf_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pypdf(name: str, *rest: Any) -> Any:
        if name == "pypdf":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pypdf)
    with pytest.raises(DocumentError, match=r'pip install "lazy-rag\[pdf\]"'):
        load_documents(write(tmp_path / "a.pdf", pdf_bytes("x")))


def test_html_keeps_blocks_and_drops_scripts(tmp_path: Path) -> None:
    page = """<html><head><title>T &amp; U</title><style>p {x: y}</style><script>if (a < b) f("</p>");</script></head>
    <body><!-- no --><h1>Head  ing</h1><p>One <b>two</b>
      three.<br/>four</p><ul><li>a</li><li>b</li></ul><table><tr><td>1</td><td>2</td></tr></table>
    <pre>def f():
    return 1</pre><svg/><noscript>off</noscript>tail</body></html>"""
    expected = "T & U\n\nHead ing\n\nOne two three.\nfour\n\na\n\nb\n\n1 2\n\ndef f():\n    return 1\n\ntail"
    assert load_documents(write(tmp_path / "p.html", page))[0].text == expected
    assert html_text("<p>unclosed <i>tags") == "unclosed tags"
    assert html_text("") == ""


def test_llama_index_documents() -> None:
    node = SimpleNamespace(get_content=lambda: "text", id_="n1", metadata={"lang": "en"})
    old = SimpleNamespace(text="older", doc_id="n2", metadata=None)
    assert load_documents([node, old]) == [Document("text", "n1", {"lang": "en"}), Document("older", "n2", {})]
    with pytest.raises(DocumentError, match="no text"):
        load_documents(SimpleNamespace(get_content=lambda: None, id_="n3", metadata={}))


def test_langchain_documents() -> None:
    class Iterable:
        """Pydantic models iterate over their fields; such a document is still one document."""

        page_content, id, metadata = "text", None, {"page": 3}

        def __iter__(self) -> Any:
            return iter([("page_content", "text")])

    assert load_documents(Iterable()) == [Document("text", text_id("text"), {"page": 3})]


def test_ids_and_metadata(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a")
    found = load_documents([file, "two words"], ids=["x", "y"], metadata=[{"n": 1}, {"n": 2}])
    assert [(document.id, document.metadata["n"]) for document in found] == [("x", 1), ("y", 2)]
    assert found[0].metadata["file_name"] == "a.txt"
    shared = load_documents([Document("a", "1", {"k": 0, "l": 1}), "b c"], metadata={"k": 9})
    assert [document.metadata for document in shared] == [{"k": 9, "l": 1}, {"k": 9}]
    assert load_documents("some text", ids="me")[0].id == "me"


def test_ids_and_metadata_must_fit(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "b.txt", "b")
    with pytest.raises(DocumentError, match="gives 2"):
        load_documents(tmp_path, ids=["x"])
    with pytest.raises(DocumentError, match="ids has 1 entries for 2 sources"):
        load_documents(["a b", "c d"], ids=["x"])
    with pytest.raises(DocumentError, match="metadata has 1 entries"):
        load_documents(["a b", "c d"], metadata=[{}])
    with pytest.raises(DocumentError, match="non-empty string"):
        load_documents("a b", ids=[""])


def test_duplicate_ids(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a")
    for sources in (["same text", "same text"], [tmp_path, file]):
        with pytest.raises(DocumentError, match="occurs twice"):
            load_documents(sources)


@pytest.mark.parametrize("source", [b"bytes", {"text": "x"}, 3, None, [3], ["half \ud800 pair"]])
def test_other_things_are_refused(source: Any) -> None:
    with pytest.raises(DocumentError):
        load_documents(source)
