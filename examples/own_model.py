# %% [markdown]
# # Your own model, and how to check it
#
# Any `transformers` causal model of a supported family can be given as a live object with its tokenizer. This page
# builds a tiny Llama with random weights and a byte-level tokenizer, so that it runs anywhere in seconds; put your own
# in their place.

# %%
import lazy_rag

lazy_rag.__version__

# %%
import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
specials = ["<pad>", "<bos>", "<eos>"]
backend.train_from_iterator([], trainers.BpeTrainer(special_tokens=specials, initial_alphabet=alphabet))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
tokenizer.chat_template = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), num_key_value_heads=2, **shape, **ends)
model = AutoModelForCausalLM.from_config(config).eval()
stock = copy.deepcopy(model)  # for the checks below

# %% [markdown]
# The runtime drives the model from now on. `embedder=None`: this page chooses its chunks itself.

# %%
from lazy_rag import Runtime, SamplingParams

rt = Runtime(model, tokenizer=tokenizer, embedder=None, cache_bytes=16 << 20)
first, second = rt.add_chunks(["The gate is opened at dawn.", "The bell is rung twice a day."])
rt

# %% [markdown]
# ## Check 1: ordinary attention is ordinary attention
#
# With `repair="exact"` nothing but the opening is taken from the cache. The stock model over the same tokens must give
# the same logits. The copy of the model that was made above serves for it.


# %%
def largest_difference(layout):
    with torch.no_grad():
        expected = stock(torch.tensor([layout.token_ids()])).logits[0, -1]
    return (rt.next_token_logits(layout) - expected).abs().max().item()


exact = largest_difference(rt.layout("When is the gate opened?", [first, second], repair="exact"))
print(f"largest difference of a logit: {exact:.1e}")
assert exact < 1e-3

# %% [markdown]
# ## Check 2: a cached chunk right behind the opening
#
# There the chunk stands just as it was encoded, so its cached keys and values are those of ordinary attention too.

# %%
layout = rt.layout("When is the gate opened?", [first])
cached = largest_difference(layout)
print(f"largest difference of a logit: {cached:.1e}")
assert cached < 1e-3
layout

# %% [markdown]
# ## What several chunks change
#
# Chunks do not attend to each other: each was encoded alone. That differs from ordinary attention, and how much it
# matters depends on the model and the task. It is measured here on random weights, which exaggerate it; measure your
# own model on your own questions.

# %%
for repair in ("none", "head", "exact"):
    layout = rt.layout("When is the gate opened?", [second, first], repair=repair)
    difference = largest_difference(layout)
    print(f"repair={repair:<6}  {layout.live_tokens:>3} live tokens  largest difference of a logit {difference:.1e}")

# %% [markdown]
# ## A model that cannot be supported is refused
#
# GPT-2 adds learned absolute positions to its inputs: a chunk's keys could not be moved.

# %%
from lazy_rag import LazyRAGError

gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2))
try:
    Runtime(gpt2, tokenizer=tokenizer, embedder=None)
except LazyRAGError as error:
    print(f"{type(error).__name__}: {error}")

# %%
answer = rt.generate("When?", [second, first], sampling=SamplingParams(max_tokens=8, temperature=0))
assert answer.receipt.tokens_reused > 0
rt.close()
