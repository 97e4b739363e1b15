# %% [markdown]
# # What is reused, and why
#
# A prompt is a list of segments (cached chunks, each at an offset) and live runs (tokens computed for this request
# only). A chunk's keys are stored without a place in a prompt; the offset is applied inside attention. So the same copy
# serves any order, any neighbours and any question.

# %%
from lazy_rag import ChunkRange, Live, Runtime, SamplingParams

rt = Runtime.shared("smollm2-135m", progress=False)
short = SamplingParams(temperature=0, max_tokens=8)
river, tower, market = rt.add_chunks(
    [
        "The river Amble is 214 km long. It rises in the Dun hills and reaches the sea at Port Marrow.",
        "The old tower of Port Marrow has 199 steps. From its top one sees the sea and the hills.",
        "The market of Port Marrow is held on Saturdays in front of the town hall. Fish is sold until noon.",
    ]
)

# %% [markdown]
# `layout` gives the prompt without running it. Blue parts are segments, grey parts are live.

# %%
layout = rt.layout("How long is the Amble?", [river, tower])
layout

# %%
[(explanation.offset, explanation.hit, explanation.reason) for explanation in rt.explain(layout)]

# %% [markdown]
# The chunks were added without being computed. The first request encodes them while it waits (orange) ...

# %%
rt.generate(layout, sampling=short)

# %% [markdown]
# ... and from then on they are found (green): in another order, with another question, with live text between them,
# and as a part of a chunk. Only `market`, which no request has used yet, is encoded.

# %%
rt.generate("What is sold?", [Live("First source:\n"), tower, market, Live("Second source:\n"), river], sampling=short)

# %%
answer = rt.generate("How long?", [ChunkRange(river, 0, 16), tower], sampling=short)
assert answer.receipt.reuse == 1
answer.receipt

# %% [markdown]
# Another system text makes the opening of the prompt a live run; the chunks are used all the same.

# %%
answer = rt.generate("How long is the Amble?", [river, tower], system="Answer in one word.", sampling=short)
assert answer.receipt.tokens_encoded == 0
answer.layout

# %% [markdown]
# A repair recomputes part of a chunk in the context of the prompt. `"head"` makes the first page of every chunk live;
# `"exact"` makes everything live, which is ordinary full attention.

# %%
rt.layout("How long is the Amble?", [river, tower], repair="head")

# %% [markdown]
# Figures of the requests so far: which chunk uses were found, where the time went, which chunks are hot, and what the
# cache holds.

# %%
from lazy_rag.plots import plot_hit_ratio, plot_hot_chunks, plot_occupancy, plot_times

plot_hit_ratio(rt)

# %%
plot_times(rt)

# %%
plot_hot_chunks(rt)

# %%
plot_occupancy(rt)

# %%
rt.close()
