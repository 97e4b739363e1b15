"""Every error a user can meet. All derive from `LazyRAGError(RuntimeError)`, never from `ValueError` or `TypeError`:
LlamaIndex's refine synthesizer swallows those two and answers "Empty Response"."""


class LazyRAGError(RuntimeError):
    """Base of all errors raised on purpose by lazy-rag. The message says what to do."""


class ConfigError(LazyRAGError):
    """A constructor or call argument is unknown, of the wrong kind, or out of range."""


class ModelLoadError(LazyRAGError):
    """The model or tokenizer cannot be found or read."""


class UnsupportedModelError(LazyRAGError):
    """The model was read, but its support is not proven; the message gives the reason."""


class EmptyQuestionError(LazyRAGError):
    """The question has no text."""


class EmptyCorpusError(LazyRAGError):
    """Retrieval was asked for, but nothing has been added."""


class ContextOverflowError(LazyRAGError):
    """The question, system text and history alone are longer than the context."""


class CacheFullError(LazyRAGError):
    """A request, or chunks to be pinned, can never fit: into the page budget, beside what is pinned, or into the quota
    of their namespace."""


class QueueFullError(LazyRAGError):
    """`max_queue` requests are waiting already."""


class DeadlineExceededError(LazyRAGError):
    """The request was not finished `deadline` seconds after its submission."""


class UnknownChunkError(LazyRAGError):
    """A chunk or document id that this runtime does not hold."""


class DocumentError(LazyRAGError):
    """A document cannot be read: missing, unreadable, not UTF-8, of an unknown kind, or outside the given folder."""


class RetrieverError(LazyRAGError):
    """No embedder, an invalid filter, or an index built with another embedder."""


class StoreError(LazyRAGError):
    """A store folder cannot be used: unwritable, of another schema, or of another model."""


class IncompleteAnswerError(LazyRAGError):
    """An answer was cut off before it was complete JSON."""


class EngineError(LazyRAGError):
    """A step failed inside the engine; the original exception is chained as `__cause__`."""


class RuntimeClosedError(LazyRAGError):
    """The runtime was closed before or while the call ran."""


class MissingExtraError(LazyRAGError, ImportError):
    """A package that an optional part needs is not installed; the message names the extra."""

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(f'{part} needs {package}: pip install "lazy-rag[{extra}]"')
