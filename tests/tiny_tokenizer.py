"""A tiny byte-level BPE tokenizer trained in-process: no files, no network, the same vocabulary every time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

DEFAULT_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 384

_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. The cache holds the keys and values of every chunk.\n\n"
    "A question about the document is answered from the retrieved chunks, and the answer names the source.\n"
    "user assistant system: You are a helpful assistant. What is the capital of France? The capital is Paris.\n"
    "def attention(query, key, value): return softmax(query @ key.T) @ value\n"
)


def tiny_tokenizer(
    chat_template: str | None = None,
    special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_bos: bool = False,
    added_tokens: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of `VOCAB_SIZE` ids (plus `added_tokens`) in which every byte is a token.

    Special tokens get the ids 0, 1, ... in their order. The first is also the padding token; `bos_token` and
    `eos_token` must be among them, and `eos_token` defaults to the last. With `add_bos` a plain encoding starts with
    `bos_token`, as Llama's does. `added_tokens` are control tokens that are not flagged special (`<think>` in Qwen3);
    they come after the trained vocabulary.
    """
    specials = list(special_tokens)
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    backend.train_from_iterator([_TRAINING_TEXT], trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added_tokens])
    if add_bos:
        if bos_token is None:
            raise ValueError("add_bos needs bos_token")
        bos_id = backend.token_to_id(bos_token)
        backend.post_processor = TemplateProcessing(
            single=f"{bos_token} $A", pair=f"{bos_token} $A $B", special_tokens=[(bos_token, bos_id)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos_token,
        eos_token=eos_token or (specials[-1] if specials else None),
        pad_token=specials[0] if specials else None,
        additional_special_tokens=specials,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
