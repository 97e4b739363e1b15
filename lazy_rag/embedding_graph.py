"""Embedding one question by replaying a CUDA graph of the embedding model, padded to a few lengths.

A small encoder is a hundred launches of microseconds each: on a GPU the host takes several times as long to issue them
as the device to run them. Only for sentence-transformers models that this package loaded itself, so nobody else can
move or change what the graphs have captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazy_rag.captures import GATE

_log = logging.getLogger(__name__)

LENGTHS = (16, 32, 64, 128, 256)
# Between a graph's vector and the library's: padding changes the order of sums, and a model may compute in 16 bits. A
# padding that is seen, or a prompt that is missing, turns a vector by far more.
_LEAST_COSINE = 0.9999


class EmbeddingGraphs:
    """Graphs of `model`'s forward pass for one text, by padded length in tokens. One caller at a time."""

    def __init__(self, model: Any, *, capture: bool = True) -> None:
        """Prepare every length; raises whatever the model raises when it cannot be captured.

        Args:
            capture: False runs the same padded work without graphs.
        """
        self._model = model
        self._device = torch.device(model.device)
        self._capture = capture
        self._pad = int(getattr(model.tokenizer, "pad_token_id", None) or 0)
        probe = self._tokenize("what")
        self._names = frozenset(probe)
        self._extras = {name: value for name, value in probe.items() if not isinstance(value, Tensor)}
        longest = model.max_seq_length or LENGTHS[-1]
        self._memory: Any = None
        self._graphs = [(length, *self._prepare(length, probe)) for length in reversed(LENGTHS) if length <= longest]
        self._graphs.reverse()

    @classmethod
    def of(cls, model: Any, *, capture: bool = True) -> EmbeddingGraphs | None:
        """Graphs whose vectors are the library's up to rounding, each compared once; or None, with the reason in the
        log unless the library itself does more than one forward pass for a question."""
        if getattr(model, "default_prompt_name", None) is not None or getattr(model, "truncate_dim", None) is not None:
            return None  # the library's own path adds what these ask for
        try:
            graphs = cls(model, capture=capture)
            for length in (graph[0] for graph in graphs._graphs):
                text = "page " * (length - 4)  # a token each, usually, and what stands around them
                expected, found = model.encode([text], show_progress_bar=False)[0], graphs.encode(text)
                if found is not None and not _cosine(expected, found[0]) >= _LEAST_COSINE:
                    _log.warning("questions are embedded without CUDA graphs: they gave another vector")
                    return None
        except Exception as error:  # noqa: BLE001  a model that reads the device back, say: the library's way is as right
            _log.warning("questions are embedded without CUDA graphs: %s", error)
            return None
        return graphs if graphs._graphs else None

    def encode(self, text: str) -> NDArray[np.float32] | None:
        """Its vector, [1, d], not normalised beyond what the model does; None when no graph fits."""
        features = self._tokenize(text)
        if features.keys() != self._names or any(features[name] != value for name, value in self._extras.items()):
            return None
        count = features["input_ids"].shape[1]
        for length, static, replay, vector in self._graphs:
            if length >= count:
                for name, target in static.items():
                    padded = torch.full((1, length), self._pad if name == "input_ids" else 0, dtype=target.dtype)
                    padded[:, :count] = features[name]
                    target.copy_(padded)
                replay()
                return vector().float().cpu().numpy()
        return None

    def _tokenize(self, text: str) -> dict[str, Any]:
        tokenize = getattr(self._model, "preprocess", None) or self._model.tokenize
        return dict(tokenize([text]))

    def _prepare(
        self, length: int, probe: dict[str, Any]
    ) -> tuple[dict[str, Tensor], Callable[[], None], Callable[[], Tensor]]:
        """The graph's inputs, its replay, and its output."""
        static = {
            name: torch.ones((1, length), dtype=value.dtype, device=self._device)
            for name, value in probe.items()
            if isinstance(value, Tensor)
        }
        result: list[Tensor] = [self._forward(static)]  # lets libraries take their workspaces
        if not self._capture:

            def run() -> None:
                result[0] = self._forward(static)

            return static, run, lambda: result[0]
        with GATE.alone():
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                result[0] = self._forward(static)
        self._memory = graph.pool()
        return static, graph.replay, lambda: result[0]

    @torch.inference_mode()
    def _forward(self, static: dict[str, Tensor]) -> Tensor:
        vector: Tensor = self._model({**self._extras, **static})["sentence_embedding"]
        return vector


def _cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))
