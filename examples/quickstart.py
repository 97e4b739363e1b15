# %% [markdown]
# # Quickstart
#
# One object holds the language model, the cache of chunk KV and the retriever. `Runtime.shared` gives the runtime that
# is already loaded when this cell runs again. `smollm2-135m` is small and comes as a package; a real application names
# a larger model from the Hugging Face hub.

# %%
from lazy_rag import Runtime, SamplingParams

rt = Runtime.shared("smollm2-135m", progress=False)
greedy = SamplingParams(temperature=0, max_tokens=40, stop="\n")

# %% [markdown]
# Add documents: paths, folders, texts, or documents of LlamaIndex or LangChain. Each is cut into chunks, embedded, and
# its keys and values are computed, once.

# %%
handbook = [
    "The lighthouse of Gull Point was built in 1871. It is 42 metres high and stands on a granite rock.",
    "The keeper of the lighthouse is Martha Ellison. She has lived at Gull Point since 1998.",
    "The lamp turns once in twelve seconds. In fog a horn sounds every minute.",
    "The ferry to Gull Point leaves Port Marrow at 9:15 and at 14:40. A ticket costs six crowns.",
]
chunks = rt.add_documents(handbook)
len(chunks)

# %% [markdown]
# Ask. The answer shows itself: the text, then the prompt as a bar of what stands where, then what each part cost. All
# chunks are "found in memory": they were computed when they were added, and none of them is computed again.

# %%
answer = rt.query("When was the lighthouse built?", k=2, sampling=greedy)
answer

# %%
print(answer.text)
print(answer.receipt)

# %% [markdown]
# A stream on the last line of a cell shows its text as it comes, and ends as the answer.

# %%
rt.stream("Who is the keeper of the lighthouse?", k=2, sampling=greedy)

# %% [markdown]
# Top-level `await` works, and so does any number of questions at once.

# %%
import asyncio

questions = ["How high is the lighthouse?", "How much does a ferry ticket cost?"]
answers = await asyncio.gather(*(rt.aquery(question, k=2, sampling=greedy) for question in questions))
for question, answer in zip(questions, answers, strict=True):
    print(f"{question}  {answer.text.strip()}  ({answer.receipt.reuse:.0%} of the chunk tokens from the cache)")

# %% [markdown]
# In a notebook there are also magics, and the runtime shows its state.

# %%
# %load_ext lazy_rag

# %%
# %rag_stats

# %%
rt.close()
